"""Show what a config of another software specifies: model, layout and job, then its keys as they were understood."""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from fivefold.job import Job
from fivefold.rendering.grid import Column, Grid, make_grid
from fivefold.rendering.question import count_ranks, list_changed_settings
from fivefold.rendering.table import build_heading
from fivefold.results.reading import ParsedKey, Reading
from fivefold.units import show_count

KEYS = tuple(
    Column[ParsedKey](name, attrgetter(field), is_text=True)
    for name, field in (("key", "key"), ("value", "value"), ("meaning", "means"))
)


class KeyGroup(NamedTuple):
    """The keys of a config that were read in one way, under a title; ``note``: what this means for an answer."""

    title: str
    note: str
    keys: tuple[ParsedKey, ...]

    @property
    def grid(self) -> Grid:
        """Return the keys as a table; the terminal prints a line for each."""
        return make_grid(KEYS, self.keys)


def list_groups(reading: Reading) -> list[KeyGroup]:
    """Return the keys of a config by how they were read, those first that an answer does not count as they are."""
    groups = (
        KeyGroup(
            "Not modelled",
            "may change what a step costs: predictions fail unless --ignore KEY names them",
            reading.not_understood,
        ),
        KeyGroup("Approximated", "counted as the nearest setting", reading.approximated),
        KeyGroup("Understood", "", reading.understood),
        KeyGroup("Left to defaults", f"as {reading.software} {reading.version} has them", reading.defaulted),
        KeyGroup("Without effect", "on a training step", reading.harmless),
    )
    return [group for group in groups if group.keys]


def render_page(reading: Reading) -> RenderableType:
    """Return the page of a reading."""
    parts: list[RenderableType] = [
        Text(f"{reading.origin}: {reading.software} {reading.version}", style="bold", overflow="fold"),
        *(Text(f"{name:<8}{text}", overflow="fold") for name, text in list_records(reading)),
    ]
    parts += [Text(f"· missing: {why}", "red", overflow="fold") for why in reading.missing]
    parts += [Text(f"· error: {why}", "red", overflow="fold") for why in reading.errors]
    for title, note, keys in list_groups(reading):
        parts += [build_heading(title, note), Group(*map(_format_key, keys))]
    return Group(*parts)


def list_records(reading: Reading) -> list[tuple[str, str]]:
    """Return the model, layout, job, stack and data of a config as text, each with its name."""
    model, job = reading.model, reading.job
    records = [
        ("model", f"{model.name}, {show_count(model.parameters)} parameters" if model else ""),
        ("layout", f"{reading.layout}, {count_ranks(reading.layout.world)}" if reading.layout else ""),
        ("job", _describe_job(job) if job else ""),
        ("stack", job.stack.name if job else ""),
        ("data", ", ".join(f"{name} {value}" for name, value in reading.data.fields.items()) if reading.data else ""),
    ]
    return [(name, text) for name, text in records if text]


def _describe_job(job: Job) -> str:
    """Return the main fields of a job in one line: of adapters, frozen parts and offloading those that it has."""
    parts = [f"sequence {job.sequence}", f"global batch {job.global_batch}", job.precision.name, job.optimizer.kind]
    parts += [f"documents {job.documents}"]
    fields = ("adapter", "freeze", "offload")
    parts += [f"{name}={value}" for name, value in list_changed_settings(job) if name.partition(".")[0] in fields]
    return ", ".join(parts)


def _format_key(row: ParsedKey) -> Text:
    text = Text(f"{row.key} = {row.value}", overflow="fold")
    return text.append(f"  {row.means}", "dim")

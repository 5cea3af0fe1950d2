"""Show what a config of another software specifies: model, layout and job, then its keys as they were understood."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from fivefold.job import Job
from fivefold.rendering.question import count_ranks, list_changed_settings
from fivefold.rendering.table import build_heading
from fivefold.results.reading import ParsedKey, Reading
from fivefold.units import show_count


def render_page(reading: Reading) -> RenderableType:
    """Return the page of a reading."""
    records = [(name, text) for name, text in _list_records(reading) if text]
    parts: list[RenderableType] = [
        Text(f"{reading.origin}: {reading.software} {reading.version}", style="bold", overflow="fold"),
        *(Text(f"{name:<8}{text}", overflow="fold") for name, text in records),
    ]
    parts += [Text(f"· missing: {why}", "red", overflow="fold") for why in reading.missing]
    parts += [Text(f"· error: {why}", "red", overflow="fold") for why in reading.errors]
    if reading.not_understood:
        note = "may change what a step costs: predictions fail unless --ignore KEY names them"
        parts += [build_heading("Not modelled", note), _group_keys(reading.not_understood)]
    if reading.approximated:
        parts += [build_heading("Approximated", "counted as the nearest setting"), _group_keys(reading.approximated)]
    if reading.understood:
        parts += [build_heading("Understood"), _group_keys(reading.understood)]
    if reading.defaulted:
        note = f"as {reading.software} {reading.version} has them"
        parts += [build_heading("Left to defaults", note), _group_keys(reading.defaulted)]
    if reading.harmless:
        parts += [build_heading("Without effect", "on a training step"), _group_keys(reading.harmless)]
    return Group(*parts)


def _list_records(reading: Reading) -> list[tuple[str, str]]:
    model, job = reading.model, reading.job
    return [
        ("model", f"{model.name}, {show_count(model.parameters)} parameters" if model else ""),
        ("layout", f"{reading.layout}, {count_ranks(reading.layout.world)}" if reading.layout else ""),
        ("job", _describe_job(job) if job else ""),
        ("stack", job.stack.name if job else ""),
        ("data", ", ".join(f"{name} {value}" for name, value in reading.data.fields.items()) if reading.data else ""),
    ]


def _describe_job(job: Job) -> str:
    """Return the main fields of a job in one line: of adapters, frozen parts and offloading those that it has."""
    parts = [f"sequence {job.sequence}", f"global batch {job.global_batch}", job.precision.name, job.optimizer.kind]
    parts += [f"documents {job.documents}"]
    fields = ("adapter", "freeze", "offload")
    parts += [f"{name}={value}" for name, value in list_changed_settings(job) if name.partition(".")[0] in fields]
    return ", ".join(parts)


def _group_keys(rows: Sequence[ParsedKey]) -> Group:
    """Return a line for each key: its value in the config, and its meaning or why it is not understood."""
    return Group(*(_format_key(row) for row in rows))


def _format_key(row: ParsedKey) -> Text:
    text = Text(f"{row.key} = {row.value}", overflow="fold")
    return text.append(f"  {row.means}", "dim")

"""Show what a config of another software specifies: model, layout and job, then its keys as they were understood."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from fivefold.rendering.table import heading
from fivefold.results.reading import Reading, Said
from fivefold.units import show_count


def page(found: Reading) -> RenderableType:
    """Return the page of a reading."""
    records = [(name, text) for name, text in _nouns(found) if text]
    parts: list[RenderableType] = [
        Text(f"{found.origin}: {found.software} {found.version}", style="bold", overflow="fold"),
        *(Text(f"{name:<8}{text}", overflow="fold") for name, text in records),
    ]
    parts += [Text(f"· not said: {why}", "red", overflow="fold") for why in found.missing]
    parts += [Text(f"· refused: {why}", "red", overflow="fold") for why in found.refused]
    if found.not_understood:
        note = "may change what a step costs: an answer is an error, unless --ignore KEY names them"
        parts += [heading("Not modelled", note), _keys(found.not_understood)]
    if found.approximated:
        parts += [heading("Approximated", "counted as the nearest setting"), _keys(found.approximated)]
    if found.understood:
        parts += [heading("Understood"), _keys(found.understood)]
    if found.defaulted:
        note = f"as {found.software} {found.version} has them"
        parts += [heading("Left to defaults", note), _keys(found.defaulted)]
    if found.harmless:
        parts += [heading("Without effect", "on a training step"), _keys(found.harmless)]
    return Group(*parts)


def _nouns(found: Reading) -> list[tuple[str, str]]:
    model, job = found.model, found.job
    return [
        ("model", f"{model.name}, {show_count(model.parameters)} parameters" if model else ""),
        ("layout", f"{found.layout}, {found.layout.world} ranks" if found.layout else ""),
        (
            "job",
            f"sequence {job.sequence}, global batch {job.global_batch}, {job.precision.name}, {job.optimizer.kind}, "
            f"documents {job.documents}"
            if job
            else "",
        ),
        ("stack", job.stack.name if job else ""),
    ]


def _keys(rows: Sequence[Said]) -> Group:
    """Return a line for each key: its value in the config, and its meaning or why it is not understood."""
    return Group(*(_key(row) for row in rows))


def _key(row: Said) -> Text:
    text = Text(f"{row.key} = {row.value}", overflow="fold")
    return text.append(f"  {row.means}", "dim")

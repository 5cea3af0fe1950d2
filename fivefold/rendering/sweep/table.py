"""The page of a sweep: how many rows came to what, and the best layout of each setting, or every measured row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from fivefold.rendering.grid import Grid
from fivefold.rendering.sweep.settings import best, describe_rows, mfu, varied
from fivefold.rendering.table import heading
from fivefold.results.sweep_row import Row, Status
from fivefold.units import show_bytes, show_seconds

SHOWN = 60  # rows; the others are in the file
WHY = 5  # reasons that are said, commonest first
WORDS: dict[Status, str] = {"fits": "fit", "memory": "do not fit in memory", "refused": "cannot be"}


def page(rows: Sequence[Row]) -> RenderableType:
    """The whole page."""
    counted = Counter(row.status for row in rows)
    said = ", ".join(f"{counted[status]:,} {words}" for status, words in WORDS.items() if counted[status])
    parts: list[RenderableType] = [heading(f"{len(rows):,} rows: {said}" if rows else "No rows", describe_rows(rows))]
    trials = [row for row in rows if row.measured and row.status == "fits"]
    if trials:
        parts += [heading("Predicted and measured", _outcomes(trials)), _measured(trials, axes=varied(rows))]
    elif counted["fits"]:
        parts += [heading("The best layout of each setting", "by MFU, causal"), _best(rows)]
    reasons = Counter(row.why for row in rows if row.status == "refused")
    for why, times in reasons.most_common(WHY):
        parts.append(Text(f"{times:,} refused: {why}", style="dim"))
    return Group(*parts)


def _best(rows: Sequence[Row]) -> RenderableType:
    axes = varied(rows)
    found = list(best(rows, lambda row: tuple(getattr(row, axis) for axis in axes)).values())
    headings = (*axes, "layout", "MFU", "step", "memory")
    cells = tuple(
        (
            *(str(getattr(row, axis)) for axis in axes), row.layout, f"{mfu(row):.1%}",
            show_seconds(row.step_seconds or 0), show_bytes(row.peak_bytes or 0),
        )
        for row in found[:SHOWN]
    )  # fmt: skip
    return Group(Grid(headings, cells, words=("layout",)), *_more(len(found)))


def _measured(rows: Sequence[Row], *, axes: Sequence[str]) -> RenderableType:
    headings = (*axes, "layout", "predicted", "measured", "difference", "peak", "measured", "")
    cells = tuple(
        (
            *(str(getattr(row, axis)) for axis in axes), row.layout, show_seconds(row.step_seconds or 0),
            show_seconds(row.measured_step_seconds) if row.measured_step_seconds else row.measured,
            _error(row.step_seconds, row.measured_step_seconds), show_bytes(row.peak_bytes or 0),
            show_bytes(row.measured_peak_bytes) if row.measured_peak_bytes else "", row.measured_why,
        )
        for row in rows[:SHOWN]
    )  # fmt: skip
    if not any(row.measured_why for row in rows):
        headings, cells = headings[:-1], tuple(each[:-1] for each in cells)
    return Group(Grid(headings, cells, words=("layout", "")), *_more(len(rows)))


def _outcomes(rows: Sequence[Row]) -> str:
    counted = Counter(row.measured for row in rows)
    return ", ".join(f"{number} {outcome}" for outcome, number in counted.items())


def _error(predicted: float | None, measured: float | None) -> str:
    return f"{predicted / measured - 1:+.1%}" if predicted and measured else ""


def _more(rows: int) -> list[RenderableType]:
    return [Text(f"{rows - SHOWN:,} more are in the file", style="dim")] if rows > SHOWN else []

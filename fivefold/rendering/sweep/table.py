"""The page of a sweep: the number of rows by outcome, and the best layout of each setting, or every measured row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

from rich.console import Group, RenderableType
from rich.text import Text

from fivefold.rendering.grid import Column, Grid, make_grid, show_change, show_share
from fivefold.rendering.sweep.settings import describe_rows, find_best, get_mfu, list_varied_axes
from fivefold.rendering.table import build_heading
from fivefold.results.sweep_row import Status, SweepRow
from fivefold.units import show_bytes, show_count, show_seconds

MAX_ROWS = 60  # maximum rows; the others are in the file
WHY = 5  # maximum number of reasons listed, most common first
WORDS: dict[Status, str] = {"fits": "fit", "memory": "do not fit in memory", "invalid": "invalid"}


def render_page(rows: Sequence[SweepRow]) -> RenderableType:
    """Return the page of a sweep."""
    count_by_status = Counter(row.status for row in rows)
    outcomes = ", ".join(
        f"{count_by_status[status]:,} {words}" for status, words in WORDS.items() if count_by_status[status]
    )
    parts: list[RenderableType] = [
        build_heading(f"{len(rows):,} rows: {outcomes}" if rows else "No rows", describe_rows(rows))
    ]
    trials = [row for row in rows if row.measured and row.status == "fits"]
    if trials:
        parts += [
            build_heading("Predicted and measured", _count_outcomes(trials)),
            _shorten(_make_measured_grid(trials, axes=list_varied_axes(rows))),
        ]
    elif count_by_status["fits"]:
        parts += [build_heading("The best layout of each setting", "by MFU, causal"), _shorten(make_best_grid(rows))]
    reasons = Counter(row.why for row in rows if row.status == "invalid")
    for reason, times in reasons.most_common(WHY):
        parts.append(Text(f"{times:,} invalid: {reason}", style="dim"))
    return Group(*parts)


def make_best_grid(rows: Sequence[SweepRow], *, most: int | None = None) -> Grid:
    """Return the table of the best layout of each setting, of the first ``most`` settings."""
    axes = list_varied_axes(rows)
    chosen = find_best(rows, lambda row: tuple(getattr(row, axis) for axis in axes))
    return make_row_grid(list(chosen.values())[:most], axes=axes)


def make_row_grid(rows: Sequence[SweepRow], *, axes: Sequence[str]) -> Grid:
    """Return the table of these rows, with a column for each of ``axes``."""
    return make_grid((*_make_axis_columns(axes), *ROWS), rows)


def _make_axis_columns(axes: Sequence[str]) -> list[Column[SweepRow]]:
    return [Column(axis, attrgetter(axis), is_text=axis in TEXT_AXES) for axis in axes]


def _shorten(grid: Grid) -> RenderableType:
    """Return the first ``MAX_ROWS`` rows of a table, and the number of the others."""
    rest = (
        [Text(f"{len(grid.rows) - MAX_ROWS:,} more are in the file", style="dim")] if len(grid.rows) > MAX_ROWS else []
    )
    return Group(
        replace(grid, rows=grid.rows[:MAX_ROWS], values=grid.values[:MAX_ROWS], records=grid.records[:MAX_ROWS]), *rest
    )


def _make_measured_grid(rows: Sequence[SweepRow], *, axes: Sequence[str]) -> Grid:
    columns = [column for column in MEASURED if column.heading or any(row.measured_why for row in rows)]
    return make_grid((*_make_axis_columns(axes), *columns), rows)


def _count_outcomes(rows: Sequence[SweepRow]) -> str:
    count_by_outcome = Counter(row.measured for row in rows)
    return ", ".join(f"{number} {outcome}" for outcome, number in count_by_outcome.items())


def _compute_error(row: SweepRow) -> float | None:
    predicted, measured = row.step_seconds, row.measured_step_seconds
    return predicted / measured - 1 if predicted and measured else None


def _show_measured(row: SweepRow) -> str:
    return show_seconds(row.measured_step_seconds) if row.measured_step_seconds else row.measured


TEXT_AXES = ("model", "machine", "precision", "stack", "status", "why")
ROWS: tuple[Column[SweepRow], ...] = (
    Column("layout", attrgetter("layout"), is_text=True),
    Column("MFU", get_mfu, show_share),
    Column("step", attrgetter("step_seconds"), show_seconds),
    Column("memory", attrgetter("peak_bytes"), show_bytes),
    Column("tokens/s/GPU", attrgetter("tokens_per_second_per_gpu"), show_count, is_wide=True),
    Column("most time in", attrgetter("longest_part"), is_text=True, is_wide=True),
    Column("measured step", attrgetter("measured_step_seconds"), show_seconds, is_wide=True),
    Column("measured memory", attrgetter("measured_peak_bytes"), show_bytes, is_wide=True),
)
MEASURED: tuple[Column[SweepRow], ...] = (
    Column("layout", attrgetter("layout"), is_text=True),
    Column("predicted", attrgetter("step_seconds"), show_seconds),
    Column("measured", _show_measured),
    Column("difference", _compute_error, show_change, missing=""),
    Column("peak", attrgetter("peak_bytes"), show_bytes),
    Column("measured", lambda row: row.measured_peak_bytes or None, show_bytes, missing=""),
    Column("", attrgetter("measured_why"), is_text=True),
)

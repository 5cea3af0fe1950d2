"""Time of a step by cause, predicted next to measured, and the error budget: the parts that make up the error.

part                       predicted  measured  difference
attention.core backward      31.2 ms   46.0 ms    -14.8 ms
dp reduce_scatter             4.1 ms   12.9 ms     -8.8 ms
rest                         80.1 ms   83.0 ms     -2.9 ms       together the difference of the two steps
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from fivefold.rendering.grid import Column, Grid, make_grid
from fivefold.rendering.step_view import list_time_parts
from fivefold.rendering.table import build_heading
from fivefold.step import Step, Time
from fivefold.units import show_seconds

MAX_BUDGET_ROWS = 12  # lines of a budget above the rest
REST = "rest"


class BudgetRow(NamedTuple):
    """A part of both steps, in seconds."""

    part: str
    predicted: float
    measured: float

    @property
    def difference(self) -> float:
        """Return predicted minus measured seconds."""
        return self.predicted - self.measured


def split_by_cause(step: Step) -> dict[str, float]:
    """Return seconds by cause; they add up to the step."""
    return {part.name: part.size for part in list_time_parts(step, zeros=True)}


def list_differences(predicted: Time, measured: Time, *, shown: int = MAX_BUDGET_ROWS) -> list[BudgetRow]:
    """Return the parts, the largest difference first.

    The last line is the rest, so that the differences add up to that of the steps.
    """
    names = dict.fromkeys([*measured.parts, *predicted.parts])
    lines = [BudgetRow(name, predicted.parts.get(name, 0.0), measured.parts.get(name, 0.0)) for name in names]
    lines = sorted(lines, key=lambda line: -abs(line.difference))[:shown]
    predicted_rest = predicted.step_seconds - sum(line.predicted for line in lines)
    return [*lines, BudgetRow(REST, predicted_rest, measured.step_seconds - sum(line.measured for line in lines))]


def overlap(time: Time) -> dict[str, float]:
    """Return the share of the messages of each axis that was overlapped."""
    axes = dict.fromkeys([*time.exposed_seconds, *time.overlapped_seconds])
    total_seconds = {
        axis: time.exposed_seconds.get(axis, 0.0) + time.overlapped_seconds.get(axis, 0.0) for axis in axes
    }
    return {
        axis: time.overlapped_seconds.get(axis, 0.0) / seconds for axis, seconds in total_seconds.items() if seconds
    }


def render_page(steps: Sequence[Step], *, findings: Sequence[str] = ()) -> RenderableType:
    """Return the split of ``steps``, the error budget, then the findings.

    The first of ``steps`` is predicted and the last measured. If the measured time was not split, there is only a line
    that says so.
    """
    predicted, measured = steps[0].time, steps[-1].time
    if not measured.parts:
        return Text("no step was traced, so the measured time is not broken down", style="dim")
    parts: list[RenderableType] = [build_heading("Time", "of the rank that waits least"), _split(steps)]
    overlap_text = ", ".join(f"{axis} {share:.0%}" for axis, share in overlap(measured).items())
    if overlap_text:
        parts.append(Text(f"overlapped with compute, measured: {overlap_text}", style="dim"))
    error = predicted.step_seconds - measured.step_seconds
    remark = f"{show_difference(error)} of {show_seconds(measured.step_seconds)}, the largest parts first"
    parts += [build_heading("What the error consists of", remark), make_budget_grid(predicted, measured)]
    if findings:
        parts += [Text(""), *(Text(line, style="bold", overflow="fold") for line in findings)]
    return Group(*parts)


def _split(steps: Sequence[Step]) -> Grid:
    columns = [split_by_cause(step) | {"step": step.time.step_seconds} for step in steps]
    names = [name for name in dict.fromkeys(name for column in columns for name in column) if name != "step"]
    rows = [_format_row(name, columns) for name in names if any(column.get(name, 0.0) for column in columns)]
    headings = ("part", *(step.kind for step in steps), "difference")
    return Grid(headings, (*rows, _format_row("step", columns)), words=("part",))


def _format_row(name: str, columns: Sequence[Mapping[str, float]]) -> tuple[str, ...]:
    seconds = [column.get(name, 0.0) for column in columns]
    return name, *map(show_seconds, seconds), show_difference(seconds[0] - seconds[-1])


def make_budget_grid(predicted: Time, measured: Time) -> Grid:
    """Return the parts of the error as a table."""
    return make_grid(BUDGET, list_differences(predicted, measured))


def show_difference(seconds: float) -> str:
    """Return a difference of seconds with its sign."""
    return f"{'-' if seconds < 0 else '+'}{show_seconds(abs(seconds))}"


BUDGET: tuple[Column[BudgetRow], ...] = (
    Column("part", attrgetter("part"), is_text=True),
    Column("predicted", attrgetter("predicted"), show_seconds),
    Column("measured", attrgetter("measured"), show_seconds),
    Column("difference", attrgetter("difference"), show_difference),
)

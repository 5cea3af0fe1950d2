"""Show the step of a dry run as a page of text: findings first, then memory at the peak, time, traffic and work.

does not fit: rank 0 needs 95.1 GiB …                                     (red, first) activations  31.00 GiB  48.1 %
██████████████ 7.00 GiB  64 × 112 MiB  activations allocated in forward of micro-batch 1: blocks.*.mlp
(trainer/model/linear.py:144 …)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from fivefold.rendering.compare import render_table as compared
from fivefold.rendering.grid import Grid
from fivefold.rendering.stages import StageTable
from fivefold.rendering.step_view import Parts, split_bytes, view_step
from fivefold.rendering.table import build_heading, show_bars, show_headline, show_section
from fivefold.results.step_comparison import compare
from fivefold.step import StageMemory, Step
from fivefold.units import show_bytes, show_cause


class PeakTensors(NamedTuple):
    """Tensors live at the peak that one line has allocated, in modules of one kind (``blocks.*.mlp``)."""

    bytes: int  # total
    number: int
    largest_bytes: int
    category: str
    allocated_in: str  # scope of their allocation, "forward of micro-batch 1"; "" if before the step, or if several
    module: str
    line: str  # file:line function


class RankPeak(NamedTuple):
    """The memory peak of a rank's step."""

    rank: int
    parts: Mapping[str, int]  # bytes by category; they add up to the peak
    largest: Sequence[PeakTensors]


def render_page(
    step: Step,
    *,
    findings: Sequence[str],
    moment: RankPeak,
    first: StageMemory,
    predicted: Step | None = None,
    assumed: Sequence[str] = (),
) -> RenderableType:
    """Return the page of a dry run.

    ``assumed``: where the dry run differs from the real run. ``first``: memory of the first step on ``moment.rank``,
    the rank that is fullest in the steady step.
    """
    stages = step.memory.stages
    fullest = max(stages, key=lambda stage: stage.peak_bytes)
    parts: list[RenderableType] = [render_failures([*findings, ""])] if findings else []
    parts += [show_headline(step), *(Text(f"assumed: {line}", style="dim") for line in assumed)]
    parts += [build_heading(f"Memory of rank {moment.rank} at its peak", show_cause(fullest.peak_cause))]
    parts += [show_bars(Parts(split_bytes(moment.parts), fullest.peak_bytes))]
    if len(stages) > 1:
        by_stage = StageTable(stages)
        parts += [build_heading("Memory by pipeline rank", by_stage.legend), by_stage]
    parts += [build_heading("First step and later steps", "the optimizer allocates its states in the first step")]
    parts += [_make_steps_grid(first, fullest)]
    parts += [
        build_heading("Tensors at the peak", f"the largest on rank {moment.rank}, by the line that allocated them"),
        _make_largest_grid(moment.largest),
    ]
    view = view_step(step)
    parts += [
        show_section(view.time._replace(remark="estimated from the kernels and messages of the dry run, not measured"))
    ]
    parts += [show_section(view.traffic)]
    parts += [show_section(view.work)]
    if predicted is not None:
        parts += _compare(predicted, step)
    return Group(*parts)


def render_failures(lines: Sequence[str]) -> RenderableType:
    """Return the findings in red, one per line: why the job would fail."""
    return Group(*(Text(line, style="bold red", overflow="fold") for line in lines))


def _make_steps_grid(first: StageMemory, later: StageMemory) -> Grid:
    steps = {"first": first, "later": later}
    rows = tuple(
        (name, show_bytes(memory.peak_bytes), show_cause(memory.peak_cause) or "–") for name, memory in steps.items()
    )
    return Grid(("step", "peak memory", "reached in"), rows, words=("step", "reached in"))


def _make_largest_grid(largest: Sequence[PeakTensors]) -> Grid:
    rows = tuple(
        (show_bytes(holding.bytes), _format_tensors(holding), _describe_holding(holding)) for holding in largest
    )
    return Grid(("size", "tensors", "allocated by"), rows, words=("allocated by",))


def _format_tensors(holding: PeakTensors) -> str:
    if holding.number * holding.largest_bytes == holding.bytes:
        return f"{holding.number:,} × {show_bytes(holding.largest_bytes)}"
    return f"{holding.number:,} of up to {show_bytes(holding.largest_bytes)}"


def _describe_holding(holding: PeakTensors) -> str:
    origin = f"{holding.category} allocated in {holding.allocated_in}" if holding.allocated_in else holding.category
    location = " ".join(filter(None, (holding.module, f"({holding.line})" if holding.line else "")))
    return f"{origin}: {location}" if location else origin


def _compare(predicted: Step, step: Step) -> list[RenderableType]:
    """Compare with the planner's step; counts, which must be equal, are listed only if they differ."""
    rows = compare(predicted, step)
    counts = [row for row in rows if row.exact]
    wrong = [row for row in counts if row.is_wrong]
    equal = f"{len(counts) - len(wrong)} of {len(counts)} counts are equal: parameters, states, FLOPs, messages, bytes"
    if predicted.time.longest_part.startswith("kernel launches"):
        equal += "; the prediction has most time in kernel launches (CPU-bound), which the two estimate differently"
    shown = [*wrong, *(row for row in rows if not row.exact)]
    return [build_heading("Predicted and dry-run", equal), compared(shown, headings=("predicted", "dry run"))]

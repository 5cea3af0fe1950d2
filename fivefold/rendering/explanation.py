"""Show what is known of a failed or unusual run: a verdict, findings, memory by category and line, ranks, losses.

GPU 0 ran out of memory in the backward, at train.py:31 step: 2.00 GiB were asked for, and tensors hold 74.1 of 79.1 GiB
· tensors fill it: 1.20 GiB more are needed least change that fits: ac=selective, 61.2 GiB at the peak, 2 % slower
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from fivefold.rendering.grid import Grid
from fivefold.rendering.step_view import Parts, split_bytes
from fivefold.rendering.table import heading, show_bars
from fivefold.results.explanation import AgainstPrediction, Explanation, HeldMemory
from fivefold.units import show_bytes


def page(explanations: Sequence[Explanation], *, comparison: AgainstPrediction | None = None) -> RenderableType:
    """Return all explanations, one after another, then the prediction."""
    parts: list[RenderableType] = []
    for explanation in explanations:
        files = explanation.files[0] if len(explanation.files) == 1 else f"{len(explanation.files)} files"
        parts.append(
            Text.assemble((f"{explanation.kind}  {files}\n", "dim"), (explanation.verdict, "bold"), overflow="fold")
        )
        parts += [Text(f"· {line}", overflow="fold") for line in explanation.findings]
        if explanation.memory is not None:
            parts += _memory(explanation.memory)
        if explanation.ranks:
            rows = tuple(
                (rank_state.rank, rank_state.state, rank_state.line or "–") for rank_state in explanation.ranks
            )
            parts += [heading("By rank"), Grid(("rank", "state", "line"), rows, words=("rank", "state", "line"))]
        if explanation.losses:
            parts += [
                heading("What happened"),
                *(Text(f"· {event.line}", overflow="fold") for event in explanation.losses),
            ]
        parts.append(Text(""))
    if comparison is not None:
        parts += _prediction(comparison)
    return Group(*parts)


def _memory(memory: HeldMemory) -> list[RenderableType]:
    total_bytes = max(sum(memory.parts.values()), 1)
    parts: list[RenderableType] = []
    if memory.parts:
        remark = f"{show_bytes(memory.held_bytes)} in tensors"
        parts += [
            heading(f"Memory of {memory.device}", remark),
            show_bars(Parts(split_bytes(memory.parts), total_bytes)),
        ]
    if memory.lines:
        rows = tuple(
            (show_bytes(line.bytes), str(line.blocks), line.category, f"{line.operation}  {line.line}".strip() or "–")
            for line in memory.lines
        )
        parts += [
            heading("By line of code", "the largest first"),
            Grid(("size", "blocks", "category", "made by"), rows, words=("category", "made by")),
        ]
    return parts


def _prediction(comparison: AgainstPrediction) -> list[RenderableType]:
    step = comparison.predicted
    rows = tuple(
        (
            row.part,
            "–" if row.actual_bytes is None else show_bytes(row.actual_bytes),
            "–" if row.predicted_bytes is None else show_bytes(row.predicted_bytes),
            _difference(row.actual_bytes, row.predicted_bytes),
        )
        for row in comparison.rows
    )
    about = f"{step.model} on {step.machine} · {step.layout}" + (f" · {step.stack}" if step.stack != "fivefold" else "")
    grid = Grid(("memory", "found", "predicted", "difference"), rows, words=("memory",))
    lines = [Text(f"· {line}", overflow="fold") for line in comparison.findings]
    return [heading("Compared with the prediction", about), grid, *lines, _change(comparison)]


def _difference(measured: int | None, predicted: int | None) -> str:
    if measured is None or predicted is None or not predicted:
        return "–"
    return "exact" if measured == predicted else f"{measured / predicted - 1:+.1%}"


def _change(comparison: AgainstPrediction) -> Text:
    capacity = f"the {show_bytes(comparison.available_bytes)} that tensors can have"
    if comparison.change is not None:
        needed = show_bytes(comparison.change.memory_bytes + comparison.excess_bytes)
        slower = f"{comparison.slower:.1%} slower" if comparison.slower else "not slower"
        return Text.assemble(
            "least change that fits: ",
            (comparison.change.change, "bold green"),
            f", {needed} of {capacity}, {slower}: {comparison.change.layout}",
            overflow="fold",
        )
    if comparison.layout:
        return Text.assemble(
            "no single change fits; the fastest layout that does: ", (comparison.layout, "bold green"), overflow="fold"
        )
    if max(row.actual_bytes or 0 for row in comparison.rows) <= comparison.available_bytes:
        return Text(f"it fits in {capacity}", style="green")
    return Text("no layout over these ranks fits: take more of them, or a machine with more memory", style="bold red")

"""Show what is known of a failed or unusual run: a verdict, findings, memory by category and line, ranks, losses.

GPU 0 ran out of memory in the backward, at train.py:31 step: 2.00 GiB were asked for, and tensors hold 74.1 of 79.1 GiB
· tensors fill it: 1.20 GiB more are needed least change that fits: ac=selective, 61.2 GiB at the peak, 2 % slower
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from fivefold.rendering.grid import Grid
from fivefold.rendering.sections import AnswerSection, render_sections
from fivefold.rendering.step_view import Parts, split_bytes
from fivefold.results.explanation import AgainstPrediction, Explanation, HeldMemory
from fivefold.units import show_bytes

LOOKS = {
    "tensors": "activations",
    "reserved, but in no tensor": "temporary",
    "other processes": "messages",
    "the rest of this process": "parameters",
    "all else: contexts, NCCL, other processes": "parameters",
    "free": "bubble",
}
"""Colours of the owners that an error message distinguishes; categories of tensors have their own."""


ASK_AGAINST = "; --against MODEL"  # how the advice to compare with a prediction begins


def render_page(explanations: Sequence[Explanation], *, comparison: AgainstPrediction | None = None) -> RenderableType:
    """Return all explanations, one after another, then the prediction."""
    is_compared = comparison is not None
    parts = [
        Group(render_sections(_render_explanation(explanation, is_compared=is_compared)), Text(""))
        for explanation in explanations
    ]
    return Group(*parts, *([render_sections([_render_prediction(comparison)])] if comparison is not None else []))


def list_sections(
    explanations: Sequence[Explanation], *, comparison: AgainstPrediction | None = None
) -> Iterator[AnswerSection]:
    """Yield the sections of each explanation, its verdict first, then that of the prediction."""
    for explanation in explanations:
        yield from _render_explanation(explanation, is_compared=comparison is not None)
    if comparison is not None:
        yield _render_prediction(comparison)


def _render_explanation(explanation: Explanation, *, is_compared: bool) -> Iterator[AnswerSection]:
    """Yield the sections of an explanation; with a prediction next to it, without the advice to ask for one."""
    files = explanation.files[0] if len(explanation.files) == 1 else f"{len(explanation.files)} files"
    source = Text(f"{explanation.kind}  {files}", style="dim")
    verdict = Text(explanation.verdict, style="bold")
    findings = [line.partition(ASK_AGAINST)[0] if is_compared else line for line in explanation.findings]
    yield AnswerSection((source, verdict, *_format_bullets(findings)))
    if explanation.memory is not None:
        yield from _render_memory(explanation.memory)
    if explanation.ranks:
        rows = tuple((rank_state.rank, rank_state.state, rank_state.line or "–") for rank_state in explanation.ranks)
        yield AnswerSection((Grid(("rank", "state", "line"), rows, words=("rank", "state", "line")),), "By rank")
    if [event.line for event in explanation.losses] not in ([], [explanation.verdict]):
        yield AnswerSection(tuple(_format_bullets([event.line for event in explanation.losses])), "What happened")


def _format_bullets(lines: Sequence[str]) -> list[Text]:
    return [Text(f"· {line}") for line in lines]


def _render_memory(memory: HeldMemory) -> Iterator[AnswerSection]:
    """Yield the sections on the memory that a device held: by category and by line of code."""
    if memory.parts:
        parts = [part._replace(look=LOOKS.get(part.name, part.look)) for part in split_bytes(memory.parts)]
        bars = Parts(parts, max(sum(memory.parts.values()), 1))
        yield AnswerSection((bars,), f"Memory of {memory.device}", f"{show_bytes(memory.held_bytes)} in tensors")
    if memory.lines:
        rows = tuple(
            (show_bytes(line.bytes), str(line.blocks), line.category, f"{line.operation}  {line.line}".strip() or "–")
            for line in memory.lines
        )
        grid = Grid(("size", "blocks", "category", "made by"), rows, words=("category", "made by"))
        yield AnswerSection((grid,), "By line of code", "the largest first")


def _render_prediction(comparison: AgainstPrediction) -> AnswerSection:
    """Return the section that compares the memory that was found with the predicted one."""
    step = comparison.predicted
    rows = tuple(
        (
            row.part,
            "–" if row.actual_bytes is None else show_bytes(row.actual_bytes),
            "–" if row.predicted_bytes is None else show_bytes(row.predicted_bytes),
            _format_difference(row.actual_bytes, row.predicted_bytes),
        )
        for row in comparison.rows
    )
    about = f"{step.model} on {step.machine} · {step.layout}" + (f" · {step.stack}" if step.stack != "fivefold" else "")
    grid = Grid(("memory", "found", "predicted", "difference"), rows, words=("memory",))
    return AnswerSection(
        (grid, *_format_bullets(comparison.findings), _change(comparison)), "Compared with the prediction", about
    )


def _format_difference(measured: int | None, predicted: int | None) -> str:
    if measured is None or predicted is None or not predicted:
        return "–"
    return "exact" if measured == predicted else f"{measured / predicted - 1:+.1%}"


def _change(comparison: AgainstPrediction) -> Text:
    """Return the line on the smallest change that fits, or on the fastest layout that does."""
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
    return Text("no layout over these ranks fits: use more of them, or a machine with more memory", style="bold red")

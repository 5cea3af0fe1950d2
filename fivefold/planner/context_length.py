"""Memory and MFU against the length of sequences, by recomputation and cp, and how to get to a million tokens.

Ranks of dp become ranks of cp; a step keeps about its number of tokens, so that figures compare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.layout.validity import is_legal
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.planner.predict import Planner
from fivefold.planner.questions import longest_sequence
from fivefold.planner.search.layout_changes import change, list_changed_keywords
from fivefold.record import UserError
from fivefold.results.search_result import LengthCurve, LengthPoint, Lengths, NearMiss, QuestionAnswer, SearchResult
from fivefold.step import FITS_RISK
from fivefold.units import show_bytes, show_seconds

RECOMPUTATIONS = ("none", "selective", "full")
SHORTEST, TARGET = 2**12, 2**20
MAX_CP = 64


def lengths(
    *,
    model: Model,
    machine: Machine,
    job: Job,
    layout: Layout,
    search: Callable[[Job], SearchResult],
    target: int = TARGET,
    risk: float = FITS_RISK,
) -> Lengths:
    """Return the curves of a layout over context length, and what must change for sequences of ``target`` tokens.

    ``search`` searches the layouts of a job.
    """
    answer = longest_sequence(model=model, machine=machine, job=job, layout=layout, risk=risk)
    sizes = [2**power for power in range(SHORTEST.bit_length() - 1, target.bit_length())]
    if model.position == "learned":
        sizes = [size for size in sizes if size <= model.positions]

    @lru_cache(maxsize=64)
    def planner(tokens: int, batch: int) -> Planner:
        return Planner(model=model, machine=machine, job=job.replace(sequence=tokens, global_batch=batch), risk=risk)

    curves = []
    for other in _vary_layout(layout):
        if not is_legal(other, model=model, job=job, machine=machine):
            continue
        points = tuple(_points(other, sizes, planner, job=job))
        longest = _find_longest(model, machine, job, other, risk=risk)
        curves.append(LengthCurve(cp=other.cp, ac=other.ac, layout=str(other), longest=longest, points=points))
    changes = _changes(model, machine, job, layout, answer, search=search, target=target)
    return Lengths(
        model=model.name,
        machine=machine.name,
        answer=answer,
        curves=tuple(curves),
        target=target,
        changes=tuple(changes),
    )


def _vary_layout(layout: Layout) -> Iterator[Layout]:
    """Yield the layout with every recomputation and every cp that its data-parallel ranks allow."""
    ranks = layout.dp * layout.cp
    for cp in (2**power for power in range(MAX_CP.bit_length()) if ranks % 2**power == 0):
        for ac in dict.fromkeys((layout.ac, *RECOMPUTATIONS)):
            if other := change(layout, cp=cp, dp=ranks // cp, ac=ac):
                yield other


def _points(
    layout: Layout, sizes: list[int], planner: Callable[[int, int], Planner], *, job: Job
) -> Iterator[LengthPoint]:
    chunk = layout.dp * layout.mbs
    for tokens in sizes:
        batch = max(1, round(job.tokens_per_step / tokens / chunk)) * chunk
        length_planner = planner(tokens, batch)
        if not is_legal(layout, model=length_planner.model, job=length_planner.job, machine=length_planner.machine):
            continue
        step = length_planner.step(layout)
        yield LengthPoint(
            tokens=tokens,
            fits=length_planner.fits(layout),
            peak_bytes=step.memory.peak_bytes,
            step_seconds=step.time.step_seconds,
            mfu=step.mfu.causal,
        )


def _find_longest(model: Model, machine: Machine, job: Job, layout: Layout, *, risk: float) -> int:
    try:
        return int(longest_sequence(model=model, machine=machine, job=job, layout=layout, risk=risk).value)
    except UserError:
        return 0


def _changes(
    model: Model,
    machine: Machine,
    job: Job,
    layout: Layout,
    answer: QuestionAnswer,
    *,
    search: Callable[[Job], SearchResult],
    target: int,
) -> Iterator[str]:
    """Return the changes that make sequences of ``target`` tokens fit, from a search over all layouts."""
    if model.position == "learned" and target > model.positions:
        yield f"the model: it has {model.positions} learned positions"
        return
    if answer.value >= target:
        yield f"nothing: {layout} fits"
        return
    if model.positions < target:
        yield f"the model's context length, {model.positions} tokens: scale its rotary embedding, train on longer text"
    batch = max(1, job.tokens_per_step // target)
    try:
        result = search(job.replace(sequence=target, global_batch=batch))
    except UserError as mistake:
        yield f"more: {mistake}"
        return
    if result.proposal is None:
        yield from (_describe_miss(miss) for miss in result.misses[:1])
        return
    step = result.proposal.choice.step
    words = list_changed_keywords(layout, Layout.parse(result.proposal.layout))
    figures = f"{show_bytes(step.memory.peak_bytes)}, {show_seconds(step.time.step_seconds)} a step"
    figures += f", MFU {step.mfu.causal:.1%}"
    yield f"the layout: {words or 'nothing'}, so {result.proposal.layout} with gbs {batch} ({figures})"
    if remark := result.gap_remark():
        yield f"there may be a better layout: {remark}"


def _describe_miss(miss: NearMiss) -> str:
    fix = f"; it would fit with {miss.fixes[0]}" if miss.fixes else "; use more GPUs"
    need, have = show_bytes(miss.needs_bytes), show_bytes(miss.has_bytes)
    return f"more than the layout: none fits; {miss.layout} comes closest and needs {need} of {have}{fix}"

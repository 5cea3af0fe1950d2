"""Memory and MFU of one step against the length of its sequences, and what a million tokens would need.

Input: a model, machine and job. Output: one curve for each recomputation and degree of cp. Longer sequences get more
ranks of cp and fewer of dp. All points have about the same number of tokens per step, so that they can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.names import CP_KINDS
from fivefold.layout.spec import Layout, list_divisors
from fivefold.layout.validity import is_legal
from fivefold.layout.where import Where
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.memory.host import count_host_bytes
from fivefold.planner.predict import Planner
from fivefold.planner.questions.sequence import MAX_SEQUENCE, search_longest_sequence
from fivefold.planner.search import find_fitting_layout
from fivefold.planner.search.garbage import collect_garbage_rarely
from fivefold.planner.search.layout_changes import change, list_offloadings
from fivefold.planner.search.work import EXACT_UNITS, WorkBudget
from fivefold.results.search_result import LengthCurve, LengthPoint, Lengths, NearMiss, QuestionAnswer, SearchResult
from fivefold.step import FITS_RISK
from fivefold.units import show_bytes, show_risk, show_seconds

LENGTH_RATIO = 1.01  # of the shortest sequence that was not found to fit to the longest that fits
LENGTH_UNITS = EXACT_UNITS // 20  # of work to find a layout of one length
TARGET_UNITS = EXACT_UNITS // 4  # of work to find the fastest layout of ``TARGET`` tokens
RECOMPUTATIONS = ("none", "selective", "full")
SHORTEST, TARGET = 2**12, 2**20
MAX_CP = 64
HIGHER_RISK = 0.2  # of running out of memory, for comparison with the limit of an answer


@collect_garbage_rarely()
def compute_lengths(
    *,
    model: Model,
    machine: Machine,
    job: Job,
    layout: Layout,
    search: Callable[[Job], SearchResult],
    target: int = TARGET,
    risk: float = FITS_RISK,
    is_searched: bool = False,
    budget: WorkBudget | None = None,
) -> Lengths:
    """Return the curves of a layout over context length, the longest sequence of any, and what ``target`` tokens need.

    ``search`` searches the layouts of a job. ``is_searched``: the layout is one that was found for the job, not given.
    ``budget``: the work that is left for the question.
    """
    answer = search_longest_sequence(model=model, machine=machine, job=job, layout=layout, risk=risk)
    name = f"layout for --seq {job.sequence}" if is_searched else "with this layout"
    answer = answer.replace(question=name)
    sizes = [2**power for power in range(SHORTEST.bit_length() - 1, target.bit_length())]
    if model.position == "learned":
        sizes = [size for size in sizes if size <= model.positions]

    @lru_cache(maxsize=64)
    def get_planner(tokens: int) -> Planner:
        return Planner(model=model, machine=machine, job=job.replace(sequence=tokens), risk=risk)

    curves = []
    for other in _vary_layout(layout):
        if not is_legal(other, model=model, job=job, machine=machine):
            continue
        points = tuple(_list_points(other, sizes, get_planner))
        tokens = _find_longest(model, machine, job, other, risk=risk)
        curves.append(LengthCurve(cp=other.cp, ac=other.ac, layout=str(other), longest=tokens, points=points))
    best_curve = max(curves, key=lambda curve: curve.longest, default=None)
    known = [layout, *([Layout.parse(best_curve.layout)] if best_curve else [])]
    longest = find_longest_sequence(model=model, machine=machine, job=job, known=known, risk=risk, budget=budget)
    remark = describe_risk_limit(longest, model=model, machine=machine, job=job, risk=risk)
    longest = longest.replace(remarks=(remark, *longest.remarks))
    offloaded = find_offloaded_sequence(longest, model=model, machine=machine, job=job, risk=risk)
    reached = [longest, *([offloaded] if offloaded else [])]
    changes = _list_changes(model, machine, job, layout, answer, reached=reached, search=search, target=target)
    return Lengths(
        model=model.name,
        machine=machine.name,
        longest=longest,
        offloaded=offloaded,
        answer=answer,
        curves=tuple(curves),
        target=target,
        changes=tuple(changes),
    )


def find_longest_sequence(
    *,
    model: Model,
    machine: Machine,
    job: Job,
    known: Sequence[Layout],
    risk: float = FITS_RISK,
    budget: WorkBudget | None = None,
) -> QuestionAnswer:
    """Return the longest sequence over all layouts of all ranks that recompute in full, and over those ``known``.

    Layouts with one replica, whose ranks are all of cp and tp, come first. The rest is found by bisection to
    ``LENGTH_RATIO``: a length is taken not to fit if no layout is found to fit within a work limit. Each layout that is
    found counts with its own longest sequence. Micro-batches have the fewest sequences.
    """
    chunk = 2 * machine.ranks  # which every cp and sp can split
    limit = min(MAX_SEQUENCE, model.positions) if model.position == "learned" else MAX_SEQUENCE
    where = Where.parse(f"mbs<={job.min_micro_batch} ac=full")

    def answer(layout: Layout) -> QuestionAnswer:
        return search_longest_sequence(model=model, machine=machine, job=job, layout=layout, risk=risk)

    if probe := min(TARGET, limit) // chunk * chunk:
        known = [*known, *_find_undivided_batch(model, machine, job.replace(sequence=probe))]
    lengths_of_known = [_find_longest(model, machine, job, layout, risk=risk) for layout in known]
    best = answer(known[lengths_of_known.index(max(lengths_of_known))])
    high, is_undecided, budget = math.inf, False, budget or WorkBudget()
    while high / best.value > LENGTH_RATIO:
        tried = min(2 * best.value, math.sqrt(best.value * high), limit)
        tokens = int(tried // chunk * chunk)
        if tokens <= best.value:
            break
        longer = job.replace(sequence=tokens)
        work = budget.allot(LENGTH_UNITS, reserve=TARGET_UNITS // 2)
        layout = find_fitting_layout(where, model=model, machine=machine, job=longer, risk=risk, work=work)
        if layout is None:
            high, is_undecided = tokens, work.is_spent
            if work.exact_units == 0:
                break
        else:
            best = answer(layout)
    if is_undecided:
        remark = f"whether {high:,} tokens fit with another layout was not decided within the work limit"
        return best.replace(remarks=(remark,))
    return best


def describe_risk_limit(longest: QuestionAnswer, *, model: Model, machine: Machine, job: Job, risk: float) -> str:
    """Return the risk of running out of memory that an answer keeps to, and how long sequences a higher one allows."""
    line = f"the longest sequence has a risk of running out of memory of at most {show_risk(risk)}"
    if risk >= HIGHER_RISK:
        return line
    layout = Layout.parse(longest.layout or "")
    longer = search_longest_sequence(model=model, machine=machine, job=job, layout=layout, risk=HIGHER_RISK)
    return f"{line}; with --risk {HIGHER_RISK:g} its layout has {longer.value:,.0f} tokens"


def find_offloaded_sequence(
    longest: QuestionAnswer, *, model: Model, machine: Machine, job: Job, risk: float = FITS_RISK
) -> QuestionAnswer | None:
    """Return the longest sequence of ``longest``'s layout with states and activations in host memory.

    None if the job's software does not offload, or if that is no longer, or not legal.
    """
    for _, layout, other in list_offloadings(
        Layout.parse(longest.layout or ""), job, model=model, with_activations=True
    ):
        if other is not job:
            return None
        try:
            answer = search_longest_sequence(model=model, machine=machine, job=job, layout=layout, risk=risk)
        except UserError:
            continue
        if answer.value > longest.value:
            counts = Counts(model, job.replace(sequence=int(answer.value)))
            host = show_bytes(count_host_bytes(counts, layout, machine))
            return answer.replace(question="offloaded", line=f"{answer.value:,.0f} tokens; {host} on each host")
    return None


def _find_undivided_batch(model: Model, machine: Machine, job: Job) -> list[Layout]:
    """Return the layout of least memory in which all ranks split each sequence, by cp and tp; empty if none is legal.

    It recomputes in full, and tp stays within a node.
    """
    ranks, layouts = machine.ranks, list[Layout]()
    for tp in (tp for tp in list_divisors(ranks) if tp <= machine.ranks_per_node):
        layout = Layout(tp=tp, cp=ranks // tp, mbs=job.min_micro_batch, zero=3 if tp < ranks else 0, ac="full")
        for ep in list_divisors(model.moe.experts) if model.moe else [1]:
            layouts += [changed for kind in CP_KINDS if (changed := change(layout, ep=ep, cp_kind=kind))]
    planner = Planner(model=model, machine=machine, job=job)
    legal = [layout for layout in layouts if is_legal(layout, model=model, job=job, machine=machine)]
    return [min(legal, key=planner.peak_bytes)] if legal else []


def _vary_layout(layout: Layout) -> Iterator[Layout]:
    """Yield the layout with every recomputation and every cp that its data-parallel ranks allow."""
    ranks = layout.dp * layout.cp
    for cp in (2**power for power in range(MAX_CP.bit_length()) if ranks % 2**power == 0):
        for ac in dict.fromkeys((layout.ac, *RECOMPUTATIONS)):
            if other := change(layout, cp=cp, dp=ranks // cp, ac=ac):
                yield other


def _list_points(layout: Layout, sizes: list[int], planner: Callable[[int], Planner]) -> Iterator[LengthPoint]:
    """Yield memory, time and MFU of each valid sequence length under ``layout``."""
    for tokens in sizes:
        length_planner = planner(tokens)
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
        return int(search_longest_sequence(model=model, machine=machine, job=job, layout=layout, risk=risk).value)
    except UserError:
        return 0


def _list_changes(
    model: Model,
    machine: Machine,
    job: Job,
    layout: Layout,
    answer: QuestionAnswer,
    *,
    reached: Sequence[QuestionAnswer],
    search: Callable[[Job], SearchResult],
    target: int,
) -> Iterator[str]:
    """Return the changes that make sequences of ``target`` tokens fit, from a search over all layouts.

    ``reached``: longest sequences of other layouts, the first without offloading.
    """
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
    if result.proposal is None and (longer := [other for other in reached if other.value >= target]):
        yield f"the layout: {longer[0].layout}"
        return
    if result.proposal is None:
        yield from (_describe_miss(miss) for miss in result.misses[:1])
        return
    step = result.proposal.choice.step
    figures = f"{show_bytes(step.memory.peak_bytes)}, {show_seconds(step.time.step_seconds)} a step"
    figures += f", MFU {step.mfu.causal:.1%}"
    yield f"the layout: {result.proposal.layout} with gbs {batch} ({figures})"
    if remark := result.gap_remark():
        yield f"there may be a better layout: {remark}"


def _describe_miss(miss: NearMiss) -> str:
    return f"more than the layout: none fits; {miss.layout} comes closest and {miss.shortage}; {miss.remedy}"

"""What each single change of a layout or job gains, and pairs of changes that help only together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.layout.validity import is_legal
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.planner.predict import Planner
from fivefold.planner.search.garbage import collect_garbage_rarely
from fivefold.planner.search.job_changes import NUMERICS_CHANGES, list_job_changes
from fivefold.planner.search.layout_changes import (
    RANKED,
    change,
    list_changed_keywords,
    list_offloadings,
    rank_moves,
    with_virtual_stages,
    with_zero,
)
from fivefold.planner.time.ratio_errors import describe_run, estimate_speed_ratio
from fivefold.results.search_result import Change
from fivefold.step import FITS_RISK

MAX_PAIRS = 3  # pairs of changes that are returned


def list_changes(*, model: Model, machine: Machine, job: Job, layout: Layout, risk: float = FITS_RISK) -> list[Change]:
    """Return the effect of each single change of layout or job: changes that fit come first, then the fastest.

    A precision for which the chip has no matrix units is not among them.
    """
    evaluate = _compare_with(model, machine, job, layout, risk=risk)
    changes = [
        evaluate(words, changed, other)
        for words, changed, other in (*_list_single_changes(model, job, layout), *_list_degree_changes(job, layout))
        if (other, changed) != (layout, job) and is_legal(other, model=model, job=changed, machine=machine)
        if changed.precision == job.precision or machine.chip.has_units(changed.precision.compute)
    ]
    return sorted(changes, key=lambda change: (not change.fits, change.step_seconds, change.memory_bytes))


@collect_garbage_rarely()
def list_changes_and_pairs(
    *, model: Model, machine: Machine, job: Job, layout: Layout, risk: float = FITS_RISK
) -> list[Change]:
    """Return the effect of each single change, then of the best pairs of changes that help only together."""
    singles = list_changes(model=model, machine=machine, job=job, layout=layout, risk=risk)
    return [*singles, *find_pairs(singles, model=model, machine=machine, job=job, layout=layout, risk=risk)]


def find_pairs(
    singles: Sequence[Change], *, model: Model, machine: Machine, job: Job, layout: Layout, risk: float = FITS_RISK
) -> list[Change]:
    """Return up to ``MAX_PAIRS`` pairs of changes that help only together: the pair fits and takes less time.

    For example a larger micro-batch, which does not fit, together with recomputation, which by itself is slower.
    ``singles``: the single changes. One helps if it fits and is faster than the layout, or if the layout does not fit;
    then a pair takes less time than every single change that fits. Changes that alter the numerics of training are left
    out.
    """
    base = Planner(model=model, machine=machine, job=job, risk=risk)
    fitting = [change for change in singles if change.fits and change.change not in NUMERICS_CHANGES]
    limit = min((change.step_seconds for change in fitting), default=inf)
    if base.fits(layout):
        limit = base.estimate(layout).step_time.seconds
        fitting = [change for change in fitting if change.step_seconds < limit]
    left_out = {*NUMERICS_CHANGES, *(change.change for change in fitting)}
    evaluate = _compare_with(model, machine, job, layout, risk=risk)
    pairs, tried = list[Change](), {(layout, job)}
    moved = _list_degree_changes(job, layout)
    for first, job_between, between in (*_list_single_changes(model, job, layout), *moved):
        if first in left_out or (between, job_between) == (layout, job):
            continue
        for second, changed, other in _list_single_changes(model, job_between, between):
            is_repeated = _get_changed_field(first) == _get_changed_field(second) or second in left_out
            if is_repeated or (other, changed) in tried or (other, changed) == (between, job_between):
                continue
            tried.add((other, changed))
            planner = Planner(model=model, machine=machine, job=changed, risk=risk)
            if not is_legal(other, model=model, job=changed, machine=machine) or not planner.fits(other):
                continue
            pair = evaluate(f"{first} and {second}", changed, other)
            if pair.step_seconds < limit:
                pairs.append(pair.replace(together=(first, second)))
    return sorted(pairs, key=lambda change: (change.step_seconds, change.memory_bytes))[:MAX_PAIRS]


def _compare_with(
    model: Model, machine: Machine, job: Job, layout: Layout, *, risk: float
) -> Callable[[str, Job, Layout], Change]:
    """Return a function that compares a changed job and layout with these."""
    before = Planner(model=model, machine=machine, job=job).estimate(layout)
    facts = describe_run(model, machine, layout, job)

    def compare(words: str, changed: Job, other: Layout) -> Change:
        planner = Planner(model=model, machine=machine, job=changed, risk=risk)
        after = planner.estimate(other)
        speeds = (1 / after.step_time.seconds, 1 / before.step_time.seconds)
        risk_after = planner.out_of_memory_risk(other, after.ranks)
        return Change(
            change=words,
            layout=str(other),
            fits=risk_after <= risk,
            risk=risk_after,
            memory_bytes=after.peak_bytes,
            step_seconds=after.step_time.seconds,
            faster=before.step_time.seconds / after.step_time.seconds,
            speed=estimate_speed_ratio(describe_run(model, machine, other, changed), facts, speeds),
            saved_bytes=before.peak_bytes - after.peak_bytes,
        )

    return compare


def _get_changed_field(words: str) -> str:
    """Return what a single change sets: two of the same are no pair."""
    if words in ("interleaved, twice the stages", "zero bubble"):
        return "schedule"
    return words.partition("=")[0].rstrip("0123456789")


def find_fitting_change(*, model: Model, machine: Machine, job: Job, layout: Layout) -> Change | None:
    """Return the single change with which ``layout`` fits at the least step time; None if there is none.

    Changes that alter the numerics of training come last.
    """
    fitting = [change for change in list_changes(model=model, machine=machine, job=job, layout=layout) if change.fits]
    return min(fitting, key=get_change_sort_key, default=None)


def get_change_sort_key(change: Change) -> tuple[bool, float, int]:
    """Return the sort key of changes that fit: those that keep the numerics first, then the fastest."""
    return change.change in NUMERICS_CHANGES, change.step_seconds, change.memory_bytes


def _list_single_changes(model: Model, job: Job, layout: Layout) -> Iterator[tuple[str, Job, Layout]]:
    """Yield single changes: a description, the job and the layout."""
    software = job.stack.runs
    is_sharded = layout.dp * layout.cp > 1
    for zero in sorted({layout.zero - 1, *range(layout.zero + 1, 4)} & {0, 1, 2, 3}) if is_sharded else ():
        if other := with_zero(layout, zero):
            yield f"zero{zero}", job, other
    for ac in ("none", "norm+act", "selective", *software.list_joint_recomputes(), "full"):
        if software.can_express(ac, experts=model.moe is not None):
            yield f"ac={ac}", job, layout.replace(ac=ac)
    if layout.mbs % 2 == 0:
        yield f"mbs{layout.mbs // 2}", job, layout.replace(mbs=layout.mbs // 2)
    if 2 * layout.mbs <= job.global_batch:
        yield f"mbs{2 * layout.mbs}", job, layout.replace(mbs=2 * layout.mbs)
    if layout.tp > 1 and not layout.sp:
        yield "sequence parallel", job, layout.replace(sp=True)
    if layout.pp > 1:
        if other := with_virtual_stages(layout, 2 * layout.v):
            yield "interleaved, twice the stages", job, other
        yield "zero bubble", job, layout.replace(schedule="zb1p", v=1, stages=layout.stages if layout.v == 1 else ())
    for offloading in list_offloadings(layout, job, model=model):
        if offloading.job is job:  # another software is no single change
            yield offloading.words, job, offloading.layout
    for job_change in list_job_changes(model, job, layout):
        if job_change.goal != "memory":
            yield job_change.words, job_change.job, layout


def _list_degree_changes(job: Job, layout: Layout) -> Iterator[tuple[str, Job, Layout]]:
    """Yield single changes of degrees: an axis gives half its ranks to another, or ep is halved or doubled."""
    for moved in rank_moves(layout):
        if moved is not None and any(2 * getattr(moved, axis) == getattr(layout, axis) for axis in RANKED):
            yield list_changed_keywords(layout, moved), job, moved
    for degree in (layout.ep // 2, 2 * layout.ep) if layout.ep > 1 else ():
        if other := change(layout, ep=degree):
            yield f"ep{degree}", job, other

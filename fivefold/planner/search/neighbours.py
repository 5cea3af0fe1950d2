"""The layouts that differ from a given one in one choice, and walks that take the best change each time.

The choices are: ranks moved from one axis to another, ep, etp, mbs, ZeRO, its shard group, schedule and v,
recomputation (and on which pipeline ranks), order, kind of cp, sp. ``layout_changes.py`` says what follows from each.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

from fivefold.layout.names import CP_KINDS, DEFAULT_ORDER
from fivefold.layout.schedule import PIPELINE_SCHEDULES
from fivefold.layout.spec import Layout, list_divisors
from fivefold.layout.stages import list_virtual_stages
from fivefold.layout.validity import refuse
from fivefold.layout.validity.pipeline import count_max_stages
from fivefold.layout.where import ANY_LAYOUT, Where
from fivefold.planner.counts.memory.peak import RankMemory
from fivefold.planner.predict import Estimate, Planner
from fivefold.planner.search.layout_changes import can_run, change, list_changed_keywords, rank_moves, with_zero
from fivefold.planner.search.space import list_recomputations
from fivefold.planner.search.stage_balance import balance, reduce_recomputation
from fivefold.planner.search.work import SearchWork
from fivefold.planner.time.ratio_errors import estimate_speed_ratio
from fivefold.results.search_result import By, Change, Walk

MIN_GAIN = 0.002  # share of a step by which a change of the walk must be faster
MAX_CHANGES = 8  # changes of a walk


def walk(planner: Planner, layout: Layout, *, by: By = "time", where: Where = ANY_LAYOUT) -> Walk:
    """Return every single change of ``layout`` that ``where`` admits, the best first.

    It also has the path of successive best changes.
    """
    refuse(layout, model=planner.model, job=planner.job, machine=planner.machine)
    current = start = planner.estimate(layout)
    first_changes: tuple[Estimate, ...] = ()
    path: list[Estimate] = []
    while len(path) < MAX_CHANGES:
        ranked = _rank(planner, current.layout, by=by, where=where)
        first_changes = first_changes or tuple(ranked)
        if not ranked or not _is_better(planner, ranked[0], than=current, by=by):
            break
        current = ranked[0]
        path.append(current)
    steps = (start, *path)
    return Walk(
        start=_change(planner, start, start),
        changes=tuple(_change(planner, start, step) for step in first_changes),
        path=tuple(_change(planner, *pair) for pair in zip(steps, path, strict=False)),
    )


def climb(planner: Planner, layout: Layout, *, work: SearchWork) -> Estimate:
    """Return the end of the path of fastest single changes from ``layout``, which fits, among those that fit.

    The time of changes that do not fit is not counted, so it takes a fraction of ``walk``. Changes whose estimate would
    exceed the limit of ``work`` are left out, such as long schedules of many stages.
    """
    best = planner.estimate(layout)

    def count_memories() -> Iterator[tuple[Layout, list[RankMemory]]]:
        for changed in list_neighbours(best.layout, planner):
            if work.can_afford(changed, planner.job):
                work.add_estimate(changed, planner.job)
                yield changed, planner.memory(changed)

    for _ in range(MAX_CHANGES):
        memories = count_memories()
        fitting = [
            planner.estimate(neighbour, ranks=ranks) for neighbour, ranks in memories if planner.fits(neighbour, ranks)
        ]
        fastest = min(fitting, key=lambda estimate: (estimate.step_time.seconds, str(estimate.layout)), default=best)
        if not _is_better(planner, fastest, than=best, by="time"):
            break
        best = fastest
    return best


def shrink(planner: Planner, layout: Layout, *, work: SearchWork) -> Layout | None:
    """Return the first layout that fits on the path of single changes from ``layout`` that need the least memory.

    None if the path ends without one, or at the limit of ``work``.
    """
    best, least_bytes = layout, planner.peak_bytes(layout)
    for _ in range(MAX_CHANGES):
        if planner.fits(best):
            return best
        peaks = list[tuple[int, str, Layout]]()
        for changed in list_neighbours(best, planner, uneven=False):
            if work.can_afford(changed, planner.job):
                work.add_estimate(changed, planner.job)
                peaks.append((planner.peak_bytes(changed), str(changed), changed))
        smallest_bytes, _, best = min(peaks, default=(least_bytes, "", best))
        if smallest_bytes >= least_bytes:
            return None
        least_bytes = smallest_bytes
    return None


def list_neighbours(layout: Layout, planner: Planner, *, uneven: bool = True) -> Iterator[Layout]:
    """Yield every legal layout that differs from ``layout`` in one choice.

    ``uneven``: also stages of unequal work, and recomputation on few pipeline ranks.
    """
    seen = {layout}
    for changed in _list_changes(layout, planner, uneven=uneven):
        if changed is not None and changed not in seen:
            seen.add(changed)
            if can_run(changed, planner):
                yield changed


def _list_changes(layout: Layout, planner: Planner, *, uneven: bool) -> Iterator[Layout | None]:
    """Yield every other choice; None for those that contradict the rest of the layout."""
    model = planner.model
    yield from rank_moves(layout)
    if model.moe:
        yield from (change(layout, ep=ep) for ep in list_divisors(model.moe.experts))
        yield from (change(layout, etp=etp) for etp in list_divisors(layout.tp))
    yield from (change(layout, mbs=mbs) for mbs in list_divisors(max(1, planner.job.even_batch // layout.dp)))
    if (replicas := layout.dp * layout.cp) > 1:
        yield from (with_zero(layout, zero) for zero in range(4))
        groups = (size if size < replicas else None for size in list_divisors(replicas)[1:])
        yield from (change(layout, shard_group=group) for group in groups)
    if layout.pp > 1:
        yield from _list_schedules(layout, planner)
        balanced = balance(layout.replace(stages=()), planner) if uneven else None
        yield from (change(layout, stages=stages) for stages in ((), balanced.stages if balanced else ()))
    for ac in list_recomputations(model, planner.job.stack.runs):
        yield change(layout, ac=ac)
        if uneven and (less_recomputed := reduce_recomputation(layout.replace(ac=ac), planner)):
            yield change(layout, ac=less_recomputed.ac)
    active = {axis for axis in DEFAULT_ORDER if getattr(layout, axis) > 1}
    orders = {tuple(axis for axis in order if axis in active): order for order in permutations(DEFAULT_ORDER)}
    active_order = tuple(axis for axis in layout.order if axis in active)
    yield from (change(layout, order=order) for axes, order in orders.items() if axes != active_order)
    yield from (change(layout, cp_kind=kind) for kind in CP_KINDS)
    yield from (change(layout, sp=sp) for sp in (True, False))


def _list_schedules(layout: Layout, planner: Planner) -> Iterator[Layout | None]:
    model = planner.model
    stage_counts = list_virtual_stages(model, pp=layout.pp, most=count_max_stages(model, planner.job))
    for name, pipeline in PIPELINE_SCHEDULES.items():
        for v in stage_counts if pipeline.stages_per_rank is None else (pipeline.stages_per_rank,):
            yield change(layout, schedule=name, v=v, stages=layout.stages if v == layout.v else ())


def _rank(planner: Planner, layout: Layout, *, by: By, where: Where) -> list[Estimate]:
    """Return the neighbours that ``where`` admits: those that fit first, then by time (or by bytes)."""
    estimates = [
        planner.estimate(neighbour)
        for neighbour in list_neighbours(layout, planner)
        if where.is_satisfied_by(neighbour)
    ]

    def get_key(estimate: Estimate) -> tuple[bool, float, float]:
        fits = planner.fits(estimate.layout, estimate.ranks)
        seconds = estimate.step_time.seconds
        size = float(estimate.peak_bytes)
        return (not fits, size, seconds) if by == "memory" or not fits else (False, seconds, size)

    return sorted(estimates, key=get_key)


def _is_better(planner: Planner, estimate: Estimate, *, than: Estimate, by: By) -> bool:
    """Return whether a change helps: it makes the layout fit, needs less memory while nothing fits, or is faster."""
    fits = planner.fits(estimate.layout, estimate.ranks)
    fitted = planner.fits(than.layout, than.ranks)
    if fits != fitted:
        return fits
    if not fits or by == "memory":
        return estimate.peak_bytes < than.peak_bytes
    return estimate.step_time.seconds < than.step_time.seconds * (1 - MIN_GAIN)


def _change(planner: Planner, before: Estimate, after: Estimate) -> Change:
    """Return what a change of the layout gains or costs in time, memory and risk."""
    risk = planner.out_of_memory_risk(after.layout, after.ranks)
    speeds = (1 / after.step_time.seconds, 1 / before.step_time.seconds)
    return Change(
        change=list_changed_keywords(before.layout, after.layout),
        layout=str(after.layout),
        fits=risk <= planner.risk,
        risk=risk,
        memory_bytes=after.peak_bytes,
        step_seconds=after.step_time.seconds,
        faster=before.step_time.seconds / after.step_time.seconds,
        speed=estimate_speed_ratio(planner.describe(after.layout), planner.describe(before.layout), speeds),
        saved_bytes=before.peak_bytes - after.peak_bytes,
    )

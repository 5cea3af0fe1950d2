"""Finds a good first layout: the lower the threshold is from the start, the fewer bounds the search must compute.

    likely partial layouts, by the bound of their work and a guess of their bubble
    → each with its best schedule and full shard groups → all schedules and groups of the best of those

At the work limit it also tries the layouts near the best one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy

import numpy as np

from fivefold.layout.names import DEFAULT_ORDER
from fivefold.planner.search.bounds import Bounds
from fivefold.planner.search.branch_and_bound import BranchAndBound
from fivefold.planner.search.columns import (
    BoundedSpace,
    CandidateLayouts,
    ExpandedCandidates,
    Ints,
    concatenate,
    select_degrees,
)
from fivefold.planner.search.incumbents import EvaluatedLayout, Incumbents
from fivefold.planner.search.neighbours import list_neighbours
from fivefold.planner.search.rejections import Rejections
from fivefold.planner.search.tables import SMALL_MICRO_BATCH
from fivefold.planner.search.work import CLIMBING_UNITS, REFINING_UNITS, SearchWork

MAX_LIKELY = 2000  # likely good partial layouts whose bound is computed with their messages
MAX_LIKELY_MICRO_BATCH = 8  # sequences of a micro-batch of a likely good layout
MAX_EXPLORED = 400  # the best of them, which are explored before all other layouts
ROUND = 50  # number explored at once if time matters
LIKELY_UNITS = 2_000_000  # of work, after which no further round of them starts
FIRST_EXPLORED, GROWTH = 8, 4  # number explored first, and the factor of the next round if that found too few
MAX_SCHEDULES = 4000  # candidates with one of all schedules that are evaluated, the most promising ones
FEW_FIT = 40  # layouts whose memory is counted before one is found that fits: then few fit
MAX_REFINED = 4 * 60  # candidates whose exact bound is computed where time does not matter
MAX_PARTIALS = 1500  # partial layouts with a recomputation of which the best candidate is evaluated
MAX_EVALUATED = 60  # candidates that are estimated in full
MAX_VARIED = 4  # best layouts whose other schedules are tried


def sweep_from_likely(solver: BranchAndBound, bounds: Bounds) -> None:
    """Search all layouts of one space, of which ``bounds`` has no row yet, likely good ones before the others.

    Layouts without tp and cp come before the rest, so that a search that ends at its work limit is no worse for the
    larger space.

    If none of the likeliest fits, some layout that fits is searched for by memory only: bounds of time exclude nothing
    without one. It may be slow, so that the most promising of all are tried next.
    """
    incumbents = solver.incumbents
    incumbents.none_fits = False
    before, done = deepcopy(incumbents.rejections), solver.done
    floors = solver.floors(bounds, bounds.space.blocks)
    likely = _select_likely(solver, bounds, floors)
    if not len(likely.size):  # such as a batch of few sequences on many ranks
        likely = _select_likely(solver, bounds, floors, within_node=False)
    best = np.lexsort((likely.size, incumbents.score(likely.seconds, likely.size, bounds.space)))
    for rows in _list_rounds(solver, bounds, best):
        _evaluate_likely(solver, bounds, likely, rows)
    if solver.timed and not incumbents.best:
        if not _evaluate_any(solver, bounds, before, done):
            return
        likely = _select_likely(solver, bounds, floors, within_node=False)
        best = np.lexsort((likely.size, incumbents.score(likely.seconds, likely.size, bounds.space)))
        _evaluate_likely(solver, bounds, likely, best[:MAX_EXPLORED])
    for part in _split_plain(floors):
        solver.sweep(bounds, part)
    if incumbents.allowed_gap and incumbents.best:
        _refine_best(solver, bounds)


def _list_rounds(solver: BranchAndBound, bounds: Bounds, best: Ints) -> Iterator[Ints]:
    """Yield rows of likely layouts in rounds: ``MAX_EXPLORED`` if time matters and the work allows it.

    Later rounds open less, as the best of those before excludes layouts. Where only memory matters, the first round
    that finds enough is the last.
    """
    incumbents, work, start = solver.incumbents, bounds.estimates.work, 0
    size = ROUND if solver.timed else FIRST_EXPLORED if incumbents.any_will_do else MAX_EXPLORED
    max_units = work.units + LIKELY_UNITS
    while start < min(len(best), MAX_EXPLORED):
        if incumbents.threshold < np.inf and not (solver.timed and work.units < max_units):
            return
        yield best[start : start + size]
        start, size = start + size, size * (1 if solver.timed else GROWTH)


def _split_plain(floors: list[BoundedSpace]) -> tuple[list[BoundedSpace], list[BoundedSpace]]:
    """Return the partial layouts of ``floors`` without tp and cp, and the others."""
    plain, others = list[BoundedSpace](), list[BoundedSpace]()
    for partials, size, seconds in floors:
        is_plain = partials.tp * partials.cp == 1
        for selected, mask in ((plain, is_plain), (others, ~is_plain)):
            if mask.any():
                selected.append(BoundedSpace(partials.take(mask), size[mask], seconds[mask]))
    return plain, others


def _evaluate_any(solver: BranchAndBound, bounds: Bounds, rejections: Rejections, done: int) -> bool:
    """Evaluate some layout that fits, or a tight one; return False if there is neither.

    ``rejections`` and ``done``: layouts that were rejected and counted before this space. If none fits, all of this
    space count as too large.
    """
    incumbents = solver.incumbents
    sizes = Incumbents(
        incumbents.largest_peak,
        by="memory",
        top=1,
        levels=0,
        any_will_do=True,
        largest_tight=incumbents.largest_tight,
        work=incumbents.work,
    )
    sizes.rejections = rejections
    first_solver = BranchAndBound(sizes, ranks_per_node=solver.ranks_per_node, timed=False, total=solver.total)
    first_solver.done = done
    sweep_from_likely(first_solver, bounds)
    solver.few_fit = sizes.evaluated > FEW_FIT
    smallest = _find_smallest(solver, bounds) if sizes.is_undecided and not sizes.best else None
    nearest = smallest or (sizes.best[0] if sizes.best else sizes.tight)
    incumbents.none_fits = not (sizes.best or smallest)
    incumbents.is_undecided |= sizes.is_undecided
    if nearest is None:
        incumbents.rejections, incumbents.evaluated = sizes.rejections, incumbents.evaluated + sizes.evaluated
        solver.report_done(first_solver.done - solver.done)
        return False
    incumbents.evaluate(bounds.planner, nearest.estimate.layout)
    _climb(solver, bounds)
    return True


def _find_smallest(solver: BranchAndBound, bounds: Bounds) -> EvaluatedLayout | None:
    """Return a layout that fits with the smallest micro-batch and full recomputation, searched with work of its own."""
    work = SearchWork(exact_units=REFINING_UNITS)
    space = bounds.space.restrict_to_smallest()
    sizes = Incumbents(solver.incumbents.largest_peak, by="memory", top=1, levels=0, any_will_do=True, work=work)
    if space.layouts:
        first_solver = BranchAndBound(sizes, ranks_per_node=solver.ranks_per_node, timed=False)
        sweep_from_likely(first_solver, Bounds(bounds.planner, space, concatenate(()), work=work))
    return sizes.best[0] if sizes.best else None


def _climb(solver: BranchAndBound, bounds: Bounds, *, max_units: int = CLIMBING_UNITS) -> None:
    """Evaluate every single change of the best layout, and of the best of these, within ``max_units`` of work."""
    incumbents, space, spent = solver.incumbents, bounds.space, bounds.estimates.work.units
    with keep_losers(solver):
        current: EvaluatedLayout | None = None
        while incumbents.best and incumbents.best[0] is not current:
            current = incumbents.best[0]
            for changed in list_neighbours(current.estimate.layout, bounds.planner, uneven=False):
                if bounds.estimates.work.units > spent + max_units:
                    return
                if (known := space.find(changed)) is not None:
                    incumbents.evaluate(bounds.planner, known)


def _refine_best(solver: BranchAndBound, bounds: Bounds) -> None:
    """Search near the best layout, after a search that ended at its work limit.

    Single changes of it, then all layouts with the mesh of the best, of any ep and etp, and again if one is better.
    """
    incumbents, work = solver.incumbents, bounds.estimates.work
    limit, refined = work.units + work.refining_units, None
    while incumbents.best[0] is not refined and work.units < limit:
        refined = incumbents.best[0]
        if solver.timed:
            _climb(solver, bounds, max_units=work.refining_units)
        layout = incumbents.best[0].estimate.layout
        blocks = [block.take(select_degrees(block, layout, axes=DEFAULT_ORDER)) for block in bounds.space.blocks]
        with keep_losers(solver), work.extend(max(0, limit - work.units)):
            solver.sweep(bounds, solver.floors(bounds, blocks))


@contextmanager
def keep_losers(solver: BranchAndBound) -> Iterator[None]:
    """Leave the losers of a search, and what is reported of it, as they were before."""
    incumbents, done, report = solver.incumbents, solver.done, solver.report
    rejections, incumbents.rejections, solver.report = incumbents.rejections, Rejections(incumbents.largest_peak), None
    try:
        yield
    finally:
        incumbents.rejections, solver.done, solver.report = rejections, done, report


def _evaluate_likely(solver: BranchAndBound, bounds: Bounds, likely: BoundedSpace, rows: Ints) -> None:
    """Evaluate the likely good layouts at ``rows`` to lower the threshold; count no losers."""
    floor = BoundedSpace(likely.partials.take(rows), likely.size[rows], likely.seconds[rows])
    with keep_losers(solver):
        for expanded in solver.expand_best_first(bounds, floor):
            _evaluate_best(solver, bounds.restrict_to(expanded.partials), expanded)


def _select_likely(
    solver: BranchAndBound, bounds: Bounds, floors: list[BoundedSpace], *, within_node: bool = True
) -> BoundedSpace:
    """Return partial layouts with tp·cp within a node and at least as many micro-batches as stages.

    Their seconds include a bubble. Without ``within_node`` they may have any degrees.
    """
    selected, space = [], bounds.space
    for partials, size, seconds in floors:
        micro_batches = space.micro_batches(partials)
        likely = (partials.etp == 1) & (partials.mbs <= MAX_LIKELY_MICRO_BATCH)
        if within_node:
            likely &= (partials.tp * partials.cp <= solver.ranks_per_node) & (
                (partials.pp == 1) | (micro_batches >= partials.pp)
            )
        selected.append(BoundedSpace(partials.take(likely), size[likely], seconds[likely]))
    empty = np.zeros(0)
    size, seconds = (np.concatenate([empty, *(part[at] for part in selected)]) for at in (1, 2))
    partials = concatenate([part.partials for part in selected])
    if not (solver.timed and len(size)):
        return BoundedSpace(partials, size, seconds)
    bubble = 1 + (partials.pp - 1) / (space.micro_batches(partials) * np.maximum(1, space.model.layers // partials.pp))
    least = np.argsort(seconds * bubble, kind="stable")[:MAX_LIKELY]
    partials, size, bubble = partials.take(least), size[least], bubble[least]
    return BoundedSpace(partials, size, bounds.restrict_to(partials).floor(max_sequences=SMALL_MICRO_BATCH) * bubble)


def _evaluate_best(solver: BranchAndBound, bounds: Bounds, expanded: ExpandedCandidates) -> None:
    """Evaluate the most promising of ``expanded``, then more of the best, in the default order."""
    partials, space, incumbents = bounds.partials, bounds.space, solver.incumbents
    best = np.lexsort((expanded.size, incumbents.score(expanded.seconds, expanded.size, space)))
    _, indices = np.unique(expanded.candidates.partial[best], return_index=True)
    indices = np.union1d(np.sort(indices)[:MAX_PARTIALS], np.arange(min(len(best), MAX_SCHEDULES)))
    sharded = space.shard(partials, expanded.candidates.take(best[indices]))
    partial_layouts = partials.take(sharded.partial)
    _evaluate_promising(
        solver, bounds, sharded.take((sharded.zero == 0) | (sharded.shards == partial_layouts.dp * partial_layouts.cp))
    )
    rows = [space.find_rows(partials, incumbent.estimate.layout) for incumbent in incumbents.best[:MAX_VARIED]]
    is_other = np.isin(expanded.candidates.partial, np.concatenate([np.zeros(0, np.int64), *rows]))
    if is_other.any():
        _evaluate_promising(solver, bounds, space.shard(partials, expanded.candidates.take(is_other)))


def _evaluate_promising(solver: BranchAndBound, bounds: Bounds, candidates: CandidateLayouts) -> None:
    """Evaluate the most promising of some candidates that may fit; nothing of none."""
    if not len(candidates.zero):
        return
    if not (solver.timed or solver.incumbents.any_will_do):  # the smallest are near those of the limits
        candidates = candidates.take(np.argsort(bounds.memory(candidates, scaled=True), kind="stable")[:MAX_REFINED])
    size = bounds.memory(candidates)
    incumbents = solver.incumbents  # tight layouts are the faster ones: looked at only where nothing fits
    fits = size <= (incumbents.largest_peak if solver.timed and not incumbents.none_fits else incumbents.capacity)
    candidates, size = candidates.take(fits), size[fits]
    if len(size):
        seconds = bounds.seconds(candidates)[0] if solver.timed else np.zeros(len(size))
        solver.wait(bounds, candidates, size, seconds)
        solver.evaluate_waiting(bounds, max_evaluated=MAX_EVALUATED)
        solver.waiting = []

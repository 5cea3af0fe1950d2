"""Branch and bound: evaluates layouts in the order of their bounds until no other can be better than the best.

    partial layouts, best bound first → schedules whose bounds fit and are below the threshold → orders → ZeRO
    → estimated by the planner, best bound first, until the next bound exceeds the threshold

The threshold is the best estimate so far. It is kept from one space to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from fivefold.planner.search.bounds import TIME_PARTS, Bounds
from fivefold.planner.search.columns import (
    BoundedSpace,
    CandidateLayouts,
    ExpandedCandidates,
    Floats,
    Ints,
    PartialLayouts,
    concatenate,
)
from fivefold.planner.search.incumbents import Incumbents
from fivefold.planner.search.simulated_bound import MAX_GROUPED, group_schedules, simulate_group
from fivefold.planner.search.tables import LARGE_MICRO_BATCH, SMALL_MICRO_BATCH

FIRST_BATCH, MAX_BATCH = 200, 100_000  # schedules of partial layouts explored at once: few until a good layout is known
EXPANDED_AT_ONCE = 500  # partial layouts without recomputation of which all schedules are written out at once
PART = 4096  # candidates of which every ZeRO stage and order is written out at once
EAGER = 8  # candidates evaluated after each batch, so that the threshold falls early
MAX_UNGROUPED = 2  # candidates of one schedule that are evaluated at once, instead of simulated together before
Report = Callable[[int, int], None]  # layouts done, of how many


class BranchAndBound:
    """State of a search besides its ``incumbents``: layouts that wait for an estimate, and how many are done.

    ``timed``: whether a layout's time matters to whether it is among the best. ``few_fit``: memory excludes more than
    time does, so that it is looked at first.
    """

    def __init__(
        self,
        incumbents: Incumbents,
        *,
        ranks_per_node: int,
        timed: bool = True,
        report: Report | None = None,
        total: int = 0,
    ) -> None:
        self.incumbents, self.ranks_per_node, self.timed, self.report = incumbents, ranks_per_node, timed, report
        self.waiting: list[tuple[CandidateLayouts, Floats, Floats, Ints]] = []
        self.total, self.done, self.few_fit = total, 0, False

    def floors(self, bounds: Bounds, blocks: Sequence[PartialLayouts]) -> list[BoundedSpace]:
        """Return partial layouts of ``blocks`` of one space that may fit and of which ``bounds`` has no row yet."""
        return [floor for block in blocks if len((floor := self._bound_block(bounds, block)).size)]

    def sweep(self, bounds: Bounds, floors: list[BoundedSpace]) -> None:
        """Search all layouts of what ``floors`` returned of a space."""
        branches, rows = list[ExpandedCandidates](), 0
        for floor in floors:
            for expanded in self.expand_best_first(bounds, self._prune(bounds, floor)):
                branches = [*branches, expanded]
                rows = rows + len(expanded.seconds)
                if rows > MAX_BATCH:
                    self._finish(bounds, branches)
                    branches, rows = [], 0
        self._finish(bounds, branches)

    def _bound_block(self, bounds: Bounds, block: PartialLayouts) -> BoundedSpace:
        """Return partial layouts that have a schedule and may fit."""
        partials = block.take(bounds.space.count_candidates(block) > 0)
        none = np.zeros(0)
        if not len(partials.dp):
            return BoundedSpace(partials, none, none)
        size = bounds.restrict_to(partials).resting_bytes()
        large = size > self.incumbents.capacity
        self._count_too_large(bounds.restrict_to(partials.take(large)), size[large])
        partials = partials.take(~large)
        timed = self.timed and len(partials.dp)
        return BoundedSpace(
            partials,
            size[~large],
            bounds.restrict_to(partials).floor(max_sequences=LARGE_MICRO_BATCH, complete=False)
            if timed
            else np.zeros(len(partials.dp)),
        )

    def _prune(self, bounds: Bounds, floor: BoundedSpace) -> BoundedSpace:
        """Return ``floor`` without partial layouts that can no longer win, by their bounds and by tighter ones."""
        for tight in (False, True) if self.timed else (False,):
            if tight and len(floor.size):
                floor = floor._replace(
                    seconds=bounds.restrict_to(floor.partials).floor(max_sequences=SMALL_MICRO_BATCH)
                )
            worth = self.incumbents.can_win(floor.seconds, floor.size, bounds.space)
            self._count_slower(bounds.restrict_to(floor.partials.take(~worth)), floor.seconds[~worth])
            floor = BoundedSpace(floor.partials.take(worth), floor.size[worth], floor.seconds[worth])
        return floor

    def expand_best_first(self, bounds: Bounds, floor: BoundedSpace) -> Iterator[ExpandedCandidates]:
        """Yield the layouts that complete the partial layouts of ``floor``, the most promising partial layouts first.

        A partial layout has its degrees and micro-batch; its pipeline schedule, ZeRO stage, mesh order and
        recomputation are still open. Those that can no longer win once others were expanded are left out.
        """
        rows = np.lexsort((floor.size, self.incumbents.score(floor.seconds, floor.size, bounds.space)))
        while len(rows):
            yield self._open_up(bounds.restrict_to(floor.partials.take(rows[:EXPANDED_AT_ONCE])))
            rows = rows[EXPANDED_AT_ONCE:]
            worth = self.incumbents.can_win(floor.seconds[rows], floor.size[rows], bounds.space)
            self._count_slower(bounds.restrict_to(floor.partials.take(rows[~worth])), floor.seconds[rows[~worth]])
            rows = rows[worth]

    def _count_too_large(self, bounds: Bounds, size: Floats) -> None:
        """Count partial layouts, without their recomputation, that are too large whatever their schedule."""
        space, partials = bounds.space, bounds.partials
        count = space.count_candidates(partials) * len(space.recomputations)
        self.incumbents.rejections.add_too_large(count, size, lambda at: space.pick_layout(partials, at))
        self.report_done(int(count.sum()))

    def _count_slower(self, bounds: Bounds, seconds: Floats) -> None:
        """Count partial layouts, without their recomputation, that are slower whatever their schedule."""
        if len(seconds):
            count = int(bounds.space.count_candidates(bounds.partials).sum()) * len(bounds.space.recomputations)
            nearest = bounds.space.pick_layout(bounds.partials, int(seconds.argmin()))
            self.incumbents.rejections.add_slower("compute", count, nearest)
            self.report_done(count)

    def wait(self, bounds: Bounds, candidates: CandidateLayouts, size: Floats, seconds: Floats) -> None:
        """Queue candidates with their bounds."""
        groups = group_schedules(bounds, candidates) if self.timed else np.full(len(size), -1)
        self.waiting.append((candidates, size, seconds, groups))

    def _open_up(self, bounds: Bounds) -> ExpandedCandidates:
        """Return every schedule of partial layouts with every recomputation, without those that bounds exclude.

        The bounds hold for every micro-batch. Bounds of time that hold for every recomputation are applied first.
        """
        space, partials = bounds.space, bounds.partials
        candidates = space.expand(partials, np.arange(len(partials.dp)))
        size = np.zeros(len(candidates.partial))
        seconds = np.zeros(len(candidates.partial))
        n_recomputations = len(space.recomputations)
        has_incumbent = (
            self.timed and bool(self.incumbents.best) and not self.few_fit
        )  # else no bound of time excludes a layout: memory first
        if has_incumbent and len(seconds):
            bound = bounds.bound_seconds_of_any_order(
                candidates, max_sequences=SMALL_MICRO_BATCH, any_recomputation=True
            )
            candidates, size, seconds = self._select_fast(bounds, candidates, size, bound, left="zero order ac")
        if not has_incumbent and len(seconds) and "activations" not in bounds.planner.job.offload:
            size = bounds.memory(
                candidates, states=bounds.estimates.bound_states(candidates), scaled=True, any_recomputation=True
            )
            candidates, size, seconds = self._select_fitting(bounds, candidates, size, seconds, left="zero order ac")
            candidates, size, seconds = self._select_fast(
                bounds, candidates, size, (seconds, None), left="zero order ac"
            )
        bounds = bounds.restrict_to(space.expand_recomputations(partials))
        partials = bounds.partials
        size = np.repeat(size, n_recomputations)
        seconds = np.repeat(seconds, n_recomputations)
        candidates = candidates.take(np.repeat(np.arange(len(candidates.partial)), n_recomputations))
        recomputation = np.tile(np.arange(n_recomputations), len(candidates.partial) // n_recomputations)
        candidates = candidates._replace(partial=candidates.partial * n_recomputations + recomputation)
        if has_incumbent and len(seconds):
            bound = bounds.bound_seconds_of_any_order(candidates, max_sequences=LARGE_MICRO_BATCH)
            candidates, size, seconds = self._select_fast(bounds, candidates, size, bound, left="zero order")
        if len(seconds):
            size = bounds.memory(candidates, states=bounds.estimates.bound_states(candidates), scaled=True)
            candidates, size, seconds = self._select_fitting(bounds, candidates, size, seconds, left="zero order")
        if self.timed and not has_incumbent and len(seconds):
            seconds, _ = bounds.bound_seconds_of_any_order(candidates, max_sequences=LARGE_MICRO_BATCH)
        used, partial = np.unique(candidates.partial, return_inverse=True)
        return ExpandedCandidates(partials.take(used), candidates._replace(partial=partial), size, seconds)

    def _finish(self, bounds: Bounds, branches: list[ExpandedCandidates]) -> None:
        """Explore the expanded candidates, best bound first."""
        offsets = np.cumsum([0, *(len(branch.partials.dp) for branch in branches)])
        bounds = bounds.restrict_to(concatenate([branch.partials for branch in branches]))
        moved = [
            branch.candidates._replace(partial=branch.candidates.partial + offset)
            for branch, offset in zip(branches, offsets, strict=False)
        ]
        if not moved:
            return
        candidates = CandidateLayouts(*(np.concatenate(columns) for columns in zip(*moved, strict=True)))
        size, seconds = (np.concatenate([branch[field] for branch in branches]) for field in (2, 3))
        order = np.lexsort((size, self.incumbents.score(seconds, size, bounds.space)))
        batch_size = FIRST_BATCH
        while len(order):
            worth = self.incumbents.can_win(seconds[order], size[order], bounds.space)
            self._count_losers(bounds, candidates.take(order[~worth]))
            order = order[worth]
            self._explore(bounds, candidates.take(order[:batch_size]))
            self.evaluate_waiting(bounds, max_evaluated=EAGER)
            order = order[batch_size:]
            batch_size = FIRST_BATCH if self.incumbents.allowed_gap else min(MAX_BATCH, 2 * batch_size)
        self.evaluate_waiting(bounds)
        self.waiting = []

    def _count_losers(self, bounds: Bounds, losers: CandidateLayouts) -> None:
        if len(losers.partial):
            times = int(self._count_layouts(bounds, losers, "zero order").sum())
            self.incumbents.rejections.add_slower("bound", times, bounds.space.layout(bounds.partials, losers, 0))
            self.report_done(times)

    def _explore(self, bounds: Bounds, candidates: CandidateLayouts) -> None:
        """Filter some candidates by bounds, the cheapest first. Evaluate the most promising and queue the rest."""
        if not self.timed or self.few_fit:
            self._explore_sizes(bounds, candidates)
            return
        space, partials = bounds.space, bounds.partials
        size = np.zeros(len(candidates.partial))
        seconds = np.zeros(len(candidates.partial))
        has_incumbent = bool(self.incumbents.best)
        for max_sequences, any_recomputation in (
            ((1, True), (SMALL_MICRO_BATCH, False), (1, False)) if has_incumbent else ()
        ):
            if len(seconds):
                bound = bounds.bound_seconds_of_any_order(
                    candidates, max_sequences=max_sequences, any_recomputation=any_recomputation
                )
                candidates, size, seconds = self._select_fast(bounds, candidates, size, bound, left="zero order")
        for rows in _split_rows(candidates):
            sharded = space.shard(partials, candidates.take(rows))
            size = np.zeros(len(sharded.zero))
            seconds = np.zeros(len(sharded.zero))
            for scaled in (True,) if has_incumbent else (True, False):  # the same in every order
                if len(size):
                    size = bounds.memory(sharded, scaled=scaled)
                    sharded, size, seconds = self._select_fitting(bounds, sharded, size, seconds, left="order")
            sharded, index = space.expand_orders(partials, sharded)
            size, seconds = size[index], seconds[index]
            if has_incumbent and len(size):
                bound = bounds.seconds_of_adjacent_units(sharded)
                sharded, size, seconds = self._select_fast(bounds, sharded, size, bound, left="")
                if len(size):
                    sharded, size, seconds = self._select_fitting(
                        bounds, sharded, bounds.memory_of_orders(sharded), seconds, left=""
                    )
            if len(size):
                sharded, size, seconds = self._select_fast(bounds, sharded, size, bounds.seconds(sharded), left="")
            if len(size):
                distinct = bounds.estimates.find_distinct(sharded)
                self.wait(bounds, sharded.take(distinct), size[distinct], seconds[distinct])
                self.evaluate_waiting(bounds, max_evaluated=EAGER)

    def _explore_sizes(self, bounds: Bounds, candidates: CandidateLayouts) -> None:
        """Explore like ``_explore`` when time does not matter or few layouts fit: memory is the same in every order."""
        space, partials = bounds.space, bounds.partials
        for rows in _split_rows(candidates):
            sharded = space.shard(partials, candidates.take(rows))
            size = np.zeros(len(sharded.zero))
            none = np.zeros(len(sharded.zero))
            for scaled in (True, False):
                if len(size):
                    size = bounds.memory(sharded, scaled=scaled)
                    sharded, size, none = self._select_fitting(bounds, sharded, size, none, left="order")
                    sharded, size, none = self._select_fast(bounds, sharded, size, (none, None), left="order")
            if self.timed:
                self._place_fitting(bounds, sharded, size)
            elif len(size):
                self.wait(bounds, space.place_first(partials, sharded), size, none)
                self.evaluate_waiting(bounds, max_evaluated=EAGER)

    def _place_fitting(self, bounds: Bounds, candidates: CandidateLayouts, size: Floats) -> None:
        """Queue every order of candidates that can win by time and that fit. Their memory is counted once."""
        seconds = np.zeros(len(size))
        if self.incumbents.best and len(size):
            candidates, size, seconds = self._select_fast(
                bounds, candidates, size, bounds.bound_seconds_of_any_order(candidates), left="order"
            )
        first = bounds.space.place_first(bounds.partials, candidates)
        layouts = (bounds.space.layout(bounds.partials, first, at) for at in range(len(size)))
        peaks = np.array([self.incumbents.excess_bytes(bounds.planner, layout) for layout in layouts], float)
        large = peaks > 0
        losers = candidates.take(large)
        times = self._count_layouts(bounds, candidates.take(large), "order")
        self.report_done(int(times.sum()))
        self.incumbents.rejections.add_too_large(
            times, peaks[large], lambda at: bounds.space.layout(bounds.partials, losers, at)
        )
        candidates, size = candidates.take(~large), size[~large]
        ordered, index = bounds.space.expand_orders(bounds.partials, candidates)
        if len(index):
            ordered, size, seconds = self._select_fast(bounds, ordered, size[index], bounds.seconds(ordered), left="")
        if len(size):
            distinct = bounds.estimates.find_distinct(ordered)
            self.wait(bounds, ordered.take(distinct), size[distinct], seconds[distinct])
            self.evaluate_waiting(bounds, max_evaluated=EAGER)

    def evaluate_waiting(self, bounds: Bounds, *, max_evaluated: int | None = None) -> None:
        """Evaluate queued candidates, best bound first: all of them, or the ``max_evaluated`` promising."""
        if not self.waiting:
            return
        candidates = CandidateLayouts(
            *(np.concatenate(columns) for columns in zip(*(queued[0] for queued in self.waiting), strict=True))
        )
        size, seconds = (np.concatenate([queued[best] for queued in self.waiting]) for best in (1, 2))
        groups = np.concatenate([queued[3] for queued in self.waiting])
        space = bounds.space
        score = self.incumbents.score(seconds, size, bounds.space)
        order = np.lexsort((size, score))
        while len(order) and max_evaluated != 0:
            best = int(order[0])
            if self.incumbents.can_candidate_win(score[best], size[best], seconds[best]):
                batch = order[groups[order] == groups[best]] if groups[best] >= 0 else order[:0]
                batch = batch[:MAX_GROUPED]
                groups[batch] = -1
                if len(batch) > MAX_UNGROUPED:
                    seconds[batch] = np.maximum(seconds[batch], simulate_group(bounds, candidates.take(batch)))
                    score = self.incumbents.score(seconds, size, space)
                    order = order[np.lexsort((size[order], score[order]))]
                    continue
                self.incumbents.evaluate(bounds.planner, space.layout(bounds.partials, candidates, best))
                order = order[1:]
                max_evaluated = max_evaluated if max_evaluated is None else max_evaluated - 1
            else:
                worth = self.incumbents.can_win(seconds[order], size[order], space)
                self.incumbents.rejections.add_slower(
                    "bound", int((~worth).sum()), space.layout(bounds.partials, candidates, best)
                )
                order = order[worth]
        self.waiting = [(candidates.take(order), size[order], seconds[order], groups[order])] if len(order) else []

    def _count_layouts(self, bounds: Bounds, candidates: CandidateLayouts, left: str) -> Ints:
        """Return the number of layouts per row; ``left``: columns not yet expanded (``zero``, ``order``, ``ac``)."""
        partials = bounds.partials.take(candidates.partial)
        times = np.ones(len(candidates.partial), np.int64)
        if "ac" in left:
            times *= len(bounds.space.recomputations)
        if "zero" in left:
            times = times * bounds.space.count_zeros(partials)
        return times * bounds.space.count_orders(partials) if "order" in left else times

    def _select_fitting(
        self, bounds: Bounds, candidates: CandidateLayouts, size: Floats, seconds: Floats, *, left: str
    ) -> tuple[CandidateLayouts, Floats, Floats]:
        """Return the candidates whose bytes fit. The others are counted as too large."""
        large = size > self.incumbents.capacity
        losers = candidates.take(large)
        times = self._count_layouts(bounds, losers, left)
        self.report_done(int(times.sum()))
        self.incumbents.rejections.add_too_large(
            times, size[large], lambda at: bounds.space.layout(bounds.partials, losers, at)
        )
        return candidates.take(~large), size[~large], seconds[~large]

    def _select_fast(
        self,
        bounds: Bounds,
        candidates: CandidateLayouts,
        size: Floats,
        bound: tuple[Floats, Floats | None],
        *,
        left: str,
    ) -> tuple[CandidateLayouts, Floats, Floats]:
        """Return the candidates that can still win.

        The others are counted under the part by which they exceed the best the most.
        """
        space, partials, (seconds, parts) = bounds.space, bounds.partials, bound
        rejections, best = self.incumbents.rejections, self.incumbents.best
        worth = self.incumbents.can_win(seconds, size, space)
        losers = candidates.take(~worth)
        times = self._count_layouts(bounds, losers, left)
        self.report_done(int(times.sum()))
        if len(times):
            causes = np.full(len(times), TIME_PARTS[0])
            if parts is not None and best:
                longer = parts[~worth] - rejections.parts(best[0].estimate)
                # without a part that takes longer, the layout lost by its memory
                causes = np.where(longer.max(axis=1) > 0, np.array(TIME_PARTS)[longer.argmax(axis=1)], "bound")
            for cause in np.unique(causes):
                members = np.flatnonzero(causes == cause)
                nearest = members[seconds[~worth][members].argmin()]
                rejections.add_slower(
                    str(cause), int(times[members].sum()), space.layout(partials, losers, int(nearest))
                )
        return candidates.take(worth), size[worth], seconds[worth]

    def report_done(self, more: int) -> None:
        """Add to the number of layouts that are done, and report it."""
        self.done += more
        if self.report:
            self.report(self.done, self.total)


def _split_rows(candidates: CandidateLayouts) -> list[Ints]:
    """Return the rows of ``candidates`` in parts that are small enough to multiply."""
    number = len(candidates.partial)
    return np.array_split(np.arange(number), -(-number // PART)) if number else []

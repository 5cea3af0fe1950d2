"""Branch and bound over one space after another, with the best layouts found so far as the threshold.

partial layouts, best bound first → schedules whose bounds fit and beat the threshold → orders → ZeRO → estimated by
the planner, best bound first, until the next bound exceeds the threshold
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
from fivefold.planner.search.simulated_bound import TOGETHER, group_schedules, simulate_group
from fivefold.planner.search.tables import LARGE_MICRO_BATCH, SMALL_MICRO_BATCH

FIRST_BATCH, MAX_BATCH = 200, 100_000  # schedules of partial layouts explored at once: few until a good layout is known
STEMS = 500  # partial layouts without recomputation of which all schedules are written out at once
PART = 4096  # candidates of which every ZeRO stage and order is written out at once
EAGER = 8  # candidates evaluated after each batch, so that the threshold falls early
MAX_UNGROUPED = 2  # candidates of one schedule that are evaluated at once, instead of played together before
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
        return [floor for block in blocks if len((floor := self._floor(bounds, block)).size)]

    def sweep(self, bounds: Bounds, floors: list[BoundedSpace]) -> None:
        """Search all layouts of what ``floors`` returned of a space."""
        opened, rows = list[ExpandedCandidates](), 0
        for floor in floors:
            for expanded in self.expand_best_first(bounds, self._prune(bounds, floor)):
                opened, rows = [*opened, expanded], rows + len(expanded.seconds)
                if rows > MAX_BATCH:
                    self._finish(bounds, opened)
                    opened, rows = [], 0
        self._finish(bounds, opened)

    def _floor(self, bounds: Bounds, block: PartialLayouts) -> BoundedSpace:
        """Return partial layouts that have a schedule and may fit."""
        stems, none = block.take(bounds.space.candidates_of(block) > 0), np.zeros(0)
        if not len(stems.dp):
            return BoundedSpace(stems, none, none)
        size = bounds.restrict_to(stems).resting_bytes()
        large = size > self.incumbents.capacity
        self._count_too_large(bounds.restrict_to(stems.take(large)), size[large])
        stems = stems.take(~large)
        timed = self.timed and len(stems.dp)
        return BoundedSpace(
            stems,
            size[~large],
            bounds.restrict_to(stems).floor(most=LARGE_MICRO_BATCH, complete=False)
            if timed
            else np.zeros(len(stems.dp)),
        )

    def _prune(self, bounds: Bounds, floor: BoundedSpace) -> BoundedSpace:
        """Return ``floor`` without partial layouts that can no longer win, by their bounds and by tighter ones."""
        for tight in (False, True) if self.timed else (False,):
            if tight and len(floor.size):
                floor = floor._replace(seconds=bounds.restrict_to(floor.stems).floor(most=SMALL_MICRO_BATCH))
            worth = self.incumbents.can_win(floor.seconds, floor.size, bounds.space)
            self._count_slower(bounds.restrict_to(floor.stems.take(~worth)), floor.seconds[~worth])
            floor = BoundedSpace(floor.stems.take(worth), floor.size[worth], floor.seconds[worth])
        return floor

    def expand_best_first(self, bounds: Bounds, floor: BoundedSpace) -> Iterator[ExpandedCandidates]:
        """Yield all schedules of partial layouts, the most promising first."""
        best = np.lexsort((floor.size, self.incumbents.score(floor.seconds, floor.size, bounds.space)))
        for start in range(0, len(best), STEMS):
            yield self._open_up(bounds.restrict_to(floor.stems.take(best[start : start + STEMS])))

    def _count_too_large(self, bounds: Bounds, size: Floats) -> None:
        """Count partial layouts, without their recomputation, that are too large whatever their schedule."""
        space, partials = bounds.space, bounds.partials
        count = space.candidates_of(partials) * len(space.recomputations)
        self.incumbents.rejections.add_too_large(count, size, lambda at: space.pick_layout(partials, at))
        self.report_done(int(count.sum()))

    def _count_slower(self, bounds: Bounds, seconds: Floats) -> None:
        """Count partial layouts, without their recomputation, that are slower whatever their schedule."""
        if len(seconds):
            count = int(bounds.space.candidates_of(bounds.partials).sum()) * len(bounds.space.recomputations)
            nearest = bounds.space.pick_layout(bounds.partials, int(seconds.argmin()))
            self.incumbents.rejections.add_slower("compute", count, nearest)
            self.report_done(count)

    def wait(self, bounds: Bounds, candidates: CandidateLayouts, size: Floats, seconds: Floats) -> None:
        """Queue candidates with their bounds."""
        unplayed = group_schedules(bounds, candidates) if self.timed else np.full(len(size), -1)
        self.waiting.append((candidates, size, seconds, unplayed))

    def _open_up(self, bounds: Bounds) -> ExpandedCandidates:
        """Return every schedule of partial layouts with every recomputation, without those that bounds exclude.

        The bounds hold for every micro-batch. Bounds of time that hold for every recomputation are applied first.
        """
        space, stems = bounds.space, bounds.partials
        candidates = space.expand(stems, np.arange(len(stems.dp)))
        size, seconds = np.zeros(len(candidates.partial)), np.zeros(len(candidates.partial))
        kinds = len(space.recomputations)
        rival = (
            self.timed and bool(self.incumbents.best) and not self.few_fit
        )  # else no bound of time excludes a layout: memory first
        if rival and len(seconds):
            bound = bounds.seconds_of_any_order(candidates, most=SMALL_MICRO_BATCH, bare=True)
            candidates, size, seconds = self._select_fast(bounds, candidates, size, bound, left="zero order ac")
        if not rival and len(seconds) and "activations" not in bounds.planner.job.offload:
            size = bounds.memory(candidates, states=bounds.estimates.min_states(candidates), limit=True, bare=True)
            candidates, size, seconds = self._select_fitting(bounds, candidates, size, seconds, left="zero order ac")
            candidates, size, seconds = self._select_fast(
                bounds, candidates, size, (seconds, None), left="zero order ac"
            )
        bounds = bounds.restrict_to(space.expand_recomputations(stems))
        partials, size, seconds = bounds.partials, np.repeat(size, kinds), np.repeat(seconds, kinds)
        candidates = candidates.take(np.repeat(np.arange(len(candidates.partial)), kinds))
        number = np.tile(np.arange(kinds), len(candidates.partial) // kinds)
        candidates = candidates._replace(partial=candidates.partial * kinds + number)
        if rival and len(seconds):
            bound = bounds.seconds_of_any_order(candidates, most=LARGE_MICRO_BATCH)
            candidates, size, seconds = self._select_fast(bounds, candidates, size, bound, left="zero order")
        if len(seconds):
            size = bounds.memory(candidates, states=bounds.estimates.min_states(candidates), limit=True)
            candidates, size, seconds = self._select_fitting(bounds, candidates, size, seconds, left="zero order")
        if self.timed and not rival and len(seconds):
            seconds, _ = bounds.seconds_of_any_order(candidates, most=LARGE_MICRO_BATCH)
        used, place = np.unique(candidates.partial, return_inverse=True)
        return ExpandedCandidates(partials.take(used), candidates._replace(partial=place), size, seconds)

    def _finish(self, bounds: Bounds, opened: list[ExpandedCandidates]) -> None:
        """Explore what was opened, best bound first."""
        offsets = np.cumsum([0, *(len(branch.partials.dp) for branch in opened)])
        bounds = bounds.restrict_to(concatenate([branch.partials for branch in opened]))
        moved = [
            branch.candidates._replace(partial=branch.candidates.partial + offset)
            for branch, offset in zip(opened, offsets, strict=False)
        ]
        if not moved:
            return
        candidates = CandidateLayouts(*(np.concatenate(columns) for columns in zip(*moved, strict=True)))
        size, seconds = (np.concatenate([branch[at] for branch in opened]) for at in (2, 3))
        order, room = np.lexsort((size, self.incumbents.score(seconds, size, bounds.space))), FIRST_BATCH
        while len(order):
            worth = self.incumbents.can_win(seconds[order], size[order], bounds.space)
            self._count_losers(bounds, candidates.take(order[~worth]))
            order = order[worth]
            self._explore(bounds, candidates.take(order[:room]))
            self.evaluate_waiting(bounds, most=EAGER)
            order = order[room:]
            room = FIRST_BATCH if self.incumbents.allowed_gap else min(MAX_BATCH, 2 * room)
        self.evaluate_waiting(bounds)
        self.waiting = []

    def _count_losers(self, bounds: Bounds, losers: CandidateLayouts) -> None:
        if len(losers.partial):
            times = int(self._times(bounds, losers, "zero order").sum())
            self.incumbents.rejections.add_slower("bound", times, bounds.space.layout(bounds.partials, losers, 0))
            self.report_done(times)

    def _explore(self, bounds: Bounds, candidates: CandidateLayouts) -> None:
        """Filter some candidates by bounds, the cheapest first. Evaluate the most promising and queue the rest."""
        if not self.timed or self.few_fit:
            self._explore_sizes(bounds, candidates)
            return
        space, partials = bounds.space, bounds.partials
        size, seconds = np.zeros(len(candidates.partial)), np.zeros(len(candidates.partial))
        rival = bool(self.incumbents.best)
        for most, bare in ((1, True), (SMALL_MICRO_BATCH, False), (1, False)) if rival else ():
            if len(seconds):
                bound = bounds.seconds_of_any_order(candidates, most=most, bare=bare)
                candidates, size, seconds = self._select_fast(bounds, candidates, size, bound, left="zero order")
        for part in _parts(candidates):
            sharded = space.shard(partials, candidates.take(part))
            least, seconds = np.zeros(len(sharded.zero)), np.zeros(len(sharded.zero))
            for limit in (True,) if rival else (True, False):  # the same in every order
                if len(least):
                    least = bounds.memory(sharded, limit=limit)
                    sharded, least, seconds = self._select_fitting(bounds, sharded, least, seconds, left="order")
            sharded, index = space.expand_orders(partials, sharded)
            least, seconds = least[index], seconds[index]
            if rival and len(least):
                bound = bounds.seconds_of_adjacent_units(sharded)
                sharded, least, seconds = self._select_fast(bounds, sharded, least, bound, left="")
                if len(least):
                    sharded, least, seconds = self._select_fitting(
                        bounds, sharded, bounds.memory(sharded), seconds, left=""
                    )
            if len(least):
                sharded, least, seconds = self._select_fast(bounds, sharded, least, bounds.seconds(sharded), left="")
            if len(least):
                one = bounds.estimates.find_distinct(sharded)
                self.wait(bounds, sharded.take(one), least[one], seconds[one])
                self.evaluate_waiting(bounds, most=EAGER)

    def _explore_sizes(self, bounds: Bounds, candidates: CandidateLayouts) -> None:
        """Explore like ``_explore`` when time does not matter or few layouts fit: memory is the same in every order."""
        space, partials = bounds.space, bounds.partials
        for part in _parts(candidates):
            sharded = space.shard(partials, candidates.take(part))
            size, none = np.zeros(len(sharded.zero)), np.zeros(len(sharded.zero))
            for limit in (True, False):
                if len(size):
                    size = bounds.memory(sharded, limit=limit)
                    sharded, size, none = self._select_fitting(bounds, sharded, size, none, left="order")
                    sharded, size, none = self._select_fast(bounds, sharded, size, (none, None), left="order")
            if self.timed:
                self._place_fitting(bounds, sharded, size)
            elif len(size):
                self.wait(bounds, space.placed_first(partials, sharded), size, none)
                self.evaluate_waiting(bounds, most=EAGER)

    def _place_fitting(self, bounds: Bounds, candidates: CandidateLayouts, size: Floats) -> None:
        """Queue every order of candidates that can win by time and that fit. Their memory is counted once."""
        seconds = np.zeros(len(size))
        if self.incumbents.best and len(size):
            candidates, size, seconds = self._select_fast(
                bounds, candidates, size, bounds.seconds_of_any_order(candidates), left="order"
            )
        first = bounds.space.placed_first(bounds.partials, candidates)
        layouts = (bounds.space.layout(bounds.partials, first, at) for at in range(len(size)))
        peaks = np.array([self.incumbents.excess_bytes(bounds.planner, layout) for layout in layouts], float)
        large = peaks > 0
        losers, times = candidates.take(large), self._times(bounds, candidates.take(large), "order")
        self.report_done(int(times.sum()))
        self.incumbents.rejections.add_too_large(
            times, peaks[large], lambda at: bounds.space.layout(bounds.partials, losers, at)
        )
        candidates, size = candidates.take(~large), size[~large]
        placed, index = bounds.space.expand_orders(bounds.partials, candidates)
        if len(index):
            placed, size, seconds = self._select_fast(bounds, placed, size[index], bounds.seconds(placed), left="")
        if len(size):
            one = bounds.estimates.find_distinct(placed)
            self.wait(bounds, placed.take(one), size[one], seconds[one])
            self.evaluate_waiting(bounds, most=EAGER)

    def evaluate_waiting(self, bounds: Bounds, *, most: int | None = None) -> None:
        """Evaluate queued candidates, best bound first: all of them, or the ``most`` promising."""
        if not self.waiting:
            return
        candidates = CandidateLayouts(
            *(np.concatenate(columns) for columns in zip(*(w[0] for w in self.waiting), strict=True))
        )
        size, seconds = (np.concatenate([w[at] for w in self.waiting]) for at in (1, 2))
        unplayed = np.concatenate([w[3] for w in self.waiting])
        space, score = bounds.space, self.incumbents.score(seconds, size, bounds.space)
        order = np.lexsort((size, score))
        while len(order) and most != 0:
            at = int(order[0])
            if self.incumbents.can_candidate_win(score[at], size[at], seconds[at]):
                batch = order[unplayed[order] == unplayed[at]] if unplayed[at] >= 0 else order[:0]
                batch = batch[:TOGETHER]
                unplayed[batch] = -1
                if len(batch) > MAX_UNGROUPED:
                    seconds[batch] = np.maximum(seconds[batch], simulate_group(bounds, candidates.take(batch)))
                    score = self.incumbents.score(seconds, size, space)
                    order = order[np.lexsort((size[order], score[order]))]
                    continue
                self.incumbents.evaluate(bounds.planner, space.layout(bounds.partials, candidates, at))
                order, most = order[1:], most if most is None else most - 1
            else:
                worth = self.incumbents.can_win(seconds[order], size[order], space)
                self.incumbents.rejections.add_slower(
                    "bound", int((~worth).sum()), space.layout(bounds.partials, candidates, at)
                )
                order = order[worth]
        self.waiting = [(candidates.take(order), size[order], seconds[order], unplayed[order])] if len(order) else []

    def _times(self, bounds: Bounds, candidates: CandidateLayouts, left: str) -> Ints:
        """Return the number of layouts per row; ``left``: columns not yet expanded (``zero``, ``order``, ``ac``)."""
        partials, times = bounds.partials.take(candidates.partial), np.ones(len(candidates.partial), np.int64)
        if "ac" in left:
            times *= len(bounds.space.recomputations)
        if "zero" in left:
            times = times * bounds.space.zeros_each(partials)
        return times * bounds.space.count_orders(partials) if "order" in left else times

    def _select_fitting(
        self, bounds: Bounds, candidates: CandidateLayouts, size: Floats, seconds: Floats, *, left: str
    ) -> tuple[CandidateLayouts, Floats, Floats]:
        """Return the candidates whose bytes fit. The others are counted as too large."""
        large = size > self.incumbents.capacity
        losers = candidates.take(large)
        times = self._times(bounds, losers, left)
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
        times = self._times(bounds, losers, left)
        self.report_done(int(times.sum()))
        if len(times):
            most = np.zeros(len(times), np.int64)
            if parts is not None and best:
                most = (parts[~worth] - rejections.parts(best[0].estimate)).argmax(axis=1)
            for part in np.unique(most):
                at = np.flatnonzero(most == part)
                nearest = at[seconds[~worth][at].argmin()]
                rejections.add_slower(
                    TIME_PARTS[part], int(times[at].sum()), space.layout(partials, losers, int(nearest))
                )
        return candidates.take(worth), size[worth], seconds[worth]

    def report_done(self, more: int) -> None:
        """Add to the number of layouts that are done, and report it."""
        self.done += more
        if self.report:
            self.report(self.done, self.total)


def _parts(candidates: CandidateLayouts) -> list[Ints]:
    """Return the rows of ``candidates`` in parts that are small enough to multiply."""
    number = len(candidates.partial)
    return np.array_split(np.arange(number), -(-number // PART)) if number else []

"""Branch and bound over one space after another, with the best layouts found so far as the threshold.

partial layouts, best bound first → schedules whose bounds fit and beat the threshold → orders → ZeRO → estimated by
the planner, best bound first, until the next bound exceeds the threshold
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivefold.job import Job
from fivefold.layout.search_result import By
from fivefold.layout.spec import Layout
from fivefold.machine.spec import Machine
from fivefold.plan.count.memory.allocator import room_bytes
from fivefold.plan.predict import Estimate, Planner, fullest
from fivefold.plan.search.bounds import PARTS, Bounds
from fivefold.plan.search.columns import Ints
from fivefold.plan.search.rejections import Rejections
from fivefold.plan.search.space import CandidateLayouts, Space

# partial layouts with a schedule per batch: few until a good layout is known
FIRST, MOST = 1_000, 20_000
SCOUTS = 2_000  # partial layouts explored before all others
EAGER = 4  # candidates of each batch that are evaluated at once, so that the threshold falls early
Report = Callable[[int, int], None]  # layouts done, of how many


class EvaluatedLayout(NamedTuple):
    """An evaluated layout that fits; the first four fields are the key of the ranking."""

    score: float
    peak_bytes: int
    seconds: float
    text: str
    estimate: Estimate
    planner: Planner


class BranchAndBound:
    """State of a search: the ``top`` best, the fastest under each of ``levels`` memory budgets, the losers by cause.

    ``levels=0``: no budgets. ``any_will_do``: stop at the first layout that fits.
    """

    def __init__(
        self, machine: Machine, *, by: By, top: int, levels: int, report: Report | None = None,
        any_will_do: bool = False,
    ) -> None:  # fmt: skip
        self.by, self.top, self.report, self.any_will_do = by, top, report, any_will_do
        self.timed = by != "memory" or levels > 0
        self.capacity = room_bytes(machine)
        self.best: list[EvaluatedLayout] = []
        self.fitting: list[EvaluatedLayout] = []
        self.budgets = self.capacity * (1 + np.arange(max(1, levels))) / max(1, levels)
        self.fastest = np.full(max(1, levels), np.inf if levels else 0.0)  # per budget; 0: nothing is faster
        self.rejections = Rejections(self.capacity)
        self.seen: set[tuple[Layout, Job]] = set()
        self.ranks_per_node = machine.ranks_per_node
        self.waiting: list[tuple[CandidateLayouts, NDArray[np.float64], NDArray[np.float64]]] = []
        self.total = self.done = self.evaluated = 0

    @property
    def threshold(self) -> float:
        """The score that a layout must not exceed to be among the ``top``."""
        if self.any_will_do and self.best:
            return -np.inf
        return self.best[-1].score if len(self.best) == self.top else np.inf

    def sweep(self, bounds: Bounds) -> None:
        """Search all layouts of one space."""
        space, partials = bounds.space, bounds.partials
        count = space.candidates_of(partials)
        size, seconds = bounds.floor(timed=self.timed)
        large = size > self.capacity
        self.rejections.too_large(
            count[large], size[large], lambda at: space.any_layout(int(np.flatnonzero(large)[at]))
        )
        self._report_done(int(count[large].sum()))
        partial = np.flatnonzero(~large & (count > 0))
        score = self._score(seconds, size, space)
        partial = partial[np.argsort(score[partial], kind="stable")]
        self._scout(bounds, partial)
        start, room = 0, FIRST
        while start < len(partial):
            if not self._open(score[partial[start]], size[partial[start:]].min(), seconds[partial[start]]):
                self.rejections.slower(
                    "compute", int(count[partial[start:]].sum()), space.any_layout(int(partial[start]))
                )
                self._report_done(int(count[partial[start:]].sum()))
                break
            reach = np.cumsum(space.shapes_each(partials.take(partial[start:])))
            end = start + max(1, int(np.searchsorted(reach, room)))
            self._explore(bounds, partial[start:end])
            start, room = end, min(MOST, 2 * room)
        self._evaluate_waiting(bounds)

    def _scout(self, bounds: Bounds, partial: Ints) -> None:
        """Explore likely good layouts (tp·cp within a node, m ≥ 4·pp) to lower the threshold; count no losers."""
        s, m = bounds.partials.take(partial), bounds.micro_batches[partial]
        likely = partial[(s.tp * s.cp <= self.ranks_per_node) & ((s.pp == 1) | (m >= 4 * s.pp))]
        rejections, done, report = self.rejections, self.done, self.report
        self.rejections, self.report = Rejections(self.capacity), None
        for some in np.array_split(likely[:SCOUTS], 8):
            if len(some):
                self._explore(bounds, some)
        self.rejections, self.done, self.report, self.waiting = rejections, done, report, []

    def _explore(self, bounds: Bounds, partial: Ints) -> None:
        """Filter the candidates of some partial layouts by bounds, the cheapest first; evaluate the most promising and
        queue the rest.
        """
        space, partials = bounds.space, bounds.partials
        candidates = space.expand(partials, partial)
        for limit in (True, False):
            size = bounds.memory(candidates, states=bounds.estimates.lightest(candidates), limit=limit)
            candidates, size = self._fitting(bounds, candidates, size, left="zero order")
            if not len(size):
                return
            seconds = bounds.without_messages(candidates, limit=limit)
            candidates, size, _ = self._fast(bounds, candidates, size, (seconds, None), left="zero order")
            if not len(size):
                return
        candidates = space.place(partials, candidates)
        size = bounds.memory(candidates, states=bounds.estimates.lightest(candidates))
        candidates, size, _ = self._fast(bounds, candidates, size, bounds.without_zero(candidates), left="zero")
        if not len(size):
            return
        for part in np.array_split(np.arange(len(size)), -(-len(size) // 4096)):
            some = space.shard(partials, candidates.take(part))
            some, least = self._fitting(bounds, some, bounds.memory(some), left="")
            if not len(least):
                continue
            some, least, seconds = self._fast(bounds, some, least, bounds.seconds(some), left="")
            if not len(least):
                continue
            alike = bounds.estimates.distinct(some)
            self.waiting.append((some.take(alike), least[alike], seconds[alike]))
            self._evaluate_waiting(bounds, most=EAGER)

    def _evaluate_waiting(self, bounds: Bounds, *, most: int | None = None) -> None:
        """Evaluate queued candidates, best bound first: all of them, or the ``most`` promising of the last batch."""
        if not self.waiting:
            return
        if most is None:
            candidates = CandidateLayouts(
                *(np.concatenate(columns) for columns in zip(*(w[0] for w in self.waiting), strict=True))
            )
            size, seconds = (np.concatenate([w[at] for w in self.waiting]) for at in (1, 2))
            self.waiting = []
        else:
            candidates, size, seconds = self.waiting.pop()
        space, score = bounds.space, self._score(seconds, size, bounds.space)
        order = np.lexsort((size, score))
        rest = order[most:] if most is not None else order[:0]
        order = order[:most]
        while len(order):
            at = int(order[0])
            if self._open(score[at], size[at], seconds[at]):
                self._evaluate(bounds.planner, space.layout(bounds.partials, candidates, at))
                order = order[1:]
            else:
                worth = self._can_win(seconds[order], size[order], space)
                self.rejections.slower("bound", int((~worth).sum()), space.layout(bounds.partials, candidates, at))
                order = order[worth]
        if len(rest):
            self.waiting.append((candidates.take(rest), size[rest], seconds[rest]))

    def _evaluate(self, planner: Planner, layout: Layout) -> None:
        """Estimate one layout and update the best, the budgets or the rejections."""
        if (layout, planner.job) in self.seen:
            return
        self.seen.add((layout, planner.job))
        ranks = planner.memory(layout)
        self.evaluated += 1
        peak = fullest(ranks)
        if peak > self.capacity:
            self.rejections.too_large(np.ones(1, np.int64), np.array([float(peak)]), lambda _: layout)
            return
        estimate = planner.estimate(layout, ranks=ranks)
        seconds = estimate.step_time.seconds
        score = {"time": seconds, "cost": seconds * layout.world, "memory": float(peak)}[self.by]
        found = EvaluatedLayout(score, peak, seconds, str(layout), estimate, planner)
        if score <= self.threshold:
            self.best = sorted([*self.best, found], key=lambda each: each[:4])[: self.top]
        self.rejections.beaten(estimate)
        within = self.budgets >= peak
        self.fitting.append(found)
        if within.any():
            self.fastest[within] = np.minimum(self.fastest[within], seconds)

    def _score(self, seconds: NDArray[np.float64], size: NDArray[np.float64], space: Space) -> NDArray[np.float64]:
        return {"time": seconds, "cost": seconds * space.world, "memory": size}[self.by]

    def _can_win(self, seconds: NDArray[np.float64], size: NDArray[np.float64], space: Space) -> NDArray[np.bool_]:
        """Which candidates could still be among the best, or the fastest within their memory budget."""
        budget = np.minimum(np.searchsorted(self.budgets, size), len(self.budgets) - 1)
        return (self._score(seconds, size, space) <= self.threshold) | (seconds < self.fastest[budget])

    def _open(self, score: float, size: float, seconds: float) -> bool:
        """``_can_win`` for one candidate."""
        budget = min(int(np.searchsorted(self.budgets, size)), len(self.budgets) - 1)
        return bool(score <= self.threshold or seconds < self.fastest[budget])

    def _times(self, bounds: Bounds, candidates: CandidateLayouts, left: str) -> Ints:
        """How many layouts each row stands for; ``left``: columns not yet expanded (``zero``, ``order``)."""
        partials, times = bounds.partials.take(candidates.partial), np.ones(len(candidates.partial), np.int64)
        if "zero" in left:
            times = times * bounds.space.zeros_each(partials)
        return times * bounds.space.orders_each(partials) if "order" in left else times

    def _fitting(
        self, bounds: Bounds, candidates: CandidateLayouts, size: NDArray[np.float64], *, left: str
    ) -> tuple[CandidateLayouts, NDArray[np.float64]]:  # fmt: skip
        """Candidates whose bytes fit; the others are counted as too large."""
        large = size > self.capacity
        losers = candidates.take(large)
        times = self._times(bounds, losers, left)
        self._report_done(int(times.sum()))
        self.rejections.too_large(times, size[large], lambda at: bounds.space.layout(bounds.partials, losers, at))
        return candidates.take(~large), size[~large]

    def _fast(
        self, bounds: Bounds, candidates: CandidateLayouts, size: NDArray[np.float64],
        bound: tuple[NDArray[np.float64], NDArray[np.float64] | None], *, left: str,
    ) -> tuple[CandidateLayouts, NDArray[np.float64], NDArray[np.float64]]:  # fmt: skip
        """Candidates that can still win; the others are counted by the part on which they exceed the best the most."""
        space, partials, (seconds, parts) = bounds.space, bounds.partials, bound
        worth = self._can_win(seconds, size, space)
        losers = candidates.take(~worth)
        times = self._times(bounds, losers, left)
        self._report_done(int(times.sum()))
        if len(times):
            most = np.zeros(len(times), np.int64)
            if parts is not None and self.best:
                most = (parts[~worth] - self.rejections.parts(self.best[0].estimate)).argmax(axis=1)
            for part in np.unique(most):
                at = np.flatnonzero(most == part)
                nearest = at[seconds[~worth][at].argmin()]
                self.rejections.slower(PARTS[part], int(times[at].sum()), space.layout(partials, losers, int(nearest)))
        return candidates.take(worth), size[worth], seconds[worth]

    def _report_done(self, more: int) -> None:
        self.done += more
        if self.report:
            self.report(self.done, self.total)

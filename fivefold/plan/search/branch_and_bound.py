"""The hunt through one space after another: what is known so far, and what may still beat it.

stems, best bound first → schedules that may fit and be fast → orders → ZeRO → evaluated, best bound first,
until the bound of the next exceeds the best known
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
from fivefold.plan.search.rejections import Losses
from fivefold.plan.search.space import Ints, Leaves, Space

FIRST, MOST = 1_000, 20_000  # stems with schedules that are looked at in one go: few until a good one is known
SCOUTS = 2_000  # stems
EAGER = 4  # evaluated of each lot at once, so that the bar is low early
Report = Callable[[int, int], None]  # layouts done, of how many


class Candidate(NamedTuple):
    """An evaluated layout that fits, in the order of the ranking."""

    score: float
    peak_bytes: int
    seconds: float
    text: str
    estimate: Estimate
    planner: Planner


class Hunt:
    """What is known so far: the ``top`` best, the fastest under each memory budget, and the losers by cause.

    ``levels=0``: the fastest are not asked for. ``any_will_do``: it ends with the first that fits.
    """

    def __init__(
        self, machine: Machine, *, by: By, top: int, levels: int, report: Report | None = None,
        any_will_do: bool = False,
    ) -> None:  # fmt: skip
        self.by, self.top, self.report, self.any_will_do = by, top, report, any_will_do
        self.timed = by != "memory" or levels > 0
        self.capacity = room_bytes(machine)
        self.best: list[Candidate] = []
        self.fitting: list[Candidate] = []
        self.budgets = self.capacity * (1 + np.arange(max(1, levels))) / max(1, levels)
        self.fastest = np.full(max(1, levels), np.inf if levels else 0.0)  # which none undercuts
        self.losses = Losses(self.capacity)
        self.seen: set[tuple[Layout, Job]] = set()
        self.ranks_per_node = machine.ranks_per_node
        self.waiting: list[tuple[Leaves, NDArray[np.float64], NDArray[np.float64]]] = []
        self.total = self.done = self.evaluated = 0

    @property
    def bar(self) -> float:
        """The score that a layout must not exceed."""
        if self.any_will_do and self.best:
            return -np.inf
        return self.best[-1].score if len(self.best) == self.top else np.inf

    def sweep(self, bounds: Bounds) -> None:
        """All layouts of one space."""
        space, stems = bounds.space, bounds.stems
        count = space.leaves_of(stems)
        size, seconds = bounds.floor(timed=self.timed)
        large = size > self.capacity
        self.losses.too_large(count[large], size[large], lambda at: space.any_layout(int(np.flatnonzero(large)[at])))
        self._tell(int(count[large].sum()))
        stem = np.flatnonzero(~large & (count > 0))
        score = self._score(seconds, size, space)
        stem = stem[np.argsort(score[stem], kind="stable")]
        self._scout(bounds, stem)
        start, room = 0, FIRST
        while start < len(stem):
            if not self._open(score[stem[start]], size[stem[start:]].min(), seconds[stem[start]]):
                self.losses.slower("compute", int(count[stem[start:]].sum()), space.any_layout(int(stem[start])))
                self._tell(int(count[stem[start:]].sum()))
                break
            reach = np.cumsum(space.shapes_each(stems.take(stem[start:])))
            end = start + max(1, int(np.searchsorted(reach, room)))
            self._look(bounds, stem[start:end])
            start, room = end, min(MOST, 2 * room)
        self._settle(bounds)

    def _scout(self, bounds: Bounds, stem: Ints) -> None:
        """Where people look first: tp and cp within a node, short bubbles. What is found lowers the bar."""
        s, m = bounds.stems.take(stem), bounds.micro_batches[stem]
        likely = stem[(s.tp * s.cp <= self.ranks_per_node) & ((s.pp == 1) | (m >= 4 * s.pp))]
        losses, done, report = self.losses, self.done, self.report
        self.losses, self.report = Losses(self.capacity), None
        for some in np.array_split(likely[:SCOUTS], 8):
            if len(some):
                self._look(bounds, some)
        self.losses, self.done, self.report, self.waiting = losses, done, report, []

    def _look(self, bounds: Bounds, stem: Ints) -> None:
        """The leaves of some stems through bounds of rising price; the most promising to the planner, others wait."""
        space, stems = bounds.space, bounds.stems
        leaves = space.expand(stems, stem)
        for limit in (True, False):
            size = bounds.memory(leaves, states=bounds.asked.lightest(leaves), limit=limit)
            leaves, size = self._fitting(bounds, leaves, size, left="zero order")
            if not len(size):
                return
            seconds = bounds.without_messages(leaves, limit=limit)
            leaves, size, _ = self._fast(bounds, leaves, size, (seconds, None), left="zero order")
            if not len(size):
                return
        leaves = space.place(stems, leaves)
        size = bounds.memory(leaves, states=bounds.asked.lightest(leaves))
        leaves, size, _ = self._fast(bounds, leaves, size, bounds.without_zero(leaves), left="zero")
        if not len(size):
            return
        for part in np.array_split(np.arange(len(size)), -(-len(size) // 4096)):
            some = space.shard(stems, leaves.take(part))
            some, least = self._fitting(bounds, some, bounds.memory(some), left="")
            if not len(least):
                continue
            some, least, seconds = self._fast(bounds, some, least, bounds.seconds(some), left="")
            if not len(least):
                continue
            alike = bounds.asked.distinct(some)
            self.waiting.append((some.take(alike), least[alike], seconds[alike]))
            self._settle(bounds, most=EAGER)

    def _settle(self, bounds: Bounds, *, most: int | None = None) -> None:
        """Evaluate what waits, best bound first: all of it, or the ``most`` promising of the last to come."""
        if not self.waiting:
            return
        if most is None:
            leaves = Leaves(*(np.concatenate(columns) for columns in zip(*(w[0] for w in self.waiting), strict=True)))
            size, seconds = (np.concatenate([w[at] for w in self.waiting]) for at in (1, 2))
            self.waiting = []
        else:
            leaves, size, seconds = self.waiting.pop()
        space, score = bounds.space, self._score(seconds, size, bounds.space)
        order = np.lexsort((size, score))
        rest = order[most:] if most is not None else order[:0]
        order = order[:most]
        while len(order):
            at = int(order[0])
            if self._open(score[at], size[at], seconds[at]):
                self._evaluate(bounds.planner, space.layout(bounds.stems, leaves, at))
                order = order[1:]
            else:
                worth = self._worth(seconds[order], size[order], space)
                self.losses.slower("bound", int((~worth).sum()), space.layout(bounds.stems, leaves, at))
                order = order[worth]
        if len(rest):
            self.waiting.append((leaves.take(rest), size[rest], seconds[rest]))

    def _evaluate(self, planner: Planner, layout: Layout) -> None:
        if (layout, planner.job) in self.seen:
            return
        self.seen.add((layout, planner.job))
        ranks = planner.memory(layout)
        self.evaluated += 1
        peak = fullest(ranks)
        if peak > self.capacity:
            self.losses.too_large(np.ones(1, np.int64), np.array([float(peak)]), lambda _: layout)
            return
        estimate = planner.estimate(layout, ranks=ranks)
        seconds = estimate.clock.seconds
        score = {"time": seconds, "cost": seconds * layout.world, "memory": float(peak)}[self.by]
        found = Candidate(score, peak, seconds, str(layout), estimate, planner)
        if score <= self.bar:
            self.best = sorted([*self.best, found], key=lambda each: each[:4])[: self.top]
        self.losses.beaten(estimate)
        within = self.budgets >= peak
        self.fitting.append(found)
        if within.any():
            self.fastest[within] = np.minimum(self.fastest[within], seconds)

    def _score(self, seconds: NDArray[np.float64], size: NDArray[np.float64], space: Space) -> NDArray[np.float64]:
        return {"time": seconds, "cost": seconds * space.world, "memory": size}[self.by]

    def _worth(self, seconds: NDArray[np.float64], size: NDArray[np.float64], space: Space) -> NDArray[np.bool_]:
        """Which could still be among the best, or the fastest within their memory."""
        budget = np.minimum(np.searchsorted(self.budgets, size), len(self.budgets) - 1)
        return (self._score(seconds, size, space) <= self.bar) | (seconds < self.fastest[budget])

    def _open(self, score: float, size: float, seconds: float) -> bool:
        budget = min(int(np.searchsorted(self.budgets, size)), len(self.budgets) - 1)
        return bool(score <= self.bar or seconds < self.fastest[budget])

    def _times(self, bounds: Bounds, leaves: Leaves, left: str) -> Ints:
        """How many layouts each row stands for while some of its columns are open."""
        stems, times = bounds.stems.take(leaves.stem), np.ones(len(leaves.stem), np.int64)
        if "zero" in left:
            times = times * bounds.space.zeros_each(stems)
        return times * bounds.space.orders_each(stems) if "order" in left else times

    def _fitting(
        self, bounds: Bounds, leaves: Leaves, size: NDArray[np.float64], *, left: str
    ) -> tuple[Leaves, NDArray[np.float64]]:  # fmt: skip
        large = size > self.capacity
        losers = leaves.take(large)
        times = self._times(bounds, losers, left)
        self._tell(int(times.sum()))
        self.losses.too_large(times, size[large], lambda at: bounds.space.layout(bounds.stems, losers, at))
        return leaves.take(~large), size[~large]

    def _fast(
        self, bounds: Bounds, leaves: Leaves, size: NDArray[np.float64],
        bound: tuple[NDArray[np.float64], NDArray[np.float64] | None], *, left: str,
    ) -> tuple[Leaves, NDArray[np.float64], NDArray[np.float64]]:  # fmt: skip
        """Those whose bound does not exceed the best; the others lost by what they spend more on than it does."""
        space, stems, (seconds, parts) = bounds.space, bounds.stems, bound
        worth = self._worth(seconds, size, space)
        losers = leaves.take(~worth)
        times = self._times(bounds, losers, left)
        self._tell(int(times.sum()))
        if len(times):
            most = np.zeros(len(times), np.int64)
            if parts is not None and self.best:
                most = (parts[~worth] - self.losses.parts(self.best[0].estimate)).argmax(axis=1)
            for part in np.unique(most):
                at = np.flatnonzero(most == part)
                nearest = at[seconds[~worth][at].argmin()]
                self.losses.slower(PARTS[part], int(times[at].sum()), space.layout(stems, losers, int(nearest)))
        return leaves.take(worth), size[worth], seconds[worth]

    def _tell(self, more: int) -> None:
        self.done += more
        if self.report:
            self.report(self.done, self.total)

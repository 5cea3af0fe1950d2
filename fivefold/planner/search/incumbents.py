"""The best layouts that a search has found, and the test whether another layout may still become one of them.

The score to minimize is seconds (by time), seconds · ranks (by cost) or bytes (by memory).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.planner.counts.memory.peak import RankMemory
from fivefold.planner.predict import Estimate, Planner, find_max_peak_bytes
from fivefold.planner.search.columns import Floats
from fivefold.planner.search.rejections import Rejections
from fivefold.planner.search.simplest import Evaluated
from fivefold.planner.search.space import Space
from fivefold.planner.search.work import SearchWork
from fivefold.results.search_result import By
from fivefold.step import TIGHT_RISK

MIN_EVALUATED_LAYOUTS = 100  # evaluated layouts after which a ranking may end


class EvaluatedLayout(NamedTuple):
    """An evaluated layout that fits, or is tight; the first four fields are the key of the ranking."""

    score: float
    peak_bytes: int
    seconds: float
    text: str
    estimate: Estimate
    planner: Planner

    @property
    def precision(self) -> str:
        """Return the name of the precision."""
        return self.planner.job.precision.name

    def to_evaluated(self) -> Evaluated:
        """Return the layout as the choice of the simplest one takes it."""
        return Evaluated(self.estimate.layout, self.estimate.step_time, self.peak_bytes, self.planner)


class Incumbents:
    """The ``top`` best, the fastest under each of ``levels`` memory budgets, and the losers by cause.

    ``levels=0``: no budgets. ``any_will_do``: the first layout that fits is enough. ``best_only``: once the work for a
    ranking is spent, only the best must be found. What is within ``slack`` of those is found, too. ``improved``: called
    with each better layout and its score; ``fitted``: called with every evaluated layout that fits.

    ``work``: the work of the search, which allows a gap to the optimum once it is large; without it, the best is exact.
    If ``any_will_do``, the search ends there without a layout.

    ``largest_peak``: no layout that fits has a larger predicted peak. ``largest_tight``: the same of tight layouts,
    which have a higher risk of running out of memory than is allowed; the best of them is found too, if it beats all
    that fit. 0: they are not looked at.
    """

    def __init__(
        self,
        largest_peak: int,
        *,
        by: By,
        top: int,
        levels: int,
        any_will_do: bool = False,
        best_only: bool = False,
        slack: float = 0.0,
        improved: Callable[[str, float], None] | None = None,
        fitted: Callable[[EvaluatedLayout], None] | None = None,
        largest_tight: int = 0,
        work: SearchWork | None = None,
    ) -> None:
        self.by, self.top, self.any_will_do, self.best_only = by, top, any_will_do, best_only
        self.improved, self.fitted = improved, fitted
        self.slack, self.work = slack, work
        self.largest_peak, self.largest_tight = largest_peak, max(largest_peak, largest_tight)
        self.looks_at_tight = largest_tight > largest_peak
        self.none_fits = False  # no layout of the space that is searched; then only tight ones are searched for
        self.is_undecided = False  # layouts that may fit were dropped as the work was spent before one was found
        self.tight: EvaluatedLayout | None = None
        self.best: list[EvaluatedLayout] = []
        self.fitting: list[EvaluatedLayout] = []
        self.set_budgets(levels)
        self.rejections = Rejections(self.largest_peak)
        self.seen: set[tuple[Layout, Job]] = set()
        self.evaluated = 0
        self.evaluated_by_precision: Counter[str] = Counter()

    def set_budgets(self, levels: int) -> None:
        """Set ``levels`` memory budgets, of which the fastest layouts are those that were evaluated."""
        self.budgets = self.largest_peak * (1 + np.arange(max(1, levels))) / max(1, levels)
        self.fastest = np.full(max(1, levels), np.inf if levels else 0.0)  # per budget; 0: nothing is faster
        for evaluated in self.fitting:
            self._update_fastest(evaluated)

    def _update_fastest(self, evaluated: EvaluatedLayout) -> None:
        """Note the layout in the memory budgets in which it is the fastest."""
        within = self.budgets >= evaluated.peak_bytes
        self.fastest[within] = np.minimum(self.fastest[within], evaluated.seconds)

    @property
    def capacity(self) -> int:
        """Return the peak beyond which a layout neither fits nor is a tight one that is looked for."""
        return self.largest_peak if self.any_will_do and self.tight else self.largest_tight

    @property
    def is_over(self) -> bool:
        """Return whether a search for any layout that fits has found one, or has spent its work."""
        return self.any_will_do and (bool(self.best) or (self.work is not None and self.work.is_spent))

    @property
    def threshold(self) -> float:
        """Return the score that a layout must not exceed to be among the ``top``, or the best."""
        if self.is_over:
            return -np.inf
        if self.best and self.is_ranking_over:
            return self.best[0].score * (1 + self.slack)
        return self.best[-1].score * (1 + self.slack) if len(self.best) == self.top else np.inf

    @property
    def is_ranking_over(self) -> bool:
        """Return whether only the best is searched for, as ``best_only`` allows once much work is spent.

        Before that, some layouts in the best's precision are evaluated, which is perhaps searched last.
        """
        if self.work is None or not (self.best_only and self.best):
            return False
        evaluated = self.evaluated_by_precision[self.best[0].precision]
        return self.work.is_spent or (self.work.is_ranking_spent and evaluated >= MIN_EVALUATED_LAYOUTS)

    @property
    def tight_threshold(self) -> float:
        """Return the score below which a tight layout is the best of them, and better than all that fit."""
        if self.is_over:
            return -np.inf
        known = [layouts[0].score for layouts in (self.best, [self.tight] if self.tight else []) if layouts]
        return min(known, default=np.inf)

    def evaluate(self, planner: Planner, layout: Layout) -> None:
        """Estimate one layout and update the best, the budgets or the rejections."""
        if (layout, planner.job) in self.seen:
            return
        self.seen.add((layout, planner.job))
        ranks = self._count_memory(planner, layout)
        self.evaluated += 1
        self.evaluated_by_precision[planner.job.precision.name] += 1
        peak, risk = self._estimate_peak_and_risk(planner, layout, ranks)
        fits = risk <= planner.risk
        if not fits:
            self.rejections.add_too_large(np.ones(1, np.int64), np.array([float(peak)]), lambda _: layout)
            if not self.looks_at_tight or risk > TIGHT_RISK:
                return
        if self.by == "memory" and not self.fastest.any() and peak > self.threshold:  # whose time does not matter
            return
        estimate = planner.estimate(layout, ranks=ranks)
        seconds = estimate.step_time.seconds
        score = {"time": seconds, "cost": seconds * layout.world, "memory": float(peak)}[self.by]
        evaluated = EvaluatedLayout(score, peak, seconds, str(layout), estimate, planner)
        if not fits:
            self.tight = min(self.tight or evaluated, evaluated, key=lambda candidate: candidate[:4])
            return
        self.fitting.append(evaluated)
        if self.fitted:
            self.fitted(evaluated)
        self.rejections.count_fitting(estimate)
        self._update_fastest(evaluated)
        if score <= self.threshold:
            self.best = rank_distinct([*self.best, evaluated])[: self.top]
            if self.improved and self.best[0] is evaluated:
                self.improved(evaluated.text, score)

    def shorten_ranking(self, top: int) -> None:
        """Keep only the ``top`` best."""
        self.top, self.best = top, self.best[:top]

    def excess_bytes(self, planner: Planner, layout: Layout) -> int:
        """Return the peak bytes of a layout that neither fits nor is tight; else 0."""
        peak, risk = self._estimate_peak_and_risk(planner, layout, self._count_memory(planner, layout))
        return peak if risk > (TIGHT_RISK if self.looks_at_tight else planner.risk) else 0

    def _count_memory(self, planner: Planner, layout: Layout) -> list[RankMemory]:
        """Return the memory of a layout, and count the work of its estimate."""
        if self.work:
            self.work.add_estimate(layout, planner.job)
        return planner.memory(layout)

    def _estimate_peak_and_risk(self, planner: Planner, layout: Layout, ranks: list[RankMemory]) -> tuple[int, float]:
        """Return the peak bytes of a layout, and its risk of running out of memory; 1 where it is sure to."""
        peak = find_max_peak_bytes(ranks)
        return peak, planner.out_of_memory_risk(layout, ranks) if peak <= self.capacity else 1.0

    def score(self, seconds: Floats, size: Floats, space: Space) -> Floats:
        """Return the value that layouts or bounds are ranked by."""
        return {"time": seconds, "cost": seconds * space.world, "memory": size}[self.by]

    def can_win(self, seconds: Floats, size: Floats, space: Space) -> NDArray[np.bool_]:
        """Return a mask of the candidates that can still be among the best or the fastest within a memory budget.

        Of those that only the allowed gap excludes, the lowest bound is noted.
        """
        score = self.score(seconds, size, space)
        tolerance = 1 + self.allowed_gap
        can_win_mask = self._can_win(score * tolerance, size, seconds * tolerance)
        if tolerance > 1 and not self.none_fits:
            dropped = score[self._can_win(score, size, seconds) & ~can_win_mask & (size <= self.largest_peak)]
            self.rejections.lowest_bound = min(self.rejections.lowest_bound, dropped.min(initial=np.inf))
        self.is_undecided |= self.is_over and not self.best and bool((size <= self.largest_peak).any())
        return can_win_mask

    def _can_win(self, score: Floats, size: Floats, seconds: Floats) -> NDArray[np.bool_]:
        """Return ``can_win`` without a gap."""
        budget = np.minimum(np.searchsorted(self.budgets, size), len(self.budgets) - 1)
        can_win = (score <= self.threshold) | (seconds < self.fastest[budget])
        can_fit = (size <= self.largest_peak) & (not self.none_fits)
        return np.where(can_fit, can_win, score < self.tight_threshold) if self.looks_at_tight else can_win

    def can_candidate_win(self, score: float, size: float, seconds: float) -> bool:
        """Return ``can_win`` for one candidate."""
        tolerance = 1 + self.allowed_gap
        if self.looks_at_tight and (size > self.largest_peak or self.none_fits):
            return score * tolerance < self.tight_threshold
        budget = min(int(np.searchsorted(self.budgets, size)), len(self.budgets) - 1)
        return bool(score * tolerance <= self.threshold or seconds * tolerance < self.fastest[budget])

    @property
    def allowed_gap(self) -> float:
        """Return the gap to the optimum that the work of the search allows."""
        return self.work.allowed_gap if self.work else 0.0

    def add_unsearched(self, candidates: Iterable[tuple[Planner, Estimate]]) -> None:
        """Evaluate those ``candidates`` that fit, which the search dropped unseen as its work was spent.

        Nothing is known of how near the best of them is to the best possible.
        """
        for planner, estimate in candidates:
            if planner.fits(estimate.layout, estimate.ranks):
                self.evaluate(planner, estimate.layout)
        if self.best:
            self.rejections.lowest_bound = 0.0

    @property
    def is_exact(self) -> bool:
        """Return whether no layout was dropped that may be better than the best."""
        return not self.best or bool(self.rejections.lowest_bound == np.inf)

    @property
    def gap(self) -> float | None:
        """Return the share of the optimum by which the best may exceed it; 0: it is the optimum; None: unknown."""
        if not self.best or not self.rejections.lowest_bound:
            return None
        return max(0.0, self.best[0].score / self.rejections.lowest_bound - 1)

    def describe_reordered(self) -> Iterator[str]:
        """Yield how many layouts the ranking leaves out because only ``order=`` tells them from one that it has."""
        ranked = sum(entry[:4] <= self.best[-1][:4] for entry in self.fitting) if self.best else 0
        if count := ranked - len(self.best):
            layouts = "1 layout that differs" if count == 1 else f"{count} layouts that differ"
            yield f"left out: {layouts} from one of the table only by order=, with equal time and memory"


def rank_distinct(layouts: Iterable[EvaluatedLayout]) -> list[EvaluatedLayout]:
    """Return layouts in order, and only the first of those that differ in nothing but ``order=`` and cost the same."""
    distinct = dict[object, EvaluatedLayout]()
    for entry in sorted(layouts, key=lambda candidate: candidate[:4]):
        words = tuple(word for word in entry.text.split() if not word.startswith("order="))
        distinct.setdefault((words, entry.planner.job, entry.seconds, entry.peak_bytes), entry)
    return list(distinct.values())

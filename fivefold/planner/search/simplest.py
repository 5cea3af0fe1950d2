"""Finds the simplest layout within ``within`` of the best, because a prediction cannot tell these apart.

    complexity = Σ of an axis and its degree · leaving the node · ZeRO · recomputation · schedule · placement

It starts from the layouts that the search evaluated and tries simpler ones, the simplest first, until none is left that
fits and is fast enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import log2
from typing import NamedTuple

from fivefold.layout.names import DEFAULT_ORDER
from fivefold.layout.sharding import get_policy
from fivefold.layout.spec import Layout, list_divisors
from fivefold.layout.where import ANY_LAYOUT, Where
from fivefold.planner.counts.counts import Counts, Name
from fivefold.planner.predict import Planner, find_max_peak_bytes
from fivefold.planner.search.estimates import list_resting_bytes
from fivefold.planner.search.layout_changes import can_run, change, rank_moves, with_virtual_stages
from fivefold.planner.time.ratio_errors import estimate_speed_ratio
from fivefold.planner.time.timeline import StepTime
from fivefold.results.comparison import break_down
from fivefold.results.search_result import Alternative

# How much harder a choice makes a layout to run and to understand. Only their order matters much: an axis more than
# its degree, what few engines have more than what all have.
AXIS, LEAVES_NODE, ORDER, SHARD_GROUP, NO_SP, EXPERT_TENSOR, UNEVEN, REDUCE = 4.0, 4.0, 3.0, 2.0, 1.0, 2.0, 1.0, 1.0
ZERO = (0.0, 1.0, 2.5, 3.0)
RECOMPUTATION = {"none": 0.0, "selective": 1.0, "full": 2.0}
GROUPS = 3.0  # recomputation of some operations, or of every n-th layer
MAX_ESTIMATED = 400  # layouts that are estimated in addition to those of the search


class Evaluated(NamedTuple):
    """A layout that fits; ``time`` of its step, its highest ``peak_bytes``, the planner that estimated it."""

    layout: Layout
    time: StepTime
    peak_bytes: int
    planner: Planner

    @property
    def seconds(self) -> float:
        """Return the seconds of a step."""
        return self.time.seconds


def is_distinguishable(chosen: Evaluated, other: Evaluated) -> bool:
    """Tell whether published pairs of runs that differ like these let their times be told apart."""
    facts = chosen.planner.describe(chosen.layout), other.planner.describe(other.layout)
    ratio = estimate_speed_ratio(*facts, (1 / chosen.seconds, 1 / other.seconds))
    return ratio is None or ratio.verdict != "not distinguishable"


def score_complexity(layout: Layout, *, ranks_per_node: int, default_reduction: bool = True) -> float:
    """Return a score of how much a layout takes to understand and to tune; 0 for pure data parallelism.

    ``default_reduction``: gradients are reduced as often as the job says.
    """
    total = sum(AXIS + log2(degree) for degree in (layout.tp, layout.cp, layout.pp, layout.ep) if degree > 1)
    total += LEAVES_NODE * ((layout.tp > ranks_per_node) + (layout.tp * layout.cp > ranks_per_node))
    total += ZERO[layout.zero] + (SHARD_GROUP if layout.shard_group else 0.0) + REDUCE * (not default_reduction)
    total += layout.pipeline.complexity + log2(layout.v) + RECOMPUTATION.get(layout.ac, GROUPS)
    total += UNEVEN * bool(layout.stages)
    total += ORDER * (layout.order != DEFAULT_ORDER) + NO_SP * (not layout.sp) + EXPERT_TENSOR * (layout.etp > 1)
    return total


class Simplest:
    """Looks for simple layouts of a model, machine and precision that take no more than ``limit`` seconds.

    ``planners``: the job's own, and those that reduce gradients of ZeRO-2 and -3 otherwise. ``largest_peak``: no
    layout that fits has a larger predicted peak.
    """

    def __init__(
        self,
        planners: Sequence[Planner],
        evaluated: Iterable[Evaluated],
        *,
        max_seconds: float,
        largest_peak: int,
        where: Where = ANY_LAYOUT,
    ) -> None:
        self.planners, self.max_seconds, self.largest_peak, self.where = planners, max_seconds, largest_peak, where
        machine = planners[0].machine
        self.ranks_per_node = machine.ranks_per_node
        self.evaluated = {(candidate.layout, candidate.planner.job): candidate for candidate in evaluated}
        self.n_left = MAX_ESTIMATED

    def find(self) -> Evaluated:
        """Return the simplest known layout within the limit; of equally simple ones the fastest."""
        best = min(
            (candidate for candidate in self.evaluated.values() if candidate.seconds <= self.max_seconds),
            key=self._get_key,
        )
        while (simpler := self._find_simpler(best)) is not None:
            best = simpler
        return best

    def find_rivals(self, chosen: Evaluated) -> tuple[Evaluated | None, Evaluated | None]:
        """Return the fastest of the simpler layouts, and the fastest of all, if faster.

        The simpler layouts are slower than the limit.
        """
        cost = self._get_key(chosen)[0]
        simpler = [candidate for candidate in self.evaluated.values() if self._get_key(candidate)[0] < cost]
        fastest = min(self.evaluated.values(), key=lambda candidate: candidate.seconds)
        faster = fastest if fastest.seconds < chosen.seconds else None
        return min(simpler, key=lambda candidate: candidate.seconds, default=None), faster

    def _find_simpler(self, layout_to_simplify: Evaluated) -> Evaluated | None:
        """Return the simplest neighbour that is simpler and not slower than allowed, or None."""
        cost = self._get_key(layout_to_simplify)[0]
        moves = [
            (self._estimate_cost(layout, planner), str(layout), layout, planner)
            for layout in set(_list_moves(layout_to_simplify.layout))
            for planner in self._list_planners(layout)
        ]
        for _, _, layout, planner in sorted(
            (candidate for candidate in moves if candidate[0] < cost), key=lambda candidate: candidate[:2]
        ):
            simpler = self._evaluate(layout, planner)
            if simpler is not None and simpler.seconds <= self.max_seconds:
                return simpler
        return None

    def _list_planners(self, layout: Layout) -> Sequence[Planner]:
        """Return every planner whose answer differs for the layout; ZeRO-0 and ZeRO-1 always reduce once a step."""
        return self.planners if layout.zero > 1 else self.planners[:1]

    def _evaluate(self, layout: Layout, planner: Planner) -> Evaluated | None:
        """Return a layout's time and memory. Returns None if it is illegal, does not fit, or enough were tried."""
        key = layout, planner.job
        if key in self.evaluated:
            return self.evaluated[key]
        if not self.n_left or not self.where.is_satisfied_by(layout) or not can_run(layout, planner):
            return None
        if bound_resting_bytes(layout, planner.counts) > self.largest_peak:
            return None
        ranks = planner.memory(layout)
        peak = find_max_peak_bytes(ranks)
        if peak > self.largest_peak or not planner.fits(layout, ranks):
            return None
        self.n_left -= 1
        self.evaluated[key] = Evaluated(layout, planner.estimate(layout, ranks=ranks).step_time, peak, planner)
        return self.evaluated[key]

    def _estimate_cost(self, layout: Layout, planner: Planner) -> float:
        return score_complexity(
            layout, ranks_per_node=self.ranks_per_node, default_reduction=planner is self.planners[0] or layout.zero < 2
        )

    def _get_key(self, evaluated: Evaluated) -> tuple[float, float]:
        return self._estimate_cost(evaluated.layout, evaluated.planner), evaluated.seconds


def bound_resting_bytes(layout: Layout, counts: Counts) -> int:
    """Return the mean over pipeline ranks of the bytes of weights and optimizer states: no more than the peak."""
    keeps, units = get_policy(layout, counts.job), Counter[Name](["embed", "head", *counts.kinds])
    return sum(n * list_resting_bytes(counts.states(layout, unit), keeps)[0] for unit, n in units.items()) // layout.pp


def build_alternative(other: Evaluated | None, chosen: Evaluated) -> Alternative | None:
    """Return ``other`` as a record compared with the chosen layout."""
    if other is None:
        return None
    return Alternative(
        layout=str(other.layout),
        precision=other.planner.job.precision.name,
        reduce=other.planner.job.stack.reduce,
        memory_bytes=other.peak_bytes,
        step_seconds=other.seconds,
        slower=other.seconds / chosen.seconds - 1,
        because=break_down(chosen.time.split, other.time.split),
        within_uncertainty=not is_distinguishable(chosen, other),
    )


def _list_moves(layout: Layout) -> Iterator[Layout]:
    """Yield layouts that differ in one choice, each with other micro-batches, recomputation and ZeRO to compensate."""
    for moved in (layout, *filter(None, _list_simpler_structures(layout))):
        sizes = {layout.mbs, 1, 2 * layout.mbs, max(1, layout.mbs // 2)}
        for mbs in sorted(sizes):
            for ac in dict.fromkeys((layout.ac, "none", "selective", "full")):
                for zero in range(4) if moved.dp * moved.cp > 1 else (0,):
                    group = moved.shard_group if zero and zero == layout.zero else None
                    if other := change(moved, mbs=mbs, ac=ac, zero=zero, shard_group=group):
                        yield other


def _list_simpler_structures(layout: Layout) -> Iterator[Layout | None]:
    """Yield layouts with one axis smaller, or with a simpler schedule, placement or sharding."""
    yield from rank_moves(layout, give=("tp", "cp", "pp"), take=("dp",))
    yield from (change(layout, ep=ep) for ep in list_divisors(layout.ep)[:-1])
    yield from (change(layout, etp=etp) for etp in list_divisors(layout.etp)[:-1])
    yield change(layout, order=DEFAULT_ORDER)
    yield change(layout, shard_group=None)
    yield change(layout, sp=True)
    yield change(layout, cp_kind="ring")
    yield change(layout, stages=())
    yield from (with_virtual_stages(layout, v) for v in list_divisors(layout.v) if v == 1 or v < layout.v)

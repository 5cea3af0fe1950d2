"""Finds the layout with the smallest worst-case regret if the machine or the run differs from the prediction.

    regret of a layout in a scenario = its step time / that of the best layout in that scenario - 1

The best layout of each scenario is searched within its share of the work limit. A layout whose largest regret is r is
at most r slower than the best as predicted. It is therefore enough to evaluate the layouts within the least r known,
and the answer is that of evaluating all. One scenario is an exception: with a slow rank the best layout is taken from
those that the searches know, because no layout is faster with a slow rank than without.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.perturbation import with_kernels, with_network
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.planner.predict import Planner
from fivefold.planner.search.bounds import Bounds
from fivefold.planner.search.branch_and_bound import BranchAndBound, Report
from fivefold.planner.search.columns import concatenate
from fivefold.planner.search.incumbents import Incumbents
from fivefold.planner.search.space import Space
from fivefold.planner.search.warm_start import sweep_from_likely
from fivefold.planner.search.work import EXACT_UNITS, SearchWork
from fivefold.results.search_result import Regret, Robustness, ScenarioResult

CONGESTED = 1.4  # of all-reduces over Ethernet: what a better spread of flows gained
SLOW_STEPS = 2.0  # far latency: 3 to 8 us by what is known, of which 4 are taken
KERNELS = 1.1  # matmuls of Hopper: 0.85 to 1.06 FLOP/pJ, of which 0.91 are taken; memory likewise
UNEVEN = 1.3  # the least of the imbalances measured without a balancer that moves experts
STRAGGLES = 1.08  # between GPUs of one kind, on average
META = "flows that collide in Ethernet: better spread, all-reduces gained up to 40 % (Meta, SIGCOMM 2024)"
BOUNDS = "the published range: docs/explanation/how-a-step-costs/constants.md"
ULTRA_EP = "most loaded rank over the mean: 1.30 to 4.01 in models of 106B to 671B (arXiv:2606.04101)"
VARIED = "GPUs of one kind differ by 8 % on average, the worst by half (arXiv:2208.11035)"
SEEDS = 20  # layouts with which the search of a scenario begins
MAX_SLOWDOWN = 0.1  # share of the best time beyond which no layout is judged


def join_gaps(first: float | None, second: float | None) -> float | None:
    """Return the larger of two gaps; None, as unknown, if one of them is."""
    return None if first is None or second is None else max(first, second)


class EvaluatedRegret(NamedTuple):
    """A layout and its regret in every scenario, the first as predicted; infinite where it does not fit."""

    layout: Layout
    regrets: tuple[float, ...]

    @property
    def key(self) -> tuple[float, float, str]:
        """Return the sort key: the worst-case regret first, then the mean regret."""
        return max(self.regrets), sum(self.regrets) / len(self.regrets), str(self.layout)


class RegretEvaluator:
    """Judges layouts on ``world`` ranks of ``planner``'s machine; ``space_arguments``: arguments of ``Space``.

    ``exact``: the searches of the scenarios have no work limit. ``gap``: the largest that they left; None: unknown.
    """

    def __init__(
        self,
        planner: Planner,
        *,
        world: int,
        space_arguments: Mapping[str, Any],
        report: Report | None = None,
        exact: bool = True,
    ) -> None:
        model, machine, job = planner.model, planner.machine, planner.job
        self.world, self.space_arguments, self.report, self.exact = world, space_arguments, report, exact
        self.gap: float | None = 0.0
        self.scenarios = list_scenarios(model=model, machine=machine, job=job)
        self.planners = [planner, *(_get_planner(scenario, planner) for scenario in self.scenarios[1:])]
        self.seconds_by_layout: list[dict[Layout, float]] = [{} for _ in self.scenarios]
        self.best: list[float] = []
        self.winners: list[Layout] = []

    def search_scenario(self, scenario: int, initial: Sequence[Layout], *, slack: float = 0.0) -> list[Layout]:
        """Search a scenario: all layouts that fit and are within ``slack`` of its best, and others; none if none fits.

        ``initial``: layouts that are likely among them.
        """
        planner = self.planners[scenario]
        space = Space(planner.model, planner.job, world=self.world, **self.space_arguments)
        largest_peak = planner.memory_risk.largest_peak(self.world, risk=planner.risk)
        work = None if self.exact else SearchWork(exact_units=EXACT_UNITS // len(self.scenarios))
        incumbents = Incumbents(largest_peak, by="time", top=1, levels=0, best_only=True, slack=slack, work=work)
        for layout in initial:
            incumbents.evaluate(planner, layout)
        solver = BranchAndBound(
            incumbents, ranks_per_node=planner.machine.ranks_per_node, report=self.report, total=space.layouts
        )
        sweep_from_likely(solver, Bounds(planner, space, concatenate(()), work=work))
        if incumbents.best:
            self.gap = join_gaps(self.gap, incumbents.gap)
        for candidate in incumbents.fitting:
            self.seconds_by_layout[scenario][candidate.estimate.layout] = candidate.seconds
        return [fitting.estimate.layout for fitting in incumbents.fitting]

    def seconds(self, layout: Layout, scenario: int) -> float:
        """Return the seconds of a step in a scenario; infinite if it does not fit."""
        seconds_by_layout = self.seconds_by_layout[scenario]
        planner = self.planners[scenario]
        if layout not in seconds_by_layout:
            ranks = planner.memory(layout)
            fits = planner.fits(layout, ranks)
            seconds_by_layout[layout] = planner.estimate(layout, ranks=ranks).step_time.seconds if fits else inf
        return seconds_by_layout[layout]

    def evaluate(self, layout: Layout, *, max_regret: float = inf) -> EvaluatedRegret | None:
        """Return the regrets of a layout; None as soon as one of them is larger than ``max_regret``."""
        regrets = []
        for scenario, best in enumerate(self.best):
            regret = self.seconds(layout, scenario) / best - 1
            if regret > max_regret:
                return None
            regrets.append(regret)
        return EvaluatedRegret(layout, tuple(regrets))

    def find_most_robust(
        self, fitting: Iterable[Layout], *, included: Sequence[Layout], top: int
    ) -> list[EvaluatedRegret]:
        """Return the ``top`` layouts of least regret, the least first, and those of ``included``.

        ``fitting``: the known layouts that fit.
        """
        sorted_layouts = self._sort_layouts(fitting)
        self._search(sorted_layouts)
        evaluated_by_layout = {
            layout: self.evaluate(layout) for layout in (*self.winners, *sorted_layouts[:top], *included)
        }
        smallest_regret = min(evaluated.key[0] for evaluated in evaluated_by_layout.values() if evaluated)
        near_optimal = self._sort_layouts(
            self.search_scenario(0, sorted_layouts[:SEEDS], slack=min(smallest_regret, MAX_SLOWDOWN))
        )
        for layout in near_optimal:
            worst_regrets = sorted(evaluated.key[0] for evaluated in evaluated_by_layout.values() if evaluated)
            largest_shown = worst_regrets[:top][-1]
            if self.seconds(layout, 0) > self.best[0] * (1 + min(smallest_regret, largest_shown, MAX_SLOWDOWN)):
                break
            if layout not in evaluated_by_layout:
                evaluated_by_layout[layout] = self.evaluate(layout, max_regret=largest_shown)
        return sorted(
            (evaluated for evaluated in evaluated_by_layout.values() if evaluated), key=lambda evaluated: evaluated.key
        )

    def _search(self, sorted_layouts: Sequence[Layout]) -> None:
        """Search for the best layout of each scenario."""
        near_best = [sorted_layouts[0]]
        for index, scenario in enumerate(self.scenarios):
            if index and scenario.straggler == 1:
                near_best += self.search_scenario(index, sorted_layouts[:SEEDS])
        for index, scenario in enumerate(self.scenarios):
            candidates = sorted_layouts if scenario.straggler > 1 else near_best
            winner = self._find_fastest(candidates, index)
            self.winners.append(winner)
            self.best.append(self.seconds(winner, index))

    def _find_fastest(self, layouts: Sequence[Layout], scenario: int) -> Layout:
        """Return the fastest of ``layouts`` in a scenario. A straggler makes none of them faster."""
        best, best_seconds = layouts[0], inf
        for layout in layouts:
            if self.scenarios[scenario].straggler > 1 and self.seconds(layout, 0) >= best_seconds:
                break
            if (seconds := self.seconds(layout, scenario)) < best_seconds:
                best, best_seconds = layout, seconds
        return best

    def _sort_layouts(self, layouts: Iterable[Layout]) -> list[Layout]:
        return sorted(dict.fromkeys(layouts), key=lambda layout: (self.seconds(layout, 0), str(layout)))

    def to_record(self, judged: Sequence[EvaluatedRegret], *, notes: dict[Layout, str], top: int) -> Robustness:
        """Return the ``top`` judged layouts, and those with a note, as a record."""
        chosen = judged[0]
        rows = [evaluated for index, evaluated in enumerate(judged) if index < top or evaluated.layout in notes]
        return Robustness(
            scenarios=tuple(
                ScenarioResult(
                    name=scenario.name,
                    source=scenario.source,
                    best=str(winner),
                    best_seconds=best,
                    regret=_to_finite(chosen.regrets[index]),
                )
                for index, (scenario, winner, best) in enumerate(
                    zip(self.scenarios, self.winners, self.best, strict=True)
                )
            ),
            rows=tuple(self._build_row(row, note=notes.get(row.layout, "")) for row in rows),
        )

    def _build_row(self, evaluated: EvaluatedRegret, *, note: str) -> Regret:
        """Return a layout's expected and worst regret, and the scenario of the worst."""
        worst = max(evaluated.regrets)
        return Regret(
            layout=str(evaluated.layout),
            note=note,
            step_seconds=self.seconds(evaluated.layout, 0),
            memory_bytes=self.planners[0].peak_bytes(evaluated.layout),
            expected=_to_finite(evaluated.key[1]),
            worst=_to_finite(worst),
            worst_scenario=self.scenarios[evaluated.regrets.index(worst)].name,
        )


def _get_planner(scenario: Scenario, planner: Planner) -> Planner:
    """Return the planner of a scenario, which shares the counts if the scenario's job is the same."""
    counts = planner.counts if scenario.job == planner.job else None
    return Planner(
        model=planner.model,
        machine=scenario.machine,
        job=scenario.job,
        counts=counts,
        straggler=scenario.straggler,
        risk=planner.risk,
    )


def _to_finite(regret: float) -> float | None:
    return None if regret == inf else max(0.0, regret)


class Scenario(NamedTuple):
    """A machine and job other than predicted; ``straggler``: how many times slower one rank is; ``source``: why so."""

    name: str
    source: str
    machine: Machine
    job: Job
    straggler: float = 1.0


def list_scenarios(*, model: Model, machine: Machine, job: Job) -> list[Scenario]:
    """Return the predicted scenario first, then each scenario that changes anything."""
    uneven = job.replace(imbalance=job.imbalance * UNEVEN) if model.moe else job
    candidates = [
        Scenario("as predicted", "", machine, job),
        Scenario("network 1.4 times slower", META, with_network(machine, bandwidth=1 / CONGESTED), job),
        Scenario("twice the latency between nodes", BOUNDS, with_network(machine, latency=SLOW_STEPS), job),
        Scenario("kernels 1.1 times slower", BOUNDS, with_kernels(machine, speed=1 / KERNELS), job),
        Scenario("kernels 1.1 times faster", BOUNDS, with_kernels(machine, speed=KERNELS), job),
        Scenario("one rank 8 % slower", VARIED, machine, job, STRAGGLES),
        Scenario("most loaded expert rank 30 % over the mean", ULTRA_EP, machine, uneven),
    ]
    has_network = machine.nodes > 1 and any(link.span > machine.ranks_per_node for link in machine.links)
    return [
        scenario
        for index, scenario in enumerate(candidates)
        if index == 0
        or scenario.straggler > 1
        or scenario.job != job
        or (scenario.machine != machine and (has_network or index > 2))
    ]

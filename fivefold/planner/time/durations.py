"""Seconds of the actions of one layout: what an F, B, W, BW or FB of each stage takes.

Compute and a message that overlap take as long as the longer one, and the hidden part slows compute
(``Constants.hidden_message_slowdown``). Under FB (DualPipe) it is the longer of
max(compute of both, all their messages)  and  Σ over units max(compute, gather).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from fivefold.layout.schedule.order import Task
from fivefold.layout.spec import Layout
from fivefold.planner.counts.counts import Run
from fivefold.planner.time.data_parallel import DataParallel
from fivefold.planner.time.stage_time import (
    Cost,
    StageTime,
    UnitSeconds,
    add_up,
    between_stages,
    sends_beside_passes,
    stage_seconds,
    unit_seconds,
)
from fivefold.planner.time.unit_time import AXES


class PassTime(NamedTuple):
    """Seconds of one micro-batch through one stage in one direction, as a half of an FB needs them."""

    compute: float
    stays: dict[str, float]  # exposed messages of axes that do not overlap, by axis
    beside: dict[str, float]  # all messages of axes that overlap, hidden or not, by axis
    hidden: float  # the part of ``beside`` that is hidden within the pass, for which ``compute`` is slowed already
    gathers: float  # ZeRO-3's gathers, and reductions where they follow every backward
    gathered: float  # Σ over units max(work, those messages)
    meanwhile: float  # Σ over units min(work, those messages)


class Durations:
    """Seconds of the actions of one layout: the single place that says what an F, B, W, BW or FB takes."""

    def __init__(
        self, parallel: DataParallel, layout: Layout, *, straggler: DataParallel | None = None,
        slow: Collection[int] = (),
    ) -> None:  # fmt: skip
        """``slow``: stages of the rank that straggles, whose seconds are those of ``straggler``."""
        self.layout, self.job, self.units = layout, parallel.job, parallel.units
        self.work = parallel.counts.stage_work(layout)
        self.prices = [(straggler or parallel) if stage in slow else parallel for stage in range(len(self.work))]
        self.alike = parallel.counts.alike_work(layout)  # of each stage the first one with equal units, as fast
        if slow:
            first: dict[tuple[int, bool], int] = {}
            places = ((like, stage in slow) for stage, like in enumerate(self.alike))
            self.alike = tuple(first.setdefault(place, stage) for stage, place in enumerate(places))
        sends, known = sends_beside_passes(parallel, layout), dict[tuple[bool, Run], UnitSeconds]()

        def seconds(stage: int) -> StageTime:
            prices, late = self.prices[stage], stage in slow

            def unit(run: Run) -> UnitSeconds:
                if (late, run) not in known:
                    known[late, run] = unit_seconds(prices, layout, run, sends=sends)
                return known[late, run]

            return stage_seconds(prices, self.work[stage], unit)

        times = {stage: seconds(stage) for stage in dict.fromkeys(self.alike)}
        self.stages = [times[stage] for stage in self.alike]
        self.hop, self.sending = between_stages(self.units, layout)
        self._pass_times: dict[tuple[int, bool], PassTime] = {}
        self._costs: dict[Task, tuple[Cost, float]] = {}

    def seconds(self, task: Task) -> float:
        """Seconds of one action."""
        return self._cost_and_seconds(task)[1]

    def cost(self, task: Task) -> Cost:
        """Seconds of one action, split into compute and exposed messages."""
        return self._cost_and_seconds(task)[0]

    def _cost_and_seconds(self, task: Task) -> tuple[Cost, float]:
        """Both, computed once for stages with equal units."""
        found = self._costs.get(task)
        if found is None:
            kind, stage, other = task
            first = Task(kind, self.alike[stage], self.alike[other] if other >= 0 else -1)
            if first not in self._costs:
                cost = self._cost(first)
                self._costs[first] = cost, cost.seconds
            found = self._costs[task] = self._costs[first]
        return found

    def _cost(self, task: Task) -> Cost:
        stage, kind = self.stages[task.stage], task.kind
        if kind == "W":
            return Cost(stage.weight, {})
        if kind != "FB":
            return self._with_sends(stage.forward if kind == "F" else stage.backward if kind == "B" else stage.whole)
        if self.units.machine.backend == "gloo":  # one after the other
            return self._with_sends(
                Cost(*add_up([(stage.forward, 1), (self.stages[task.backward_stage].whole, 1)])), hops=2
            )
        forward, backward = self.pass_time(task.stage, back=False), self.pass_time(task.backward_stage, back=True)
        return self._with_sends(self._both(forward, backward), hops=2)

    def _with_sends(self, cost: Cost, hops: int = 1) -> Cost:
        return cost._replace(exposed={**cost.exposed, "pp": hops * self.sending}) if self.sending else cost

    def pass_time(self, stage: int, *, back: bool) -> PassTime:
        """One direction of a stage, as a half of an FB."""
        if (stage, back) not in self._pass_times:
            self._pass_times[stage, back] = self._pass_time(stage, back=back)
        return self._pass_times[stage, back]

    def _pass_time(self, stage: int, *, back: bool) -> PassTime:
        compute = hidden = gathers = gathered = meanwhile = 0.0
        stays, beside = dict.fromkeys(AXES, 0.0), dict.fromkeys(AXES, 0.0)
        parallel, layout = self.prices[stage], self.layout
        for run, times in self.work[stage]:
            unit = parallel.units.unit(layout, run)
            ours = unit.backward + unit.weight if back else unit.forward
            shown, whole = unit.backward_exposed, unit.backward_apart
            if not back:
                shown, whole = unit.forward_exposed, unit.forward_apart
            work = ours
            for axis, some, every in zip(AXES, shown, whole, strict=True):
                if axis in self.job.stack.overlap:
                    beside[axis] += times * every
                    hidden += times * max(0.0, every - some)
                else:
                    stays[axis] += times * some
                    work += some
            sent = parallel.sent(layout, run.name)
            message = (sent.backward if back else sent.forward).seconds
            compute += times * ours
            gathers += times * message
            gathered += times * max(work, message)
            meanwhile += times * min(work, message)
        return PassTime(compute, stays, beside, hidden, gathers, gathered, meanwhile)

    def _both(self, one: PassTime, other: PassTime) -> Cost:
        """Cost of an FB: a forward of one stage overlapped with a backward of another."""
        compute = one.compute + other.compute
        exposed = {axis: one.stays[axis] + other.stays[axis] for axis in AXES}
        overlapping = {axis: one.beside[axis] + other.beside[axis] for axis in AXES}
        messages = sum(overlapping.values())
        work = max(compute, messages) + sum(exposed.values())
        slowed = max(0.0, min(compute, messages) - one.hidden - other.hidden)
        if messages > compute:
            exposed = {axis: exposed[axis] + overlapping[axis] * (1 - compute / messages) for axis in AXES}
        if self.prices[0].beside:
            exposed["dp"] = max(0.0, one.gathered + other.gathered - work)
            slowed += one.meanwhile + other.meanwhile
        else:
            exposed["dp"] = one.gathers + other.gathers
        return Cost(compute + self.units.constants.hidden_message_slowdown * slowed, exposed)

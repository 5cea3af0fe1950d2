"""The step laid out in time: units make stages, the schedule's table makes the pipeline, data parallelism its ends.

    step = play(table, seconds of its actions) + what nothing hides of gathers and reductions + update

Side by side, the longer counts, and what it hides of the other slows it. Under FB (DualPipe) that is

    max(compute of both, all their messages), and unit by unit max(compute, gather), whichever is longer
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

from fivefold.layout.mesh import group
from fivefold.layout.schedule.order import Task
from fivefold.layout.sharding import policy
from fivefold.layout.spec import Layout
from fivefold.plan.count.counts import Counts, Run
from fivefold.plan.count.memory.rank_memory import RankMemory
from fivefold.plan.count.memory.states import moments_per_element
from fivefold.plan.count.operations.part import part_of
from fivefold.plan.count.update import stages_held, update_messages, update_products
from fivefold.plan.price.data_parallel import DataParallel
from fivefold.plan.price.steady_state import extrapolate
from fivefold.plan.price.units import AXES, CONTENTION, Units

# Where each comes from: docs/how-a-step-costs/constants.md.
HOST_LINK = 0.8  # of a PCIe link that offloading reaches
HOST_BANDWIDTH = 32e9  # bytes/s of a rank's PCIe 4 x16 link to host memory, one direction
HOST_MEMORY = 40e9  # bytes/s of host memory that one rank of eight gets (DDR4, 8 channels on two sockets)
Work = tuple[tuple[Run, int], ...]  # units of a stage, and how many of each


class StepTime(NamedTuple):
    """Seconds of one step on its critical rank, split as ``step.Time`` splits them."""

    seconds: float
    compute: float
    bubble: float
    exposed: dict[str, float]
    optimizer: float
    bound_by: str


class Cost(NamedTuple):
    """Seconds of one action: compute, with what hidden messages cost it, and by axis what nothing hides."""

    compute: float
    exposed: dict[str, float]

    @property
    def seconds(self) -> float:
        """From its start to its end."""
        return self.compute + sum(self.exposed.values())


class StageTime(NamedTuple):
    """One micro-batch through one stage."""

    forward: Cost
    backward: Cost  # B, wherever the schedule puts W: its messages have B alone to hide behind
    whole: Cost  # BW
    weight: float
    longest: tuple[float, str]


class PassTime(NamedTuple):
    """One micro-batch through one stage in one direction, for an action that hides its messages beside another's."""

    compute: float
    stays: dict[str, float]  # messages of axes that run beside nothing
    beside: dict[str, float]  # all messages of the others
    hidden: float  # of these, seconds that ``compute`` was slowed by
    gathers: float  # of ZeRO-3, with reductions
    gathered: float  # unit by unit the longer of those and of work
    meanwhile: float  # and the shorter


class Durations:
    """Seconds of the actions of one layout: the one rule of what an F, B, W, BW or FB takes."""

    def __init__(self, timeline: Timeline, layout: Layout) -> None:
        self.timeline, self.layout, self.job = timeline, layout, timeline.job
        self.work = timeline.counts.stage_work(layout)
        alike = {work: timeline.stage(layout, work) for work in dict.fromkeys(self.work)}
        self.stages = [alike[work] for work in self.work]
        self.hop = timeline.hop(layout) if layout.pp > 1 else 0.0
        nccl = timeline.machine.backend == "nccl"
        self.sending = 0.0 if self.job.stack.hides_p2p(layout.schedule) and nccl else self.hop  # of sends that block
        self._pass_times: dict[tuple[int, bool], PassTime] = {}

    def seconds(self, task: Task) -> float:
        """Of one action."""
        return self.cost(task).seconds

    def cost(self, task: Task) -> Cost:
        """Of one action, in parts."""
        stage = self.stages[task.stage]
        if task.kind == "F":
            return self._sent(stage.forward)
        if task.kind == "B":
            return self._sent(stage.backward)
        if task.kind == "BW":
            return self._sent(stage.whole)
        if task.kind == "W":
            return Cost(stage.weight, {})
        forward, backward = self.pass_time(task.stage, back=False), self.pass_time(task.backward_stage, back=True)
        return self._sent(self._both(forward, backward), hops=2)

    def _sent(self, cost: Cost, hops: int = 1) -> Cost:
        return cost._replace(exposed={**cost.exposed, "pp": hops * self.sending}) if self.sending else cost

    def pass_time(self, stage: int, *, back: bool) -> PassTime:
        """One direction of a stage, for an FB."""
        if (stage, back) not in self._pass_times:
            self._pass_times[stage, back] = self._pass_time(stage, back=back)
        return self._pass_times[stage, back]

    def _pass_time(self, stage: int, *, back: bool) -> PassTime:
        compute = hidden = gathers = gathered = meanwhile = 0.0
        stays, beside = dict.fromkeys(AXES, 0.0), dict.fromkeys(AXES, 0.0)
        timeline, layout = self.timeline, self.layout
        for run, times in self.work[stage]:
            unit, apart = timeline.units.unit(layout, run), timeline.apart.unit(layout, run)
            ours = unit.backward + unit.weight if back else unit.forward
            shown, whole = (each.backward_exposed if back else each.forward_exposed for each in (unit, apart))
            work = ours
            for axis, some, every in zip(AXES, shown, whole, strict=True):
                if axis in self.job.stack.overlap:
                    beside[axis] += times * every
                    hidden += times * max(0.0, every - some)
                else:
                    stays[axis] += times * some
                    work += some
            message = timeline.parallel.each_way(layout, run.name)[back]
            compute += times * ours
            gathers += times * message
            gathered += times * max(work, message)
            meanwhile += times * min(work, message)
        return PassTime(compute, stays, beside, hidden, gathers, gathered, meanwhile)

    def _both(self, one: PassTime, other: PassTime) -> Cost:
        """A forward of one stage beside a backward of another: nothing is hidden twice, and nothing for free."""
        compute = one.compute + other.compute
        exposed = {axis: one.stays[axis] + other.stays[axis] for axis in AXES}
        said = {axis: one.beside[axis] + other.beside[axis] for axis in AXES}
        talk = sum(said.values())
        work = max(compute, talk) + sum(exposed.values())
        slowed = max(0.0, min(compute, talk) - one.hidden - other.hidden)
        if talk > compute:
            exposed = {axis: exposed[axis] + said[axis] * (1 - compute / talk) for axis in AXES}
        if self.timeline.beside:
            exposed["dp"] = max(0.0, one.gathered + other.gathered - work)
            slowed += one.meanwhile + other.meanwhile
        else:
            exposed["dp"] = one.gathers + other.gathers
        return Cost(compute + CONTENTION * slowed, exposed)


class Timeline:
    """Plays layouts of one model, job and machine."""

    def __init__(self, units: Units) -> None:
        self.units, self.counts, self.job = units, units.counts, units.counts.job
        self.machine = units.machine
        self.parallel = DataParallel(units)
        self.beside, self.data_parallel = self.parallel.beside, self.parallel.gather_reduce

    @cached_property
    def apart(self) -> Units:
        """The units with all their messages shown."""
        job = self.job.replace(overlap=(), async_tp=self.job.stack.async_tp and "tp" not in self.job.stack.overlap)
        return Units(Counts(self.counts.model, job), self.machine)

    def durations(self, layout: Layout) -> Durations:
        """Of the actions of ``layout``; without a pipeline of its F and BW."""
        return Durations(self, layout)

    def step(self, layout: Layout, memory: list[RankMemory]) -> StepTime:
        """The step of ``layout``; ``memory`` tells what each rank updates."""
        micro_batches, durations = layout.micro_batches(self.job), self.durations(layout)
        updates = [
            self.update(layout, rank) + self.matrix_update(layout, held)
            for rank, held in zip(memory, stages_held(layout), strict=True)
        ]
        if layout.pp == 1:
            stage, ends = durations.stages[0], self.parallel.ends(layout, (0,))
            compute, exposed = _sum([(stage.forward, micro_batches), (stage.whole, micro_batches)])
            return _clock(compute + ends.slowed, exposed, ends.exposed, updates[0], durations.stages)
        line = extrapolate(layout, micro_batches, seconds=durations.seconds, hop=durations.hop)
        work = [tuple(durations.work[stage] for stage in held) for held in line.held]
        alike = dict(zip(work, line.held, strict=True))  # ranks whose stages do the same end the same way
        ends_of = {same: self.parallel.ends(layout, held) for same, held in alike.items()}
        tails = [ends_of[same] for same in work]
        after = [tail.slowed + tail.exposed + update for tail, update in zip(tails, updates, strict=True)]
        total = max(end + late for end, late in zip(line.ends, after, strict=True))
        critical = max(range(layout.pp), key=lambda rank: line.busy[rank] + after[rank])
        compute, exposed = _sum((durations.cost(task), times) for task, times in line.tasks[critical].items())
        return _clock(
            compute + tails[critical].slowed, exposed, tails[critical].exposed, updates[critical],
            [durations.stages[stage] for stage in line.held[critical]], total=total,
        )  # fmt: skip

    def hop(self, layout: Layout) -> float:
        """Seconds from one stage to the next; what was sent in parts is gathered on arrival."""
        size, network = self.counts.local(part_of(layout)).stream_bytes, self.units.network
        if layout.tp == 1 or layout.sp or not self.job.stack.scatter_hops:
            return network.seconds("p2p", size, group(layout, "pp"))
        sent = network.seconds("p2p", size // layout.tp, group(layout, "pp"))
        return sent + network.seconds("all_gather", size, group(layout, "tp"))

    def stage(self, layout: Layout, work: Work) -> StageTime:
        """One micro-batch through one stage, each direction alone."""
        forward = backward = whole = weight = 0.0
        fronts, backs, wholes = dict.fromkeys(AXES, 0.0), dict.fromkeys(AXES, 0.0), {"dp": 0.0}
        longest, parallel = (0.0, ""), self.parallel
        speaks = not policy(layout).weights_stay or parallel.reduces_each(layout)
        for run, times in work:
            unit = self.units.unit(layout, run)
            ahead, back = unit.forward, unit.backward
            both = back + unit.weight
            for axis, first, second in zip(AXES, unit.forward_exposed, unit.backward_exposed, strict=True):
                if first or second:
                    fronts[axis] += times * first
                    backs[axis] += times * second
            if speaks:
                front, behind = parallel.each_way(layout, run.name)
                talk = sum(unit.backward_exposed)
                shown, slows = parallel.waits(front, ahead + sum(unit.forward_exposed))
                late, slowed = parallel.waits(behind, back + talk)
                later, slower = parallel.waits(behind, both + talk)
                fronts["dp"] = fronts.get("dp", 0.0) + times * shown
                backs["dp"] = backs.get("dp", 0.0) + times * late
                wholes["dp"] += times * later
                ahead, back, both = ahead + slows, back + slowed, both + slower
            forward += times * ahead
            backward += times * back
            whole += times * both
            weight += times * unit.weight
            longest = max(longest, (times * (ahead + both), unit.longest))
        return StageTime(Cost(forward, fronts), Cost(backward, backs), Cost(whole, backs | wholes), weight, longest)

    def update(self, layout: Layout, rank: RankMemory) -> float:
        """The update reads and writes weight and moments and reads the gradient; clipping reads it twice.

        Around it the sums of gradients are set to zero and, where several ranks add to them, scaled.
        """
        recipe, prices = self.job.precision, self.units.prices(layout)
        numel = rank.updated
        moments = 2 * moments_per_element(self.job.optimizer, self.job)
        update = int(numel * (3 * recipe.updated_bytes + moments))
        clip = numel * 3 * recipe.updated_bytes if self.job.optimizer.clip else 0
        cast = numel * (recipe.updated_bytes + recipe.weights_bytes) if recipe.master_bytes else 0
        sums = rank.gradients_bytes * (3 if layout.dp * layout.cp > 1 else 1)
        seconds = prices.moving(update, kernel="adamw") + prices.moving(clip + cast + sums, kernel="add")
        if "optimizer" in self.job.offload:
            both_ways = numel * (recipe.summed_bytes + recipe.weights_bytes)
            seconds = both_ways / (HOST_LINK * HOST_BANDWIDTH) + update / HOST_MEMORY
        return seconds

    def matrix_update(self, layout: Layout, chunks: tuple[int, ...]) -> float:
        """Of an optimizer of whole matrices, what it says and multiplies; nothing runs beside it."""
        prices, network = self.units.prices(layout), self.units.network
        return sum(
            message.times * network.seconds(message.collective, message.payload, group(layout, message.group))
            for message in update_messages(self.counts, layout, chunks=chunks)
        ) + sum(
            each.times * prices.matmul(each.rows, each.columns, each.inner, dtype="bf16", batch=each.number)
            for each in update_products(self.counts, layout, chunks=chunks)
        )


def _sum(parts: Iterable[tuple[Cost, int]]) -> tuple[float, dict[str, float]]:
    """Of actions, so many times each: compute, and by axis what shows."""
    compute, exposed = 0.0, dict[str, float]()
    for cost, times in parts:
        compute += times * cost.compute
        for axis, seconds in cost.exposed.items():
            if seconds:
                exposed[axis] = exposed.get(axis, 0.0) + times * seconds
    return compute, exposed


def _clock(
    compute: float, exposed: dict[str, float], ends: float, update: float, stages: list[StageTime],
    *, total: float | None = None,
) -> StepTime:  # fmt: skip
    """A rank's parts, ``ends`` being of data parallelism; without a ``total`` it waits for no other rank."""
    if ends:
        exposed["dp"] = exposed.get("dp", 0.0) + ends
    busy = compute + sum(exposed.values()) + update
    bubble = max(0.0, total - busy) if total is not None else 0.0
    slowest = max(stages, key=lambda stage: stage.longest[0]).longest[1]
    # The largest part of the step; of compute, its longest operation.
    parts = {f"{axis} messages": seconds for axis, seconds in exposed.items()}
    parts |= {"pipeline bubble": bubble, "optimizer": update, slowest: compute}
    return StepTime(busy + bubble, compute, bubble, exposed, update, max(parts, key=lambda name: parts[name]))

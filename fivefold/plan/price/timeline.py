"""Seconds of a step: units add up to stages, the schedule orders them, data parallelism adds its ends.

    step = play(schedule, seconds of its actions) + exposed gathers and reductions + update

Compute and a message that overlap take as long as the longer one, and the hidden part slows compute by CONTENTION.
Under FB (DualPipe) it is the longer of  max(compute of both, all their messages)  and
Σ over units max(compute, gather).
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
from fivefold.plan.price.network import MessageTime
from fivefold.plan.price.steady_state import extrapolate
from fivefold.plan.price.units import AXES, CONTENTION, Units

# Sources: docs/how-a-step-costs/constants.md.
HOST_LINK = 0.8  # share of the PCIe link's bandwidth that offloading reaches
HOST_BANDWIDTH = 32e9  # bytes/s of a rank's PCIe 4 x16 link to host memory, one direction
HOST_MEMORY = 40e9  # bytes/s of host memory for one rank of eight (DDR4, 8 channels on two sockets)
Work = tuple[tuple[Run, int], ...]  # units of a stage, and how many of each


class StepTime(NamedTuple):
    """Seconds of one step on its critical rank, split as in ``step.Time``; ``exposed`` is by axis."""

    seconds: float
    compute: float
    bubble: float
    exposed: dict[str, float]
    optimizer: float
    bound_by: str


class Cost(NamedTuple):
    """Seconds of one action: compute, slowed by the messages it hides, and exposed messages by axis."""

    compute: float
    exposed: dict[str, float]

    @property
    def seconds(self) -> float:
        """Duration: compute and exposed messages."""
        return self.compute + sum(self.exposed.values())


class StageTime(NamedTuple):
    """Seconds of one micro-batch through one stage."""

    forward: Cost
    backward: Cost  # B, where the schedule splits off W: its messages can only hide behind B
    whole: Cost  # BW
    weight: float  # W
    longest: tuple[float, str]  # seconds of the unit that takes most, and its longest operation


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

    def __init__(self, timeline: Timeline, layout: Layout) -> None:
        self.timeline, self.layout, self.job = timeline, layout, timeline.job
        self.work = timeline.counts.stage_work(layout)
        alike = {work: timeline.stage(layout, work) for work in dict.fromkeys(self.work)}
        self.stages = [alike[work] for work in self.work]
        hop = timeline.hop(layout) if layout.pp > 1 else MessageTime(0.0, 0.0)
        hides = self.job.stack.hides_p2p(layout.schedule) and timeline.machine.overlaps
        self.hop, self.sending = (hop.travelling, hop.busy) if hides else (hop.seconds, hop.seconds)  # a blocking send
        self._pass_times: dict[tuple[int, bool], PassTime] = {}

    def seconds(self, task: Task) -> float:
        """Seconds of one action."""
        return self.cost(task).seconds

    def cost(self, task: Task) -> Cost:
        """Seconds of one action, split into compute and exposed messages."""
        stage = self.stages[task.stage]
        passes = {"F": stage.forward, "B": stage.backward, "BW": stage.whole}
        if task.kind in passes:
            return self._with_sends(passes[task.kind])
        if task.kind == "W":
            return Cost(stage.weight, {})
        if self.timeline.machine.backend == "gloo":  # one after the other
            return self._with_sends(
                Cost(*_sum([(stage.forward, 1), (self.stages[task.backward_stage].whole, 1)])), hops=2
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
            message = timeline.parallel.each_way(layout, run.name)[back].seconds
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
        if self.timeline.beside:
            exposed["dp"] = max(0.0, one.gathered + other.gathered - work)
            slowed += one.meanwhile + other.meanwhile
        else:
            exposed["dp"] = one.gathers + other.gathers
        return Cost(compute + CONTENTION * slowed, exposed)


class Timeline:
    """Step times of layouts, for one model, job and machine."""

    def __init__(self, units: Units) -> None:
        self.units, self.counts, self.job = units, units.counts, units.counts.job
        self.machine, self.parallel = units.machine, DataParallel(units)
        self.beside, self.data_parallel = self.parallel.beside, self.parallel.gather_reduce

    @cached_property
    def apart(self) -> Units:
        """The units with no message hidden, to know how long each message takes."""
        job = self.job.replace(overlap=(), async_tp=self.job.stack.async_tp and "tp" not in self.job.stack.overlap)
        return Units(Counts(self.counts.model, job), self.machine)

    def durations(self, layout: Layout) -> Durations:
        """Seconds of the actions of ``layout``; without a pipeline these are F and BW."""
        return Durations(self, layout)

    def step(self, layout: Layout, memory: list[RankMemory]) -> StepTime:
        """Seconds of the step of ``layout``; ``memory`` says how many elements each rank updates."""
        micro_batches, durations = layout.micro_batches(self.job), self.durations(layout)
        updates = [
            self.update(layout, rank) + self.matrix_update(layout, held)
            for rank, held in zip(memory, stages_held(layout), strict=True)
        ]
        if layout.pp == 1:
            stage, ends = durations.stages[0], self.parallel.ends(layout, (0,))
            compute, exposed = _sum([(stage.forward, micro_batches), (stage.whole, micro_batches)])
            return _step_time(compute + ends.slowed, exposed, ends.exposed, updates[0], durations.stages)
        line = extrapolate(layout, micro_batches, seconds=durations.seconds, hop=durations.hop)
        work = [tuple(durations.work[stage] for stage in held) for held in line.held]
        alike = dict(zip(work, line.held, strict=True))  # ranks with equal stages have equal ends
        ends_of = {same: self.parallel.ends(layout, held) for same, held in alike.items()}
        tails = [ends_of[same] for same in work]
        after = [tail.slowed + tail.exposed + update for tail, update in zip(tails, updates, strict=True)]
        total = max(end + late for end, late in zip(line.ends, after, strict=True))
        critical = max(range(layout.pp), key=lambda rank: line.busy[rank] + after[rank])
        compute, exposed = _sum((durations.cost(task), times) for task, times in line.tasks[critical].items())
        return _step_time(
            compute + tails[critical].slowed, exposed, tails[critical].exposed, updates[critical],
            [durations.stages[stage] for stage in line.held[critical]], total=total,
        )  # fmt: skip

    def hop(self, layout: Layout) -> MessageTime:
        """A message from one stage to the next; with ``scatter_hops``, its parts are gathered over tp."""
        size, network, pp = self.counts.local(part_of(layout)).stream_bytes, self.units.network, group(layout, "pp")
        if layout.tp == 1 or layout.sp or not self.job.stack.scatter_hops:
            return MessageTime(network.seconds("p2p", size, pp), network.busy("p2p", size, pp))
        sent = network.seconds("p2p", size // layout.tp, pp)
        return MessageTime(sent + network.seconds("all_gather", size, group(layout, "tp")), 0.0)

    def stage(self, layout: Layout, work: Work) -> StageTime:
        """Seconds of one micro-batch through one stage, with nothing of another micro-batch beside it."""
        forward = backward = whole = weight = 0.0
        fronts, backs, wholes = dict.fromkeys(AXES, 0.0), dict.fromkeys(AXES, 0.0), {"dp": 0.0}
        longest, parallel = (0.0, ""), self.parallel
        sends = not policy(layout).weights_stay or parallel.reduces_each(layout)
        for run, times in work:
            unit = self.units.unit(layout, run)
            ahead, back = unit.forward, unit.backward
            both = back + unit.weight
            for axis, first, second in zip(AXES, unit.forward_exposed, unit.backward_exposed, strict=True):
                if first or second:
                    fronts[axis] += times * first
                    backs[axis] += times * second
            if sends:
                front, behind = parallel.each_way(layout, run.name)
                talk = parallel.free(layout, unit.backward_exposed)
                shown, slows = parallel.waits(front, ahead + parallel.free(layout, unit.forward_exposed))
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
        """Seconds of an elementwise update: it reads gradient, weight and moments and writes the last two.

        Clipping reads the gradient twice and writes it. Sums of gradients are zeroed and, on several ranks, scaled.
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
        """Seconds of an update of whole matrices (Muon): its messages and its products, with no overlap."""
        prices, network = self.units.prices(layout), self.units.network
        return sum(
            message.times * network.seconds(message.collective, message.payload, group(layout, message.group))
            for message in update_messages(self.counts, layout, chunks=chunks)
        ) + sum(
            each.times * prices.matmul(each.rows, each.columns, each.inner, dtype="bf16", batch=each.number)
            for each in update_products(self.counts, layout, chunks=chunks)
        )


def _sum(parts: Iterable[tuple[Cost, int]]) -> tuple[float, dict[str, float]]:
    """Sum of actions, each repeated so many times: compute, and exposed seconds by axis."""
    compute, exposed = 0.0, dict[str, float]()
    for cost, times in parts:
        compute += times * cost.compute
        for axis, seconds in cost.exposed.items():
            if seconds:
                exposed[axis] = exposed.get(axis, 0.0) + times * seconds
    return compute, exposed


def _step_time(
    compute: float, exposed: dict[str, float], ends: float, update: float, stages: list[StageTime],
    *, total: float | None = None,
) -> StepTime:  # fmt: skip
    """A rank's parts as a ``StepTime``; ``ends``: exposed by data parallelism. Without ``total`` there is no bubble."""
    if ends:
        exposed["dp"] = exposed.get("dp", 0.0) + ends
    busy = compute + sum(exposed.values()) + update
    bubble = max(0.0, total - busy) if total is not None else 0.0
    slowest = max(stages, key=lambda stage: stage.longest[0]).longest[1]
    # What bounds the step is its largest part; compute is named by its longest operation.
    parts = {f"{axis} messages": seconds for axis, seconds in exposed.items()}
    parts |= {"pipeline bubble": bubble, "optimizer": update, slowest: compute}
    return StepTime(busy + bubble, compute, bubble, exposed, update, max(parts, key=lambda name: parts[name]))

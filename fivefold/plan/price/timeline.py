"""The step laid out in time: units make stages, the schedule's table makes the pipeline, data parallelism its ends.

    step = play(table, stage seconds) + what nothing hides of gathers and reductions + update

A reduction runs beside the backward of the units that come after it, a ZeRO-3 gather beside the unit before it, the
gather after the update beside the first forward.
"""

from __future__ import annotations

from typing import NamedTuple

from fivefold.layout.mesh import Group, group
from fivefold.layout.schedule.order import Task
from fivefold.layout.sharding import policy
from fivefold.layout.spec import Layout
from fivefold.plan.count.counts import Name, Run
from fivefold.plan.count.memory import RankMemory
from fivefold.plan.count.part import part_of
from fivefold.plan.count.states import moments_per_element
from fivefold.plan.count.traffic import unit_messages
from fivefold.plan.price.continued import Continued, continued
from fivefold.plan.price.units import AXES, CONTENTION, Units, UnitTime

HOST_LINK = 0.8  # of a PCIe link that offloading reaches


class Clock(NamedTuple):
    """Seconds of one step on its critical rank, split as ``step.Time`` splits them."""

    seconds: float
    compute: float
    bubble: float
    exposed: dict[str, float]
    optimizer: float
    bound_by: str


class StageTime(NamedTuple):
    """One micro-batch through one stage, messages that nothing hides within."""

    forward: float
    backward: float
    weight: float
    exposed: dict[str, float]  # of both ways, by axis
    longest: tuple[float, str]


class DataParallel(NamedTuple):
    """Seconds per unit of a step: gather and reduction, as one message each."""

    gather: float
    reduce: float


class Timeline:
    """Plays layouts of one model, job and machine."""

    def __init__(self, units: Units) -> None:
        self.units, self.counts, self.job = units, units.counts, units.counts.job
        self.machine = units.machine
        self.beside = "dp" in self.job.overlap and self.machine.backend == "nccl"
        self._dp: dict[tuple[object, ...], DataParallel] = {}

    def step(self, layout: Layout, memory: list[RankMemory]) -> Clock:
        """The step of ``layout``; ``memory`` tells what each rank updates."""
        micro_batches = layout.micro_batches(self.job)
        stages = [self._stage(layout, work) for work in self.counts.stage_work(layout)]
        updates = [self._update(layout, rank) for rank in memory]
        if layout.pp == 1:
            ends = self._ends(layout, (0,))
            stage = stages[0]
            each = stage.forward + stage.backward + stage.weight
            exposed = {axis: micro_batches * seconds for axis, seconds in stage.exposed.items() if seconds}
            compute = micro_batches * (each - sum(stage.exposed.values()))
            hidden = min(ends.hidden, compute)
            compute += CONTENTION * hidden
            if ends.exposed:
                exposed["dp"] = exposed.get("dp", 0.0) + ends.exposed
            total = compute + sum(exposed.values()) + updates[0]
            return Clock(total, compute, 0.0, exposed, updates[0], _bound(stage, exposed, 0.0, compute, updates[0]))
        return self._pipeline(layout, stages, updates, micro_batches)

    def _pipeline(self, layout: Layout, stages: list[StageTime], updates: list[float], micro_batches: int) -> Clock:
        played = self.play(layout, stages, micro_batches)
        tails = [self._ends(layout, held) for held in played.held]
        ranks = range(layout.pp)
        total = max(played.ends[rank] + tails[rank].exposed + updates[rank] for rank in ranks)
        critical = max(ranks, key=lambda rank: played.busy[rank] + tails[rank].exposed + updates[rank])
        mine = [stages[stage] for stage in played.held[critical]]
        share = micro_batches * (0.5 if layout.schedule == "dualpipe" else 1.0)
        exposed: dict[str, float] = {}
        for stage in mine:
            for axis, seconds in stage.exposed.items():
                if seconds:
                    exposed[axis] = exposed.get(axis, 0.0) + share * seconds
        if played.sending:
            exposed["pp"] = played.sending
        apart = played.sending + share * sum(stage.forward + stage.backward + stage.weight for stage in mine)
        talk = sum(exposed.get(axis, 0.0) for axis in AXES)
        if talk:  # a forward hid some of it behind the backward beside it
            shown = max(0.0, talk - max(0.0, apart - played.busy[critical])) / talk
            exposed |= {axis: shown * exposed[axis] for axis in AXES if axis in exposed}
        compute = max(0.0, played.busy[critical] - sum(exposed.values()))
        if tails[critical].exposed:
            exposed["dp"] = exposed.get("dp", 0.0) + tails[critical].exposed
        bubble = max(0.0, total - compute - sum(exposed.values()) - updates[critical])
        slowest = max(mine, key=lambda stage: stage.longest[0])
        bound = _bound(slowest, exposed, bubble, compute, updates[critical])
        return Clock(total, compute, bubble, exposed, updates[critical], bound)

    def play(self, layout: Layout, stages: list[StageTime], micro_batches: int) -> Continued:
        """The schedule with these stages."""
        hop = self._hop(layout)
        blocks = not ("pp" in self.job.overlap and self.machine.backend == "nccl")
        sending = hop if blocks else 0.0

        def seconds(task: Task) -> float:
            stage = stages[task.stage]
            if task.kind == "F":
                return stage.forward + sending
            if task.kind == "B":
                return stage.backward + sending
            if task.kind == "W":
                return stage.weight
            if task.kind == "BW":
                return stage.backward + stage.weight + sending
            other = stages[task.backward_stage]
            # forward of one beside the backward of another: the messages of each run beside the compute of both
            apart = stage.forward + other.backward + other.weight
            # (of ZeRO-3's gathers only what compute did not hide is known: they stay as they are)
            talk = sum(both.exposed[axis] / 2 for both in (stage, other) for axis in AXES)
            return max(apart - talk, talk) + sending

        line = continued(layout, micro_batches, seconds=seconds, hop=hop)
        return line._replace(sending=2 * sending * micro_batches * layout.v if blocks else 0.0)

    def _hop(self, layout: Layout) -> float:
        """Seconds from one stage to the next; what was sent in parts is gathered on arrival."""
        size, network = self.counts.local(part_of(layout)).stream_bytes, self.units.network
        if layout.tp == 1 or layout.sp or not self.job.scatter_hops:
            return network.seconds("p2p", size, group(layout, "pp"))
        sent = network.seconds("p2p", size // layout.tp, group(layout, "pp"))
        return sent + network.seconds("all_gather", size, group(layout, "tp"))

    def _stage(self, layout: Layout, work: tuple[tuple[Run, int], ...]) -> StageTime:
        forward = backward = weight = 0.0
        exposed = dict.fromkeys((*AXES, "dp"), 0.0)
        longest = (0.0, "")
        gathers = not policy(layout).weights_stay
        for run, times in work:
            unit = self.units.unit(layout, run)
            ahead, back, fronts, backs = (
                unit.forward,
                unit.backward,
                sum(unit.forward_exposed),
                sum(unit.backward_exposed),
            )
            for axis, first, second in zip(AXES, unit.forward_exposed, unit.backward_exposed, strict=True):
                exposed[axis] += times * (first + second)
            if gathers:
                fronts_dp, backs_dp, hidden = self._gathers(layout, run.name, unit)
                exposed["dp"] += times * (fronts_dp + backs_dp)
                fronts, backs, back = fronts + fronts_dp, backs + backs_dp, back + CONTENTION * hidden
            forward += times * (ahead + fronts)
            backward += times * (back + backs)
            weight += times * unit.weight
            whole = times * (ahead + back + unit.weight)
            longest = max(longest, (whole, unit.longest))
        return StageTime(forward, backward, weight, exposed, longest)

    def _gathers(self, layout: Layout, name: Name, unit: UnitTime) -> tuple[float, float, float]:
        """ZeRO-3: exposed before a forward and before a backward (with the reduction, if each has one), and hidden."""
        parallel = self.data_parallel(layout, name)
        twice = name not in ("embed", "head")
        back = (parallel.gather if twice else 0.0) + (parallel.reduce if self.job.reduce == "micro_batch" else 0.0)
        if not self.beside:
            return parallel.gather, back, 0.0
        forward = unit.forward + sum(unit.forward_exposed)
        backward = unit.backward + unit.weight + sum(unit.backward_exposed)
        exposed = max(0.0, parallel.gather - forward), max(0.0, back - backward)
        return (*exposed, parallel.gather + back - sum(exposed))

    def data_parallel(self, layout: Layout, name: Name) -> DataParallel:
        """Seconds to gather a unit's weights and to reduce its gradients, once each."""
        key = (name, layout.tp, layout.ep, layout.etp, layout.zero, layout.shards, layout.dp, layout.cp, layout.pp,
               layout.order)  # fmt: skip
        found = self._dp.get(key)
        if found is None:
            gather = reduce = 0.0
            for message in unit_messages(self.counts, layout, name):
                seconds = self.units.network.seconds(
                    message.collective, message.payload, _place(layout, message.group, message.ranks)
                )
                if message.collective == "all_gather":
                    gather += seconds
                else:
                    reduce += seconds
            found = self._dp[key] = DataParallel(gather, reduce)
        return found

    def _ends(self, layout: Layout, chunks: tuple[int, ...]) -> Ends:
        """Reductions after the last backward and gathers before the first forward, of one rank."""
        if layout.dp * layout.cp * layout.tp == 1:
            return Ends(0.0, 0.0)
        gather = reduce = forward = backward = last = first = 0.0
        stays, ahead = policy(layout).weights_stay, self.job.weights == "ahead"
        each = self.job.reduce == "micro_batch" and not policy(layout).gradients_stay
        for chunk in chunks:
            for run, times in self.counts.stage_work(layout)[chunk]:
                parallel, unit = self.data_parallel(layout, run.name), self.units.unit(layout, run)
                if stays:
                    gather += times * parallel.gather
                    first = first or parallel.gather
                if not (each and not stays):
                    reduce += times * parallel.reduce
                    last = last or parallel.reduce  # of the unit whose backward ends last
                if chunk == chunks[0]:
                    forward += times * (unit.forward + sum(unit.forward_exposed))
                    backward += times * (unit.backward + unit.weight + sum(unit.backward_exposed))
        if stays and self.job.weights == "broadcast":
            gather = self._broadcast(layout, chunks)
        if not self.beside:
            return Ends(gather + reduce, 0.0)
        share = 1 / len(chunks)  # of the chunks of a rank, the other ones' messages run beside the first one's work
        waits = first + max(0.0, share * (gather - first) - forward) if ahead else gather
        exposed = last + max(0.0, share * (reduce - last) - backward) + waits
        return Ends(exposed, gather + reduce - exposed)

    def _broadcast(self, layout: Layout, chunks: tuple[int, ...]) -> float:
        """Seconds in which each rank of a shard group in turn hands out the whole tensors that it updates."""
        held: dict[tuple[str, int], int] = {}
        for chunk in chunks:
            for run, times in self.counts.stage_work(layout)[chunk]:
                for message in unit_messages(self.counts, layout, run.name):
                    if message.collective == "all_gather":
                        place = message.group, message.ranks
                        held[place] = held.get(place, 0) + times * message.payload
        return sum(
            ranks * self.units.network.seconds("broadcast", payload // ranks, _place(layout, name, ranks))
            for (name, ranks), payload in held.items()
        )

    def _update(self, layout: Layout, rank: RankMemory) -> float:
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


HOST_BANDWIDTH = 32e9  # bytes/s of a rank's PCIe 4 x16 link to host memory, one direction
HOST_MEMORY = 40e9  # bytes/s of host memory that one rank of eight gets (DDR4, 8 channels on two sockets)


class Ends(NamedTuple):
    """Of data parallelism, outside of the micro-batches: seconds that nothing hides, and that compute hides."""

    exposed: float
    hidden: float


def _place(layout: Layout, name: str, ranks: int) -> Group:
    found = group(layout, name)
    return found if found.ranks == ranks else Group(ranks, found.stride)


def _bound(stage: StageTime, exposed: dict[str, float], bubble: float, compute: float, update: float) -> str:
    """The largest part of the step; of compute, its longest operation."""
    parts = {f"{axis} messages": seconds for axis, seconds in exposed.items()}
    parts |= {"pipeline bubble": bubble, "optimizer": update, stage.longest[1]: compute}
    return max(parts, key=lambda name: parts[name])

"""Data parallelism in time: each unit's gather and reduction, and what of them lies outside of the micro-batches.

    ends = the last reduction + what the last backward does not hide of the others + sums over ranks that hold copies
           + gathers of the new weights

A reduction runs beside the backward of the units that come after it, where ZeRO-3's gathers leave room; the gather
after the update beside the first forward.
"""

from __future__ import annotations

from typing import NamedTuple

from fivefold.layout.mesh import Group, group
from fivefold.layout.sharding import policy
from fivefold.layout.spec import Layout
from fivefold.plan.count.counts import Name, apart
from fivefold.plan.count.traffic import copy_messages, unit_messages
from fivefold.plan.price.units import CONTENTION, Units


class GatherReduceTime(NamedTuple):
    """Seconds to gather a unit's weights and to reduce its gradients, once each, and to add up what others hold too."""

    gather: float
    reduce: float
    copies: float


class StepEnds(NamedTuple):
    """Outside of the micro-batches: seconds that nothing hides, and by which hidden messages slow compute."""

    exposed: float
    slowed: float


class DataParallel:
    """Messages over dp·cp of one model, job and machine."""

    def __init__(self, units: Units) -> None:
        self.units, self.counts, self.job = units, units.counts, units.counts.job
        self.beside = "dp" in self.job.stack.overlap and units.machine.backend == "nccl"
        self._gather_reduces: dict[tuple[object, ...], GatherReduceTime] = {}

    def gather_reduce(self, layout: Layout, name: Name) -> GatherReduceTime:
        """Of one unit."""
        key = (name, layout.tp, layout.ep, layout.etp, layout.zero, layout.shards, layout.dp, layout.cp, layout.pp,
               layout.order, layout.schedule == "dualpipe", apart(layout))  # fmt: skip
        found = self._gather_reduces.get(key)
        if found is None:
            gather = reduce = copies = 0.0
            for message in unit_messages(self.counts, layout, name):
                seconds = self.units.network.seconds(
                    message.collective, message.payload, _place(layout, message.group, message.ranks)
                )
                if message.collective == "all_gather":
                    gather += seconds
                else:
                    reduce += seconds
            for message in copy_messages(self.counts, layout, name):
                place = (
                    _dualpipe_replicas(layout) if message.axis == "pp" else _place(layout, message.group, message.ranks)
                )
                copies += message.times * self.units.network.seconds(message.collective, message.payload, place)
            found = self._gather_reduces[key] = GatherReduceTime(gather, reduce, copies)
        return found

    def each_way(self, layout: Layout, name: Name) -> tuple[float, float]:
        """Seconds of a unit's messages with every forward and with every backward; the head is still gathered."""
        gather_reduce, comes_and_goes = self.gather_reduce(layout, name), not policy(layout).weights_stay
        again = comes_and_goes and name not in ("embed", "head")
        reduce = gather_reduce.reduce if self.reduces_each(layout) else 0.0
        return gather_reduce.gather if comes_and_goes else 0.0, (gather_reduce.gather if again else 0.0) + reduce

    def reduces_each(self, layout: Layout) -> bool:
        """Whether gradients are reduced after every backward."""
        return self.job.stack.reduce == "micro_batch" and not policy(layout).gradients_stay

    def waits(self, message: float, room: float) -> tuple[float, float]:
        """Of a message beside ``room`` seconds of work: what shows, and by how much the rest slows the work."""
        shown = max(0.0, message - room) if self.beside else message
        return shown, CONTENTION * (message - shown)

    def ends(self, layout: Layout, chunks: tuple[int, ...]) -> StepEnds:
        """Reductions after the last backward and gathers before the first forward, of a rank with these stages."""
        if layout.dp * layout.cp * layout.tp == 1 and layout.schedule != "dualpipe":
            return StepEnds(0.0, 0.0)
        gather = reduce = copies = forward = backward = 0.0
        first = last = None
        stays, each, work = policy(layout).weights_stay, self.reduces_each(layout), self.counts.stage_work(layout)
        for chunk in chunks:
            for run, times in work[chunk]:
                gather_reduce, unit = self.gather_reduce(layout, run.name), self.units.unit(layout, run)
                copies += times * gather_reduce.copies
                behind = unit.backward + unit.weight + sum(unit.backward_exposed)
                if stays:
                    gather += times * gather_reduce.gather
                    first = gather_reduce.gather if first is None else first
                if not each:
                    reduce += times * gather_reduce.reduce
                    last = gather_reduce.reduce if last is None else last  # of the unit whose backward ends last
                elif last is None and self.beside:
                    # priced beside its own backward, but comes after it
                    last = reduce = min(gather_reduce.reduce, behind)
                if chunk == chunks[0]:
                    forward += times * (unit.forward + sum(unit.forward_exposed))
                    backward += times * max(0.0, behind - self.each_way(layout, run.name)[1])
        if stays and self.job.stack.weights == "broadcast":
            gather = self._broadcast(layout, chunks)
        if not self.beside:
            return StepEnds(gather + reduce + copies, 0.0)
        first, last = first or 0.0, last or 0.0
        share = 1 / len(chunks)  # of the chunks of a rank, the other ones' messages run beside the first one's work
        early = first + max(0.0, share * (gather - first) - forward) if self.job.stack.weights == "ahead" else gather
        late = last + max(0.0, share * (reduce - last) - backward)
        return StepEnds(early + late + copies, CONTENTION * (gather + reduce - early - late))

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


def _dualpipe_replicas(layout: Layout) -> Group:
    """The two ranks that hold the same stages, at the ends of the pipeline, where they are farthest apart."""
    pp = group(layout, "pp")
    return Group(2, (pp.ranks - 1) * pp.stride)


def _place(layout: Layout, name: str, ranks: int) -> Group:
    found = group(layout, name)
    return found if found.ranks == ranks else Group(ranks, found.stride)

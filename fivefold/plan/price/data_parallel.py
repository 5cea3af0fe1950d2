"""Seconds of data parallelism's messages: the gather and the reduction of each unit, and what is exposed at step ends.

    ends = the last reduction + what the last backward does not hide of the others + all-reduces of replicated weights
           + all-gathers of the updated weights

A reduction overlaps the backward of the units after it, as far as ZeRO-3's gathers leave time; the gather after the
update overlaps the first forward.
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
    """Seconds to gather a unit's weights, to reduce its gradients, and to all-reduce those of replicated weights."""

    gather: float
    reduce: float
    copies: float


class StepEnds(NamedTuple):
    """Seconds before the first and after the last micro-batch: exposed messages, and compute slowed by hidden ones."""

    exposed: float
    slowed: float


class DataParallel:
    """Seconds of the messages over dp·cp, for one model, job and machine and any layout."""

    def __init__(self, units: Units) -> None:
        self.units, self.counts, self.job = units, units.counts, units.counts.job
        self.beside = "dp" in self.job.stack.overlap and units.machine.backend == "nccl"  # messages overlap compute
        self._gather_reduces: dict[tuple[object, ...], GatherReduceTime] = {}

    def gather_reduce(self, layout: Layout, name: Name) -> GatherReduceTime:
        """Seconds of one unit's messages, each sent once."""
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
        """Seconds of a unit's messages in every forward and in every backward, where only blocks are gathered again."""
        gather_reduce, gathers = self.gather_reduce(layout, name), not policy(layout).weights_stay
        regathers = gathers and name not in ("embed", "head")
        reduce = gather_reduce.reduce if self.reduces_each(layout) else 0.0
        return gather_reduce.gather if gathers else 0.0, (gather_reduce.gather if regathers else 0.0) + reduce

    def reduces_each(self, layout: Layout) -> bool:
        """Whether gradients are reduced after the backward of every micro-batch, not once a step."""
        return self.job.stack.reduce == "micro_batch" and not policy(layout).gradients_stay

    def waits(self, message: float, room: float) -> tuple[float, float]:
        """Exposed seconds of a message beside ``room`` seconds of compute, and seconds by which it slows compute."""
        shown = max(0.0, message - room) if self.beside else message
        return shown, CONTENTION * (message - shown)

    def ends(self, layout: Layout, chunks: tuple[int, ...]) -> StepEnds:
        """Cost of the reductions after the last backward and the gathers before the first forward.

        ``chunks``: the stages of the rank.
        """
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
                    # ``each_way`` counts it beside its own backward, but the last one comes after it
                    last = reduce = min(gather_reduce.reduce, behind)
                if chunk == chunks[0]:
                    forward += times * (unit.forward + sum(unit.forward_exposed))
                    backward += times * max(0.0, behind - self.each_way(layout, run.name)[1])
        if stays and self.job.stack.weights == "broadcast":
            gather = self._broadcast(layout, chunks)
        if not self.beside:
            return StepEnds(gather + reduce + copies, 0.0)
        first, last = first or 0.0, last or 0.0
        share = 1 / len(chunks)  # that the first stage's compute can hide; the rank's other stages hide the rest
        early = first + max(0.0, share * (gather - first) - forward) if self.job.stack.weights == "ahead" else gather
        late = last + max(0.0, share * (reduce - last) - backward)
        return StepEnds(early + late + copies, CONTENTION * (gather + reduce - early - late))

    def _broadcast(self, layout: Layout, chunks: tuple[int, ...]) -> float:
        """Seconds in which each rank of a shard group in turn broadcasts the whole tensors that it updates."""
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
    """The two ranks that hold the same stages under DualPipe: the first and last of the pipeline, the worst case."""
    pp = group(layout, "pp")
    return Group(2, (pp.ranks - 1) * pp.stride)


def _place(layout: Layout, name: str, ranks: int) -> Group:
    """The group ``name`` with ``ranks`` ranks, at the same stride."""
    found = group(layout, name)
    return found if found.ranks == ranks else Group(ranks, found.stride)

"""Seconds of data parallelism's messages: the gather and the reduction of each unit, and what is exposed at step ends.

    ends = the last reduction + what the last backward does not hide of the others + all-reduces of replicated weights
           + all-gathers of the updated weights

A reduction overlaps the backward of the units after it, as far as ZeRO-3's gathers leave time, and in our engine that
of the embedding the next forward; the gather after the update overlaps the first forward.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple, TypeVar

from fivefold.layout.mesh import Group, group, group_of
from fivefold.layout.sharding import gathers_again, policy
from fivefold.layout.spec import Layout
from fivefold.planner.counts.bucketed_reduction import by_lists, staying
from fivefold.planner.counts.counts import Name, Run, apart
from fivefold.planner.counts.traffic import copy_messages, unit_messages
from fivefold.planner.time.network import MessageTime
from fivefold.planner.time.unit_time import AXES
from fivefold.planner.time.units import Units

Value = TypeVar("Value")

Alike = list[tuple[Value, int]]  # values in order, and how many of each are equal


class GatherReduceTime(NamedTuple):
    """Seconds to gather a unit's weights, to reduce its gradients, and to all-reduce those of replicated weights, and
    over replicas where that is done less often than the reduction.

    ``gather_busy``, ``reduce_busy``: of them those in which they keep the core busy (``Network.busy``). ``again``: to
    gather them for a backward, if that is not as often as for a forward.
    """

    gather: float
    reduce: float
    copies: float
    gather_busy: float = 0.0
    reduce_busy: float = 0.0
    again: float | None = None


class UnitMessages(NamedTuple):
    """A unit's messages in one layout: those of every forward and of every backward, and the reduction of a unit that
    ``follows``. ``each``: gradients are reduced after every backward.
    """

    time: GatherReduceTime
    forward: MessageTime
    backward: MessageTime
    following: MessageTime
    each: bool


class UnitEnds(NamedTuple):
    """A unit at the ends of a step: its gather and its reduction after all backwards, or what the last of those after
    every one takes; seconds of ``copies``; and those beside which others travel, in a forward and in a backward.
    """

    gather: MessageTime
    reduce: MessageTime
    last: MessageTime
    copies: float
    each: bool
    ahead: float
    behind: float


class StepEnds(NamedTuple):
    """Seconds before the first and after the last micro-batch: exposed messages, and compute slowed by hidden ones."""

    exposed: float
    slowed: float


class DataParallel:
    """Seconds of the messages over dp·cp, for one model, job and machine and any layout."""

    def __init__(self, units: Units) -> None:
        self.units, self.counts, self.job = units, units.counts, units.counts.job
        self.beside = "dp" in self.job.stack.overlap and units.machine.overlaps  # messages overlap compute
        self.constants = units.constants
        # elsewhere what is busy is exposed
        self.contention = self.constants.hidden_message_slowdown if units.machine.backend == "nccl" else 0.0
        self._gather_reduces: dict[tuple[object, ...], dict[tuple[Name, bool], GatherReduceTime]] = {}
        self._alike: dict[tuple[Name, bool], GatherReduceTime] = {}  # … of layouts with messages as the last one's
        self._layout, self._stays = Layout(), True  # the layout last asked for, and whether its weights stay gathered
        self._beside: dict[str, bool] = {}
        self._sent: dict[Name, UnitMessages] = {}
        self._free: dict[Run, tuple[float, float]] = {}
        self._ends: dict[Run, UnitEnds] = {}

    def gather_reduce(self, layout: Layout, name: Name) -> GatherReduceTime:
        """Seconds of one unit's messages, each sent once."""
        return self._gather_reduce(layout, name, each=self.counts.reduces_each(layout, name))

    def _gather_reduce(self, layout: Layout, name: Name, *, each: bool) -> GatherReduceTime:
        """``each``: gradients are reduced after every backward."""
        self._begin(layout)
        found = self._alike.get((name, each))
        if found is None:
            lists = by_lists(self.counts, layout)
            gather = reduce = copies = gather_busy = reduce_busy = again = 0.0
            for message in unit_messages(self.counts, layout, name):
                asked = message.collective, message.payload, group_of(layout, message.group, message.ranks)
                seconds, busy = self.units.network.seconds(*asked), self.units.network.busy(*asked)
                if lists:  # the host launches the copies of its parts while they travel
                    seconds = max(seconds, message.ranks * self.constants.list_part_seconds)
                if message.collective == "all_gather":
                    gather, gather_busy = gather + seconds, gather_busy + busy
                    again += seconds * (message.times // layout.micro_batches(self.job) - 1)
                elif message.group.endswith("replica") and each:
                    copies += seconds
                else:
                    reduce, reduce_busy = reduce + seconds, reduce_busy + busy
            for message in copy_messages(self.counts, layout, name):
                pair = message.axis == "pp"
                place = _dualpipe_replicas(layout) if pair else group_of(layout, message.group, message.ranks)
                copies += message.times * self.units.network.seconds(message.collective, message.payload, place)
            found = GatherReduceTime(gather, reduce, copies, gather_busy, reduce_busy, again if lists else None)
            self._alike[name, each] = found
        return found

    def sent(self, layout: Layout, name: Name) -> UnitMessages:
        """A unit's messages, each way, where only blocks are gathered again."""
        self._begin(layout)
        found = self._sent.get(name)
        if found is None:
            each, follows = self.counts.reduces_each(layout, name), self.follows(name)
            time, nothing = self._gather_reduce(layout, name, each=each), MessageTime(0.0, 0.0)
            gather, reduce = MessageTime(time.gather, time.gather_busy), MessageTime(time.reduce, time.reduce_busy)
            back = gather if time.again is None else MessageTime(time.again, 0.0)
            back = back if gathers_again(name, layout, self.job) else nothing
            if each and not follows:
                back = MessageTime(back.seconds + reduce.seconds, back.busy + reduce.busy)
            ahead = nothing if self._stays else gather
            found = UnitMessages(time, ahead, back, reduce if each and follows else nothing, each)
            self._sent[name] = found
        return found

    def _begin(self, layout: Layout) -> None:
        """Forget what was of another layout: callers ask for all units of one in a row."""
        if layout is not self._layout:
            self._layout, self._sent, self._free, self._ends = layout, {}, {}, {}
            self._stays, self._beside = policy(layout, self.job).weights_stay, {}
            key = (layout.tp, layout.tp_inner, layout.sp, layout.ep, layout.etp, layout.zero, layout.shards,
                   layout.dp, layout.cp, layout.pp, layout.order, layout.pipeline.enters_both_ends, apart(layout),
                   by_lists(self.counts, layout) and layout.ac,
                   self.job.stack.copies == "weight" and layout.mbs)  # fmt: skip
            self._alike = self._gather_reduces.setdefault(key, {})

    def follows(self, name: Name) -> bool:
        """Whether a unit's reduction, if it is one of every micro-batch, travels beside the forward of the next."""
        return name == "embed" and self.job.stack.linears == "fanned"

    def free(self, layout: Layout, run: Run) -> tuple[float, float]:
        """Of a unit's exposed messages, forward and backward, those seconds in which data parallelism's link between
        nodes is free.
        """
        self._begin(layout)
        found = self._free.get(run)
        if found is None:
            unit, ahead, behind = self.units.unit(layout, run), 0.0, 0.0
            for axis, front, back in zip(AXES, unit.forward_exposed, unit.backward_exposed, strict=True):
                if (front or back) and self._is_free(axis):
                    ahead, behind = ahead + front, behind + back
            found = self._free[run] = ahead, behind
        return found

    def _is_free(self, axis: str) -> bool:
        """Whether the link between nodes is free beside messages of an axis."""
        if axis not in self._beside:
            layout, nodes = self._layout, self.units.network.nodes
            self._beside[axis] = nodes(group(layout, axis)) == 1 or (
                nodes(group(layout, "shard")) == nodes(group(layout, "replica")) == 1
            )
        return self._beside[axis]

    def waits(self, message: MessageTime, room: float) -> tuple[float, float]:
        """Exposed seconds of a message beside ``room`` seconds of compute, and seconds by which it slows compute."""
        hidden = min(message.travelling, room) if self.beside else 0.0
        return message.seconds - hidden, self.contention * hidden

    def ends(self, layout: Layout, chunks: tuple[int, ...]) -> StepEnds:
        """Cost of the reductions after the last backward and the gathers before the first forward.

        ``chunks``: the stages of the rank.
        """
        if layout.dp * layout.cp * layout.tp == 1 and not layout.pipeline.enters_both_ends:
            return StepEnds(0.0, 0.0)
        copies = self._staying(layout, chunks) if by_lists(self.counts, layout) else 0.0
        gathers: Alike[MessageTime] = []  # in the order of the units
        reduces: Alike[MessageTime] = []
        forward: Alike[float] = []  # of the first stage's units
        backward: Alike[float] = []
        self._begin(layout)
        stays, work = self._stays, self.counts.stage_work(layout)
        alike = self.counts.alike_work(layout)  # the order of stages matters only to the first message
        held = Counter(map(alike.__getitem__, chunks)) if len(chunks) > 1 else {alike[chunks[0]]: 1}
        for chunk, many in held.items():
            for run, each in work[chunk]:
                times = many * each
                unit = self._unit_ends(layout, run)
                copies += times * unit.copies
                if stays:
                    gathers.append((unit.gather, times))
                if not unit.each:
                    reduces.append((unit.reduce, times))
                elif not reduces and self.beside:
                    reduces.append((unit.last, 1))
                if chunk == alike[chunks[0]]:
                    forward.append((unit.ahead, each))
                    backward.append((unit.behind, each))
        gather, reduce = (sum([times * message.seconds for message, times in some]) for some in (gathers, reduces))
        if stays and self.job.stack.weights == "broadcast":
            gather = self._broadcast(layout, chunks)
        if not self.beside:
            return StepEnds(gather + reduce + copies, 0.0)
        early = gather - _hidden(gathers, forward, chunks=len(chunks)) if self.job.stack.weights == "ahead" else gather
        late = reduce - _hidden(reduces, backward, chunks=len(chunks))
        return StepEnds(early + late + copies, self.contention * (gather + reduce - early - late))

    def _unit_ends(self, layout: Layout, run: Run) -> UnitEnds:
        """A unit at the ends of a step; computed once for all stages of a layout."""
        self._begin(layout)
        found = self._ends.get(run)
        if found is None:
            sent, unit, (ahead, talk) = (
                self.sent(layout, run.name),
                self.units.unit(layout, run),
                self.free(layout, run),
            )
            time, behind = sent.time, unit.backward + unit.weight + talk
            # ``sent`` counts a reduction after every backward beside its own, but the last one comes after it
            room = time.reduce if self.follows(run.name) else behind
            found = self._ends[run] = UnitEnds(
                MessageTime(time.gather, time.gather_busy), MessageTime(time.reduce, time.reduce_busy),
                MessageTime(min(time.reduce, room), min(time.reduce_busy, room)), time.copies, sent.each,
                unit.forward + ahead, max(0.0, behind - sent.backward.seconds),
            )  # fmt: skip
        return found

    def _staying(self, layout: Layout, chunks: tuple[int, ...]) -> float:
        """Seconds to gather the weights that stay after an update, and to copy them out part by part."""
        return sum(
            self.units.network.seconds(
                message.collective, message.payload, group_of(layout, message.group, message.ranks)
            )
            + parts * self.constants.list_part_seconds
            for message, parts in staying(self.counts, layout, chunks)
        )

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
            ranks * self.units.network.seconds("broadcast", payload // ranks, group_of(layout, name, ranks))
            for (name, ranks), payload in held.items()
        )


def _hidden(messages: Alike[MessageTime], rooms: Alike[float], *, chunks: int) -> float:
    """Seconds hidden of all but the first message, each beside the unit before it: one is under way at a time.

    ``rooms``: compute of the first stage's units. The other stages of the rank hide theirs wholly.
    """
    if not messages:
        return 0.0
    (first, times), *rest = messages
    later = [(first, times - 1), *rest]
    if chunks == 1:
        return _side_by_side(later, rooms)
    waiting = sum([times * message.travelling for message, times in later])
    return (1 - 1 / chunks) * waiting + min(waiting / chunks, sum([times * room for room, times in rooms]))


def _side_by_side(messages: Alike[MessageTime], rooms: Alike[float]) -> float:
    """Seconds hidden of messages, one beside each room."""
    hidden, left, room, waiting = 0.0, 0, 0.0, iter(rooms)
    for message, times in messages:
        while times:
            if not left:
                room, left = next(waiting, (0.0, times))
            together = min(times, left)
            hidden += together * min(message.travelling, room)
            times, left = times - together, left - together
    return hidden


def _dualpipe_replicas(layout: Layout) -> Group:
    """The two ranks that hold the same stages under DualPipe: the first and last of the pipeline, the worst case."""
    pp = group(layout, "pp")
    return Group(2, (pp.ranks - 1) * pp.stride)

"""Seconds of data parallelism's messages at the ends of a step: what compute does not hide of them.

    ends = the last reduction + what the last backward does not hide of the others + all-reduces of replicated weights
           + all-gathers of the updated weights

A reduction overlaps the backward of the units after it, as far as ZeRO-3's gathers leave time, and in our engine that
of the embedding the next forward; the gather after the update overlaps the first forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from fivefold.layout.mesh import group_of
from fivefold.layout.sharding import policy
from fivefold.layout.spec import Layout
from fivefold.planner.counts.counts import Name, Run
from fivefold.planner.counts.traffic import unit_messages
from fivefold.planner.time.network import MessageTime
from fivefold.planner.time.unit_overlap import UnitSeconds, reduces_beside_forward
from fivefold.planner.time.units import Units

Value = TypeVar("Value")

Alike = list[tuple[Value, int]]  # values in order, and how many of each are equal


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


def end_seconds(units: Units, layout: Layout, chunks: tuple[int, ...], seconds: Mapping[Run, UnitSeconds]) -> StepEnds:
    """Return the cost of the reductions after the last backward and the gathers before the first forward.

    ``chunks``: the stages of the rank; ``seconds``: of its units.
    """
    if layout.dp * layout.cp * layout.tp == 1 and not layout.pipeline.enters_both_ends:
        return StepEnds(0.0, 0.0)
    copies = 0.0
    gathers: Alike[MessageTime] = []  # in the order of the units
    reduces: Alike[MessageTime] = []
    forward: Alike[float] = []  # of the first stage's units
    backward: Alike[float] = []
    stays, work = policy(layout, units.job).weights_stay, units.counts.stage_work(layout)
    alike = units.counts.alike_work(layout)  # the order of stages matters only to the first message
    held = Counter(map(alike.__getitem__, chunks)) if len(chunks) > 1 else {alike[chunks[0]]: 1}
    for chunk, many in held.items():
        for run, each in work[chunk]:
            times = many * each
            unit = _unit_ends(units, run.name, seconds[run])
            copies += times * unit.copies
            if stays:
                gathers.append((unit.gather, times))
            if not unit.each:
                reduces.append((unit.reduce, times))
            elif not reduces and units.overlaps:
                reduces.append((unit.last, 1))
            if chunk == alike[chunks[0]]:
                forward.append((unit.ahead, each))
                backward.append((unit.behind, each))
    gather, reduce = (sum([times * message.seconds for message, times in some]) for some in (gathers, reduces))
    if stays and units.job.stack.weights == "broadcast":
        gather = _broadcast_seconds(units, layout, chunks)
    if not units.overlaps:
        return StepEnds(gather + reduce + copies, 0.0)
    early = gather - _hidden(gathers, forward, chunks=len(chunks)) if units.job.stack.weights == "ahead" else gather
    late = reduce - _hidden(reduces, backward, chunks=len(chunks))
    return StepEnds(early + late + copies, units.contention * (gather + reduce - early - late))


def _unit_ends(units: Units, name: Name, seconds: UnitSeconds) -> UnitEnds:
    """Return a unit at the ends of a step."""
    sent, unit, (ahead, talk) = seconds.messages, seconds.time, seconds.free
    time, behind = sent.time, unit.backward + unit.weight + talk
    # ``backward`` counts a reduction after every backward beside its own, but the last one comes after it
    room = time.reduce if reduces_beside_forward(name, units.job) else behind
    return UnitEnds(
        MessageTime(time.gather, time.gather_busy),
        MessageTime(time.reduce, time.reduce_busy),
        MessageTime(min(time.reduce, room), min(time.reduce_busy, room)),
        time.copies,
        sent.each,
        unit.forward + ahead,
        max(0.0, behind - sent.backward.seconds),
    )


def _broadcast_seconds(units: Units, layout: Layout, chunks: tuple[int, ...]) -> float:
    """Return the seconds in which each rank of a shard group in turn broadcasts the full tensors that it updates."""
    held: dict[tuple[str, int], int] = {}
    for chunk in chunks:
        for run, times in units.counts.stage_work(layout)[chunk]:
            for message in unit_messages(units.counts, layout, run.name):
                if message.collective == "all_gather":
                    place = message.group, message.ranks
                    held[place] = held.get(place, 0) + times * message.payload
    return sum(
        ranks * units.network.seconds("broadcast", payload // ranks, group_of(layout, name, ranks))
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

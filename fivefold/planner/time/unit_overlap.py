"""Seconds of a micro-batch through each unit of a layout, with data parallelism's messages overlapped.

gathers of weights and reductions of gradients travel beside the unit's own passes, in the seconds in which the links
between nodes are free
"""

from __future__ import annotations

from typing import NamedTuple

from fivefold.job import Job
from fivefold.layout.mesh import group
from fivefold.layout.sharding import gathers_again, policy
from fivefold.layout.spec import Layout
from fivefold.planner.counts.counts import Name, Run
from fivefold.planner.time.gather_reduce import GatherReduceTime
from fivefold.planner.time.network import MessageTime
from fivefold.planner.time.unit_time import AXES, UnitTime
from fivefold.planner.time.units import Units


class UnitMessages(NamedTuple):
    """A unit's messages in one layout: those of every forward and of every backward, and the reduction of a unit whose
    reduction travels beside the next forward. ``each``: gradients are reduced after every backward.
    """

    time: GatherReduceTime
    forward: MessageTime
    backward: MessageTime
    following: MessageTime
    each: bool


class UnitSeconds(NamedTuple):
    """Seconds of a micro-batch through one unit, with data parallelism's messages beside it; exposed ones by axis.

    ``time``: without those messages. ``free``: of its exposed messages, forward and backward, those in which data
    parallelism's link between nodes is free. ``late``: exposed data parallelism of a whole backward; ``spare``: of its
    forward in which the link is free; ``after``: the reduction that travels beside the next forward.
    """

    time: UnitTime
    messages: UnitMessages
    free: tuple[float, float]
    forward: float
    backward: float
    whole: float
    weight: float
    fronts: list[tuple[str, float]]
    backs: list[tuple[str, float]]
    late: float = 0.0
    spare: float = 0.0
    after: MessageTime | None = None


def unit_seconds(units: Units, layout: Layout) -> dict[Run, UnitSeconds]:
    """Return the seconds of every distinct unit of a layout."""
    counts = units.counts
    work, stays = counts.stage_work(layout), policy(layout, units.job).weights_stay
    sends, free_axes = not stays or counts.reduces_each(layout), dict[str, bool]()

    def is_free(axis: str) -> bool:
        if axis not in free_axes:
            free_axes[axis] = leaves_link_free(units, layout, axis)
        return free_axes[axis]

    def overlapped(run: Run) -> UnitSeconds:
        time, messages = units.unit(layout, run), unit_messages(units, layout, run.name, stays=stays)
        ahead = behind = 0.0
        for axis, front, back in zip(AXES, time.forward_exposed, time.backward_exposed, strict=True):
            if (front or back) and is_free(axis):
                ahead, behind = ahead + front, behind + back
        fronts, backs = _by_axis(time.forward_exposed), _by_axis(time.backward_exposed)
        whole = time.backward + time.weight
        alone = UnitSeconds(
            time, messages, (ahead, behind), time.forward, time.backward, whole, time.weight, fronts, backs
        )
        return _with_messages(units, run.name, alone) if sends else alone

    distinct = {run for stage in dict.fromkeys(counts.alike_work(layout)) for run, _ in work[stage]}
    return {run: overlapped(run) for run in distinct}


def unit_messages(units: Units, layout: Layout, name: Name, *, stays: bool) -> UnitMessages:
    """Return a unit's messages, each way, where only blocks are gathered again; ``stays``: weights stay gathered."""
    each, follows = units.counts.reduces_each(layout, name), reduces_beside_forward(name, units.job)
    time, nothing = units.gather_reduce(layout, name), MessageTime(0.0, 0.0)
    gather, reduce = MessageTime(time.gather, time.gather_busy), MessageTime(time.reduce, time.reduce_busy)
    back = gather if time.again is None else MessageTime(time.again, 0.0)
    back = back if gathers_again(name, layout, units.job) else nothing
    if each and not follows:
        back = MessageTime(back.seconds + reduce.seconds, back.busy + reduce.busy)
    following = reduce if each and follows else nothing
    return UnitMessages(time, nothing if stays else gather, back, following, each)


def reduces_beside_forward(name: Name, job: Job) -> bool:
    """Whether a unit's reduction, if it is one of every micro-batch, travels beside the forward of the next."""
    return name == "embed" and job.stack.kernel_facts.overlaps_each_reduction


def leaves_link_free(units: Units, layout: Layout, axis: str) -> bool:
    """Whether data parallelism's link between nodes is free beside messages of an axis."""
    nodes = units.network.nodes
    return nodes(group(layout, axis)) == 1 or (nodes(group(layout, "shard")) == nodes(group(layout, "replica")) == 1)


def overlap_message(units: Units, message: MessageTime, room: float) -> tuple[float, float]:
    """Return the exposed seconds of a message beside ``room`` seconds of compute, and those by which it slows it."""
    hidden = min(message.travelling, room) if units.overlaps else 0.0
    return message.seconds - hidden, units.contention * hidden


def _with_messages(units: Units, name: Name, alone: UnitSeconds) -> UnitSeconds:
    """Return a unit whose weights are gathered, or gradients reduced, beside its passes."""
    sent, (ahead, talk) = alone.messages, alone.free
    meanwhile = alone.forward + ahead
    shown, slows = overlap_message(units, sent.forward, meanwhile)
    late, slowed = overlap_message(units, sent.backward, alone.backward + talk)
    later, slower = overlap_message(units, sent.backward, alone.whole + talk)
    return alone._replace(
        forward=alone.forward + slows,
        backward=alone.backward + slowed,
        whole=alone.whole + slower,
        fronts=[*alone.fronts, ("dp", shown)],
        backs=[*alone.backs, ("dp", late)],
        late=later,
        spare=max(0.0, meanwhile - sent.forward.seconds),
        after=sent.following if reduces_beside_forward(name, units.job) else None,
    )


def _by_axis(exposed: tuple[float, ...]) -> list[tuple[str, float]]:
    """Return exposed seconds in the order of ``AXES`` by axis, where there are any."""
    return [(axis, seconds) for axis, seconds in zip(AXES, exposed, strict=True) if seconds] if any(exposed) else []

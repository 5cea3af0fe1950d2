"""Seconds of one micro-batch through each stage of a layout: the sum of its units, with ZeRO's messages overlapped.

``unit_overlap.py`` gives the units, this module the stages, ``action_time.py`` the actions of a schedule, and
``timeline.py`` the step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from fivefold.layout.mesh import group
from fivefold.layout.spec import Layout
from fivefold.planner.counts.counts import UnitGroup
from fivefold.planner.counts.traffic import list_stage_messages
from fivefold.planner.time.network import MessageTime
from fivefold.planner.time.unit_overlap import OverlappedUnitSeconds, estimate_unit_seconds, overlap_message
from fivefold.planner.time.unit_time import AXES
from fivefold.planner.time.units import Units

Work = tuple[tuple[UnitGroup, int], ...]  # units of a stage with their numbers


class ActionCost(NamedTuple):
    """Seconds of one action: compute, slowed by the messages that it overlaps, and exposed messages by axis."""

    compute: float
    exposed: dict[str, float]

    @property
    def seconds(self) -> float:
        """Return the duration: compute and exposed messages."""
        return self.compute + sum(self.exposed.values())


class StageTime(NamedTuple):
    """Seconds of one micro-batch through one stage."""

    forward: ActionCost
    backward: ActionCost  # B, if the schedule splits off W: its messages can only overlap B
    full_backward: ActionCost  # BW
    weight: float  # W
    longest: tuple[float, str]  # seconds of the longest unit, and its longest operation


class StageSeconds(NamedTuple):
    """The stages of one layout; ``action_time.py`` computes the seconds of their actions.

    ``first_equal_stages``: for each stage, the first one with equal units and equal speed. ``p2p_delay``: seconds by
    which a message between stages delays its receiver; ``p2p_send_seconds``: seconds that it takes from its sender.
    """

    units: Units
    layout: Layout
    work: tuple[Work, ...]
    unit_seconds: tuple[dict[UnitGroup, OverlappedUnitSeconds], ...]  # by stage
    times: tuple[StageTime, ...]
    first_equal_stages: tuple[int, ...]
    p2p_delay: float
    p2p_send_seconds: float


def estimate_stage_seconds(
    units: Units, layout: Layout, *, straggler: Units | None = None, straggling: Collection[int] = ()
) -> StageSeconds:
    """Return the seconds of one micro-batch through each stage.

    The stages in ``straggling`` take the ``straggler``'s seconds.
    """
    work = units.counts.stage_work(layout)
    equal_stages = units.counts.equal_stages(layout)
    usual_seconds = estimate_unit_seconds(units, layout)
    units_of_stage, seconds = [units] * len(work), [usual_seconds] * len(work)
    if straggler is not None and straggling:
        straggler_seconds = estimate_unit_seconds(straggler, layout)
        first_stages = dict[tuple[int, bool], int]()
        for stage in straggling:
            units_of_stage[stage], seconds[stage] = straggler, straggler_seconds
        equal_stages = tuple(
            [
                first_stages.setdefault((equal_stage, stage in straggling), stage)
                for stage, equal_stage in enumerate(equal_stages)
            ]
        )
    times = {
        stage: add_units(units_of_stage[stage], work[stage], seconds[stage]) for stage in dict.fromkeys(equal_stages)
    }
    stage_times = tuple([times[stage] for stage in equal_stages])
    return StageSeconds(
        units, layout, work, tuple(seconds), stage_times, equal_stages, *estimate_stage_message(units, layout)
    )


def add_units(units: Units, work: Work, seconds: Mapping[UnitGroup, OverlappedUnitSeconds]) -> StageTime:
    """Return the seconds of one micro-batch through one stage, without overlap with another micro-batch."""
    forward = backward = full_backward = weight = full_dp_exposed = spare_seconds = (
        0.0  # spare: seconds of the next forward that are free for messages
    )
    forward_exposed = dict.fromkeys(AXES, 0.0)
    backward_exposed = dict.fromkeys(AXES, 0.0)
    longest = (0.0, "")
    next_forward_reduce = MessageTime(0.0, 0.0)  # after: the reduction that overlaps the next forward
    for unit_group, times in work:
        unit = seconds[unit_group]
        for axis, exposed in unit.forward_exposed:
            forward_exposed[axis] = forward_exposed.get(axis, 0.0) + times * exposed
        for axis, exposed in unit.backward_exposed:
            backward_exposed[axis] = backward_exposed.get(axis, 0.0) + times * exposed
        full_dp_exposed += times * unit.full_backward_exposed
        spare_seconds += times * unit.forward_spare
        next_forward_reduce = unit.next_forward_reduce or next_forward_reduce
        forward += times * unit.forward
        backward += times * unit.backward
        full_backward += times * unit.full_backward
        weight += times * unit.weight
        span = times * (unit.forward + unit.full_backward)
        if span > longest[0]:
            longest = span, unit.time.longest
    if next_forward_reduce.seconds:
        exposed_after, slowdown = overlap_message(units, next_forward_reduce, spare_seconds)
        backward_exposed["dp"], full_dp_exposed = (
            backward_exposed["dp"] + exposed_after,
            full_dp_exposed + exposed_after,
        )
        backward, full_backward = backward + slowdown, full_backward + slowdown
    full_exposed = backward_exposed | {"dp": full_dp_exposed}
    return StageTime(
        ActionCost(forward, forward_exposed),
        ActionCost(backward, backward_exposed),
        ActionCost(full_backward, full_exposed),
        weight,
        longest,
    )


def estimate_stage_message(units: Units, layout: Layout) -> tuple[float, float]:
    """Return the seconds by which a message between stages delays its receiver, and those it takes from its sender."""
    if layout.pp == 1:
        return 0.0, 0.0
    message = _estimate_hop(units, layout)
    gloo = not units.machine.has_gpus  # gloo: a send ends when the socket has the data
    overlaps = gloo or (units.job.stack.overlaps_p2p(layout.schedule) and units.machine.can_overlap)
    return (
        (message.overlappable_seconds, message.busy) if overlaps else (message.seconds, message.seconds)
    )  # a blocking send


def _estimate_hop(units: Units, layout: Layout) -> MessageTime:
    """Return the seconds of a stream's messages from one stage to the next."""
    messages = [
        (message.collective, message.payload, group(layout, message.axis))
        for message in list_stage_messages(units.counts, layout)
    ]
    seconds = sum(units.network.seconds(*message) for message in messages)
    return MessageTime(seconds, units.network.busy_seconds(*messages[0]) if len(messages) == 1 else 0.0)


def add_up(parts: Iterable[tuple[ActionCost, int]]) -> tuple[float, dict[str, float]]:
    """Sum the costs of actions, each multiplied by its number: compute, and exposed seconds by axis."""
    compute, exposed = 0.0, dict[str, float]()
    for cost, times in parts:
        compute += times * cost.compute
        for axis, seconds in cost.exposed.items():
            if seconds:
                exposed[axis] = exposed.get(axis, 0.0) + times * seconds
    return compute, exposed

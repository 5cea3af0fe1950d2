"""Seconds of a micro-batch through each stage of a layout: units add up, with data parallelism's messages beside them.

``unit_overlap.py``: units → stage_seconds → ``action_time.py``: the actions of a schedule → ``timeline.py``: the step
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from fivefold.layout.mesh import group
from fivefold.layout.spec import Layout
from fivefold.planner.counts.counts import Run
from fivefold.planner.counts.operations.local_shapes import part_of
from fivefold.planner.time.network import MessageTime
from fivefold.planner.time.unit_overlap import UnitSeconds, overlap_message, unit_seconds
from fivefold.planner.time.unit_time import AXES
from fivefold.planner.time.units import Units

Work = tuple[tuple[Run, int], ...]  # units of a stage, and how many of each


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


class StageSeconds(NamedTuple):
    """The stages of one layout, from which the seconds of its actions follow (``action_time.py``).

    ``alike``: of each stage the first one with equal units, as fast. ``late``, ``sending``: seconds by which a message
    between stages makes its receiver late, and those that it takes of its sender.
    """

    units: Units
    layout: Layout
    work: tuple[Work, ...]
    unit_seconds: tuple[dict[Run, UnitSeconds], ...]  # by stage
    times: tuple[StageTime, ...]
    alike: tuple[int, ...]
    late: float
    sending: float


def stage_seconds(
    units: Units, layout: Layout, *, straggler: Units | None = None, slow: Collection[int] = ()
) -> StageSeconds:
    """Return the seconds of one micro-batch through each stage; those in ``slow`` take the ``straggler``'s seconds."""
    work, alike = units.counts.stage_work(layout), units.counts.alike_work(layout)
    usual = unit_seconds(units, layout)
    each, seconds = [units] * len(work), [usual] * len(work)
    if straggler is not None and slow:
        straggling, first = unit_seconds(straggler, layout), dict[tuple[int, bool], int]()
        for stage in slow:
            each[stage], seconds[stage] = straggler, straggling
        alike = tuple([first.setdefault((like, stage in slow), stage) for stage, like in enumerate(alike)])
    times = {stage: add_units(each[stage], work[stage], seconds[stage]) for stage in dict.fromkeys(alike)}
    every = tuple([times[stage] for stage in alike])
    return StageSeconds(units, layout, work, tuple(seconds), every, alike, *between_stages(units, layout))


def add_units(units: Units, work: Work, seconds: Mapping[Run, UnitSeconds]) -> StageTime:
    """Return the seconds of one micro-batch through one stage, with nothing of another micro-batch beside it."""
    forward = backward = whole = weight = late = spare = 0.0  # spare: seconds of the next forward
    fronts, backs = dict.fromkeys(AXES, 0.0), dict.fromkeys(AXES, 0.0)
    longest, after = (0.0, ""), MessageTime(0.0, 0.0)  # after: the reduction that travels beside the next forward
    for run, times in work:
        unit = seconds[run]
        for axis, exposed in unit.fronts:
            fronts[axis] = fronts.get(axis, 0.0) + times * exposed
        for axis, exposed in unit.backs:
            backs[axis] = backs.get(axis, 0.0) + times * exposed
        late += times * unit.late
        spare += times * unit.spare
        after = unit.after or after
        forward += times * unit.forward
        backward += times * unit.backward
        whole += times * unit.whole
        weight += times * unit.weight
        span = times * (unit.forward + unit.whole)
        if span > longest[0]:
            longest = span, unit.time.longest
    if after.seconds:
        shown, slows = overlap_message(units, after, spare)
        backs["dp"], late = backs["dp"] + shown, late + shown
        backward, whole = backward + slows, whole + slows
    later = backs | {"dp": late}
    return StageTime(Cost(forward, fronts), Cost(backward, backs), Cost(whole, later), weight, longest)


def between_stages(units: Units, layout: Layout) -> tuple[float, float]:
    """Seconds by which a message between stages makes its receiver late, and those that it takes of its sender."""
    if layout.pp == 1:
        return 0.0, 0.0
    message, gloo = _hop(units, layout), units.machine.backend == "gloo"  # whose sends end when the socket has them
    hides = gloo or (units.job.stack.hides_p2p(layout.schedule) and units.machine.overlaps)
    return (message.travelling, message.busy) if hides else (message.seconds, message.seconds)  # a blocking send


def _hop(units: Units, layout: Layout) -> MessageTime:
    """A message from one stage to the next; with ``scatter_hops``, its parts are gathered over tp."""
    size, network, pp = units.counts.local(part_of(layout)).entry_bytes, units.network, group(layout, "pp")
    if layout.tp == 1 or layout.sp or not units.job.stack.scatter_hops:
        return MessageTime(network.seconds("p2p", size, pp), network.busy("p2p", size, pp))
    sent = network.seconds("p2p", size // layout.tp, pp)
    return MessageTime(sent + network.seconds("all_gather", size, group(layout, "tp")), 0.0)


def add_up(parts: Iterable[tuple[Cost, int]]) -> tuple[float, dict[str, float]]:
    """Sum of actions, each repeated so many times: compute, and exposed seconds by axis."""
    compute, exposed = 0.0, dict[str, float]()
    for cost, times in parts:
        compute += times * cost.compute
        for axis, seconds in cost.exposed.items():
            if seconds:
                exposed[axis] = exposed.get(axis, 0.0) + times * seconds
    return compute, exposed

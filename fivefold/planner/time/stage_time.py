"""Seconds of a micro-batch through a unit and through a stage, with data parallelism's messages beside them.

unit_seconds → stage_seconds → ``durations.py``: the actions of a schedule → ``timeline.py``: the step
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from fivefold.layout.mesh import group
from fivefold.layout.sharding import policy
from fivefold.layout.spec import Layout
from fivefold.planner.counts.counts import Run
from fivefold.planner.counts.operations.local_shapes import part_of
from fivefold.planner.time.data_parallel import DataParallel
from fivefold.planner.time.network import MessageTime
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


class UnitSeconds(NamedTuple):
    """Seconds of a micro-batch through one unit, with data parallelism's messages beside it; exposed ones by axis.

    ``late``: exposed data parallelism of a whole backward; ``spare``: of its forward in which the link is free;
    ``after``: the reduction that travels beside the next forward.
    """

    forward: float
    backward: float
    whole: float
    weight: float
    fronts: list[tuple[str, float]]
    backs: list[tuple[str, float]]
    longest: str
    late: float = 0.0
    spare: float = 0.0
    after: MessageTime | None = None


def sends_beside_passes(parallel: DataParallel, layout: Layout) -> bool:
    """Whether weights are gathered, or gradients reduced, beside the passes of each micro-batch."""
    return not policy(layout, parallel.job).weights_stay or parallel.counts.reduces_each(layout)


def unit_seconds(parallel: DataParallel, layout: Layout, run: Run, *, sends: bool) -> UnitSeconds:
    """Seconds of one unit; ``sends``: what ``sends_beside_passes`` says of the layout."""
    unit = parallel.units.unit(layout, run)
    fronts, backs = _shown(unit.forward_exposed), _shown(unit.backward_exposed)
    whole = unit.backward + unit.weight
    alone = UnitSeconds(unit.forward, unit.backward, whole, unit.weight, fronts, backs, unit.longest)
    return _with_messages(parallel, layout, run, alone) if sends else alone


def _with_messages(parallel: DataParallel, layout: Layout, run: Run, alone: UnitSeconds) -> UnitSeconds:
    """A unit whose weights are gathered, or gradients reduced, beside its passes."""
    sent, (ahead, talk) = parallel.sent(layout, run.name), parallel.free(layout, run)
    meanwhile = alone.forward + ahead
    shown, slows = parallel.waits(sent.forward, meanwhile)
    late, slowed = parallel.waits(sent.backward, alone.backward + talk)
    later, slower = parallel.waits(sent.backward, alone.whole + talk)
    return alone._replace(
        forward=alone.forward + slows,
        backward=alone.backward + slowed,
        whole=alone.whole + slower,
        fronts=[*alone.fronts, ("dp", shown)],
        backs=[*alone.backs, ("dp", late)],
        late=later,
        spare=max(0.0, meanwhile - sent.forward.seconds),
        after=sent.following if parallel.follows(run.name) else None,
    )


def stage_seconds(parallel: DataParallel, work: Work, unit_time: Callable[[Run], UnitSeconds]) -> StageTime:
    """Seconds of one micro-batch through one stage, with nothing of another micro-batch beside it.

    ``unit_time``: what ``unit_seconds`` says of each unit.
    """
    forward = backward = whole = weight = late = spare = 0.0  # spare: seconds of the next forward
    fronts, backs = dict.fromkeys(AXES, 0.0), dict.fromkeys(AXES, 0.0)
    longest, after = (0.0, ""), MessageTime(0.0, 0.0)  # after: the reduction that travels beside the next forward
    for run, times in work:
        unit = unit_time(run)
        for axis, seconds in unit.fronts:
            fronts[axis] = fronts.get(axis, 0.0) + times * seconds
        for axis, seconds in unit.backs:
            backs[axis] = backs.get(axis, 0.0) + times * seconds
        late += times * unit.late
        spare += times * unit.spare
        after = unit.after or after
        forward += times * unit.forward
        backward += times * unit.backward
        whole += times * unit.whole
        weight += times * unit.weight
        span = times * (unit.forward + unit.whole)
        if span > longest[0]:
            longest = span, unit.longest
    if after.seconds:
        shown, slows = parallel.waits(after, spare)
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


def _shown(exposed: tuple[float, ...]) -> list[tuple[str, float]]:
    """Exposed seconds in the order of ``AXES`` by axis, where there are any."""
    return [(axis, seconds) for axis, seconds in zip(AXES, exposed, strict=True) if seconds] if any(exposed) else []


def add_up(parts: Iterable[tuple[Cost, int]]) -> tuple[float, dict[str, float]]:
    """Sum of actions, each repeated so many times: compute, and exposed seconds by axis."""
    compute, exposed = 0.0, dict[str, float]()
    for cost, times in parts:
        compute += times * cost.compute
        for axis, seconds in cost.exposed.items():
            if seconds:
                exposed[axis] = exposed.get(axis, 0.0) + times * seconds
    return compute, exposed

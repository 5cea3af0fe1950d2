"""Seconds of the actions of one layout: F, B, W, BW and FB of each stage.

Compute and a message that overlap take as long as the longer one, and the overlapped part slows compute
(``Constants.hidden_message_slowdown``). Under FB (DualPipe) it is the longer of max(compute of both, all their
messages) and Σ over units max(compute, gather).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from fivefold.layout.schedule.order import Task
from fivefold.planner.time.stage_time import ActionCost, StageSeconds, add_up
from fivefold.planner.time.unit_time import AXES


class PassTime(NamedTuple):
    """Seconds of one micro-batch through one stage in one direction, for a half of an FB."""

    compute: float
    exposed: dict[str, float]  # exposed messages of axes that do not overlap, by axis
    overlapping: dict[str, float]  # all messages of axes that overlap, overlapped or not, by axis
    overlapped_by_pass: (
        float  # the part of ``overlapped`` that overlaps the pass itself, for which ``compute`` is slowed already
    )
    gathers: float  # ZeRO-3's gathers, and reductions if they follow every backward
    max_with_gathers: float  # Σ over units max(work, those messages)
    min_with_gathers: float  # Σ over units min(work, those messages)


def estimate_action_costs(stages: StageSeconds, tasks: Iterable[Task]) -> dict[Task, ActionCost]:
    """Return the cost of each action; computed once for stages with equal units. No other function computes it."""
    passes: dict[tuple[int, bool], PassTime] = {}
    costs: dict[Task, ActionCost] = {}

    def time_pass(stage: int, *, backward: bool) -> PassTime:
        if (stage, backward) not in passes:
            passes[stage, backward] = pass_seconds(stages, stage, backward=backward)
        return passes[stage, backward]

    def estimate_cost(task: Task) -> ActionCost:
        """Return the seconds of one action of the schedule, and its exposed messages by axis."""
        kind, time = task.kind, stages.times[task.stage]
        if kind == "W":
            return ActionCost(time.weight, {})
        if kind != "FB":
            return _with_sends(
                stages, time.forward if kind == "F" else time.backward if kind == "B" else time.full_backward
            )
        if not stages.units.machine.has_gpus:  # one after the other
            fb_cost = ActionCost(*add_up([(time.forward, 1), (stages.times[task.backward_stage].full_backward, 1)]))
        else:
            fb_cost = _pair_cost(
                stages, time_pass(task.stage, backward=False), time_pass(task.backward_stage, backward=True)
            )
        return _with_sends(stages, fb_cost, hops=2)

    costs_of_tasks: dict[Task, ActionCost] = {}
    for task in tasks:
        equal_task = task.with_stages(stages.first_equal_stages)
        if equal_task not in costs:
            costs[equal_task] = estimate_cost(equal_task)
        costs_of_tasks[task] = costs[equal_task]
    return costs_of_tasks


def _with_sends(stages: StageSeconds, cost: ActionCost, hops: int = 1) -> ActionCost:
    return (
        cost._replace(exposed={**cost.exposed, "pp": hops * stages.p2p_send_seconds})
        if stages.p2p_send_seconds
        else cost
    )


def pass_seconds(stages: StageSeconds, stage: int, *, backward: bool) -> PassTime:
    """Return the seconds of one direction of a stage, as a half of an FB."""
    compute = overlapped_by_pass = gathers = max_with_gathers = min_with_gathers = 0.0
    unoverlapped = dict.fromkeys(AXES, 0.0)
    overlapped = dict.fromkeys(AXES, 0.0)
    overlap = stages.units.job.stack.overlap
    for unit_group, times in stages.work[stage]:
        unit = stages.unit_seconds[stage][unit_group].time
        unit_messages = stages.unit_seconds[stage][unit_group].messages
        unit_compute = unit.backward + unit.weight if backward else unit.forward
        exposed, unoverlapped_exposed = unit.backward_exposed, unit.backward_unoverlapped
        if not backward:
            exposed, unoverlapped_exposed = unit.forward_exposed, unit.forward_unoverlapped
        work = unit_compute
        for axis, exposed_seconds, message_seconds in zip(AXES, exposed, unoverlapped_exposed, strict=True):
            if axis in overlap:
                overlapped[axis] += times * message_seconds
                overlapped_by_pass += times * max(0.0, message_seconds - exposed_seconds)
            else:
                unoverlapped[axis] += times * exposed_seconds
                work += exposed_seconds
        message = (unit_messages.backward if backward else unit_messages.forward).seconds
        compute += times * unit_compute
        gathers += times * message
        max_with_gathers += times * max(work, message)
        min_with_gathers += times * min(work, message)
    return PassTime(compute, unoverlapped, overlapped, overlapped_by_pass, gathers, max_with_gathers, min_with_gathers)


def _pair_cost(stages: StageSeconds, forward: PassTime, backward: PassTime) -> ActionCost:
    """Return the cost of an FB: a forward of one stage overlapped with a backward of another."""
    compute = forward.compute + backward.compute
    exposed = {axis: forward.exposed[axis] + backward.exposed[axis] for axis in AXES}
    overlapping = {axis: forward.overlapping[axis] + backward.overlapping[axis] for axis in AXES}
    messages = sum(overlapping.values())
    work = max(compute, messages) + sum(exposed.values())
    slowed_seconds = max(0.0, min(compute, messages) - forward.overlapped_by_pass - backward.overlapped_by_pass)
    if messages > compute:
        exposed = {axis: exposed[axis] + overlapping[axis] * (1 - compute / messages) for axis in AXES}
    if stages.units.overlaps:
        exposed["dp"] = max(0.0, forward.max_with_gathers + backward.max_with_gathers - work)
        slowed_seconds += forward.min_with_gathers + backward.min_with_gathers
    else:
        exposed["dp"] = forward.gathers + backward.gathers
    return ActionCost(compute + stages.units.constants.hidden_message_slowdown * slowed_seconds, exposed)

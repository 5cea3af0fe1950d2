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
    stays: dict[str, float]  # exposed messages of axes that do not overlap, by axis
    with_expert_ranks: dict[str, float]  # all messages of axes that overlap, overlapped or not, by axis
    hidden: float  # the part of ``overlapped`` that overlaps the pass itself, for which ``compute`` is slowed already
    gathers: float  # ZeRO-3's gathers, and reductions if they follow every backward
    gathered: float  # Σ over units max(work, those messages)
    meanwhile: float  # Σ over units min(work, those messages)


def action_costs(stages: StageSeconds, tasks: Iterable[Task]) -> dict[Task, ActionCost]:
    """Return the cost of each action; computed once for stages with equal units. No other function computes it."""
    passes: dict[tuple[int, bool], PassTime] = {}
    costs: dict[Task, ActionCost] = {}

    def time_pass(stage: int, *, back: bool) -> PassTime:
        if (stage, back) not in passes:
            passes[stage, back] = pass_seconds(stages, stage, back=back)
        return passes[stage, back]

    def cost(task: Task) -> ActionCost:
        kind, time = task.kind, stages.times[task.stage]
        if kind == "W":
            return ActionCost(time.weight, {})
        if kind != "FB":
            return _with_sends(
                stages, time.forward if kind == "F" else time.backward if kind == "B" else time.full_backward
            )
        if stages.units.machine.backend == "gloo":  # one after the other
            fb_cost = ActionCost(*add_up([(time.forward, 1), (stages.times[task.backward_stage].full_backward, 1)]))
        else:
            fb_cost = _pair_cost(stages, time_pass(task.stage, back=False), time_pass(task.backward_stage, back=True))
        return _with_sends(stages, fb_cost, hops=2)

    costs_of_tasks: dict[Task, ActionCost] = {}
    for task in tasks:
        equal_task = task.with_stages(stages.first_equal_stages)
        if equal_task not in costs:
            costs[equal_task] = cost(equal_task)
        costs_of_tasks[task] = costs[equal_task]
    return costs_of_tasks


def _with_sends(stages: StageSeconds, cost: ActionCost, hops: int = 1) -> ActionCost:
    return cost._replace(exposed={**cost.exposed, "pp": hops * stages.sending}) if stages.sending else cost


def pass_seconds(stages: StageSeconds, stage: int, *, back: bool) -> PassTime:
    """Return the seconds of one direction of a stage, as a half of an FB."""
    compute = hidden = gathers = gathered = meanwhile = 0.0
    unoverlapped, overlapped = dict.fromkeys(AXES, 0.0), dict.fromkeys(AXES, 0.0)
    overlap = stages.units.job.stack.overlap
    for run, times in stages.work[stage]:
        unit, unit_messages = stages.unit_seconds[stage][run].time, stages.unit_seconds[stage][run].messages
        unit_compute = unit.backward + unit.weight if back else unit.forward
        exposed, unoverlapped_exposed = unit.backward_exposed, unit.backward_apart
        if not back:
            exposed, unoverlapped_exposed = unit.forward_exposed, unit.forward_apart
        work = unit_compute
        for axis, exposed_seconds, message_seconds in zip(AXES, exposed, unoverlapped_exposed, strict=True):
            if axis in overlap:
                overlapped[axis] += times * message_seconds
                hidden += times * max(0.0, message_seconds - exposed_seconds)
            else:
                unoverlapped[axis] += times * exposed_seconds
                work += exposed_seconds
        message = (unit_messages.backward if back else unit_messages.forward).seconds
        compute += times * unit_compute
        gathers += times * message
        gathered += times * max(work, message)
        meanwhile += times * min(work, message)
    return PassTime(compute, unoverlapped, overlapped, hidden, gathers, gathered, meanwhile)


def _pair_cost(stages: StageSeconds, one: PassTime, other: PassTime) -> ActionCost:
    """Return the cost of an FB: a forward of one stage overlapped with a backward of another."""
    compute = one.compute + other.compute
    exposed = {axis: one.stays[axis] + other.stays[axis] for axis in AXES}
    overlapping = {axis: one.with_expert_ranks[axis] + other.with_expert_ranks[axis] for axis in AXES}
    messages = sum(overlapping.values())
    work = max(compute, messages) + sum(exposed.values())
    slowed_seconds = max(0.0, min(compute, messages) - one.hidden - other.hidden)
    if messages > compute:
        exposed = {axis: exposed[axis] + overlapping[axis] * (1 - compute / messages) for axis in AXES}
    if stages.units.overlaps:
        exposed["dp"] = max(0.0, one.gathered + other.gathered - work)
        slowed_seconds += one.meanwhile + other.meanwhile
    else:
        exposed["dp"] = one.gathers + other.gathers
    return ActionCost(compute + stages.units.constants.hidden_message_slowdown * slowed_seconds, exposed)

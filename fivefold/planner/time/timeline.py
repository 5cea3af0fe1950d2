"""Seconds of a step: units add up to stages, the schedule orders them, data parallelism adds its ends.

step = play(schedule, seconds of its actions) + exposed gathers and reductions + small messages + update
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import add
from typing import NamedTuple

from fivefold.layout.spec import Layout
from fivefold.planner.counts.counts import Run
from fivefold.planner.counts.memory.peak import RankMemory
from fivefold.planner.counts.update import stages_held
from fivefold.planner.time.action_time import action_costs
from fivefold.planner.time.data_parallel import StepEnds, end_seconds
from fivefold.planner.time.small_messages import small_messages
from fivefold.planner.time.stage_time import StageSeconds, StageTime, add_up, stage_seconds
from fivefold.planner.time.steady_state import distinct_tasks, extrapolate
from fivefold.planner.time.unit_overlap import UnitSeconds
from fivefold.planner.time.units import Units
from fivefold.planner.time.update_time import update_seconds


class StepTime(NamedTuple):
    """Seconds of one step on its critical rank, split as in ``step.Time``; ``exposed`` is by axis."""

    seconds: float
    compute: float
    bubble: float
    exposed: dict[str, float]
    optimizer: float
    bound_by: str

    @property
    def split(self) -> dict[str, float]:
        """The parts that add up to it."""
        messages = {f"{axis} messages": seconds for axis, seconds in self.exposed.items()}
        return {"compute": self.compute, **messages, "bubble": self.bubble, "update": self.optimizer}


class AfterPasses(NamedTuple):
    """Of a rank the ends of data parallelism, its small messages by axis, its update, and all of them in seconds."""

    ends: StepEnds
    small: dict[str, float]
    update: float
    seconds: float


def step_seconds(
    units: Units, layout: Layout, memory: Sequence[RankMemory], *, straggler: Units | None = None
) -> StepTime:
    """Return the seconds of the step of ``layout``; ``memory`` says how many elements each rank updates.

    ``straggler``: the seconds of one rank that is slower: of a pipeline the one that is the busiest without it.
    """
    if layout.pp == 1:
        return _time_without_pipeline(straggler or units, layout, memory[0])
    found, busiest = _time_pipeline(layout, memory, stage_seconds(units, layout))
    if straggler is None:
        return found
    stages = stage_seconds(units, layout, straggler=straggler, slow=stages_held(layout)[busiest])
    return _time_pipeline(layout, memory, stages, straggler=straggler, slow=busiest)[0]


def _time_without_pipeline(units: Units, layout: Layout, memory: RankMemory) -> StepTime:
    """Return the seconds of a step without a pipeline."""
    stages, micro_batches = stage_seconds(units, layout), layout.micro_batches(units.job)
    (stage,), after = stages.times, after_passes(units, layout, memory, (0,), stages.unit_seconds[0])
    compute, exposed = add_up([(stage.forward, micro_batches), (stage.whole, micro_batches)])
    _add(exposed, after.small)
    return _step_time(compute + after.ends.slowed, exposed, after.ends.exposed, after.update, stages.times)


def _time_pipeline(
    layout: Layout, memory: Sequence[RankMemory], stages: StageSeconds, *, straggler: Units | None = None,
    slow: int | None = None,
) -> tuple[StepTime, int]:  # fmt: skip
    """Return the seconds of a step in a pipeline, and its critical rank; ``slow``: the rank that straggles."""
    units, alike, micro_batches = stages.units, stages.alike, layout.micro_batches(stages.units.job)
    tasks = distinct_tasks(layout, micro_batches, alike)
    known = action_costs(stages, tasks)
    costs = [known[task] for task in tasks]
    line = extrapolate(layout, micro_batches, seconds=[cost.seconds for cost in costs], hop=stages.late, alike=alike)
    after: dict[tuple[int, bool], AfterPasses] = {}  # of ranks with equal stages, as fast
    keys = [(like, rank == slow) for rank, like in enumerate(line.like)]
    for rank, key in enumerate(keys):
        if key not in after:
            held, own = line.held[rank], straggler if straggler is not None and rank == slow else units
            after[key] = after_passes(own, layout, memory[rank], held, stages.unit_seconds[held[0]])
    late = [after[key].seconds for key in keys]
    total = max(map(add, line.ends, late))
    busiest = list(map(add, line.busy, late))
    critical = busiest.index(max(busiest))
    ends, small, update, _ = after[keys[critical]]
    compute, exposed = add_up([(costs[task], times) for task, times in line.tasks[critical]])
    _add(exposed, small)
    held_times = [stages.times[stage] for stage in {alike[stage]: None for stage in line.held[critical]}]
    found = _step_time(compute + ends.slowed, exposed, ends.exposed, update, held_times, total=total)
    return found, critical


def after_passes(
    units: Units, layout: Layout, memory: RankMemory, held: tuple[int, ...], seconds: Mapping[Run, UnitSeconds]
) -> AfterPasses:
    """Return what comes after the passes of a rank that holds some stages, or between them; ``seconds``: of its
    units. NCCL's small messages are among the launches of their operations.
    """
    ends = end_seconds(units, layout, held, seconds)
    small = {} if units.machine.backend == "nccl" else small_messages(units.counts, units.network, layout, chunks=held)
    update = update_seconds(units, layout, memory, held)
    return AfterPasses(ends, small, update, ends.slowed + ends.exposed + sum(small.values()) + update)


def _add(exposed: dict[str, float], more: dict[str, float]) -> None:
    for axis, seconds in more.items():
        exposed[axis] = exposed.get(axis, 0.0) + seconds


def _step_time(
    compute: float, exposed: dict[str, float], ends: float, update: float, stages: Sequence[StageTime],
    *, total: float | None = None,
) -> StepTime:  # fmt: skip
    """A rank's parts as a ``StepTime``; ``ends``: exposed by data parallelism. Without ``total`` there is no bubble."""
    if ends:
        exposed["dp"] = exposed.get("dp", 0.0) + ends
    busy = compute + sum(exposed.values()) + update
    bubble = max(0.0, total - busy) if total is not None else 0.0
    slowest = max(stages, key=lambda stage: stage.longest[0]).longest[1]
    # What bounds the step is its largest part; compute is named by its longest operation.
    parts = {f"{axis} messages": seconds for axis, seconds in exposed.items()}
    parts |= {"pipeline bubble": bubble, "optimizer": update, slowest: compute}
    return StepTime(busy + bubble, compute, bubble, exposed, update, max(parts, key=lambda name: parts[name]))

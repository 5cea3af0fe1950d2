"""Seconds of a step: units add up to stages, the schedule orders them, data parallelism adds messages at the ends.

step = simulated schedule of the actions + exposed gathers and reductions + small messages + update + overhead
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import add
from typing import NamedTuple

from fivefold.layout.mesh import make_group
from fivefold.layout.spec import Layout
from fivefold.planner.counts.counts import Counts, UnitGroup
from fivefold.planner.counts.memory.peak import RankMemory
from fivefold.planner.counts.traffic import count_passes, list_routing_messages, step_messages
from fivefold.planner.counts.update import list_stages
from fivefold.planner.time.action_time import estimate_action_costs
from fivefold.planner.time.data_parallel import StepEnds, estimate_step_ends
from fivefold.planner.time.network import Network
from fivefold.planner.time.stage_time import StageSeconds, StageTime, add_up, estimate_stage_seconds
from fivefold.planner.time.steady_state import extrapolate, list_distinct_tasks
from fivefold.planner.time.step_overhead import Overhead, estimate_overhead
from fivefold.planner.time.unit_overlap import OverlappedUnitSeconds
from fivefold.planner.time.units import Units
from fivefold.planner.time.update_time import update_seconds


class StepTime(NamedTuple):
    """Seconds of one step on its critical rank, split as in ``step.Time``; ``exposed`` is by axis.

    ``host``: between operations. ``waits``: the part of the bubble in which it waits for the last rank of a message.
    ``overhead``: the waits, and what the clock counts beyond the processor time of work and bubble.
    """

    seconds: float
    compute: float
    bubble: float
    exposed: dict[str, float]
    optimizer: float
    longest_part: str
    host: float = 0.0
    waits: float = 0.0
    overhead: float = 0.0

    @property
    def split(self) -> dict[str, float]:
        """Return the parts that add up to the step."""
        messages = {f"{axis} communication": seconds for axis, seconds in self.exposed.items()}
        return {"compute": self.compute, **messages, "bubble": self.bubble, "update": self.optimizer, "host": self.host}


class StepEndCosts(NamedTuple):
    """The costs of a rank after its passes: data parallelism's ends, small messages by axis, update.

    ``seconds``: the sum.
    """

    ends: StepEnds
    small: dict[str, float]
    update: float
    seconds: float


def step_seconds(
    units: Units, layout: Layout, memory: Sequence[RankMemory], *, straggler: Units | None = None
) -> StepTime:
    """Return the seconds of the step of ``layout``; ``memory`` has the number of elements that each rank updates.

    ``straggler``: the times of one slower rank; in a pipeline it is the rank that is busiest without it.
    """
    if layout.pp == 1:
        return _time_without_pipeline(straggler or units, layout, memory[0])
    step_time, busiest = _time_pipeline(layout, memory, estimate_stage_seconds(units, layout))
    if straggler is None:
        return step_time
    stages = estimate_stage_seconds(units, layout, straggler=straggler, straggling=list_stages(layout)[busiest])
    return _time_pipeline(layout, memory, stages, straggler=straggler, straggler_rank=busiest)[0]


def _time_without_pipeline(units: Units, layout: Layout, memory: RankMemory) -> StepTime:
    """Return the seconds of a step without a pipeline."""
    stages = estimate_stage_seconds(units, layout)
    micro_batches = layout.micro_batches(units.job)
    (stage,), end_costs = stages.times, price_step_end(units, layout, memory, (0,), stages.unit_seconds[0])
    forwards = 2 if units.job.has_reference else 1  # the reference's and the policy's
    compute, exposed = add_up([(stage.forward, forwards * micro_batches), (stage.full_backward, micro_batches)])
    _add(exposed, end_costs.small)
    _add(exposed, _label_step_ends(layout, end_costs.ends.exposed))
    compute += end_costs.ends.slowdown
    overhead = estimate_overhead(units, layout, (0,), work_seconds=compute + end_costs.update)
    return _step_time(compute, exposed, end_costs.update, stages.times, overhead=overhead)


def _time_pipeline(
    layout: Layout,
    memory: Sequence[RankMemory],
    stages: StageSeconds,
    *,
    straggler: Units | None = None,
    straggler_rank: int | None = None,
) -> tuple[StepTime, int]:
    """Return the seconds of a step in a pipeline, and its critical rank; ``straggler_rank``: the slower rank."""
    units = stages.units
    equal_stages = stages.first_equal_stages
    micro_batches = layout.micro_batches(stages.units.job)
    has_reference = units.job.has_reference
    tasks = list_distinct_tasks(layout, micro_batches, equal_stages, has_reference=has_reference)
    cost_of_task = estimate_action_costs(stages, tasks)
    costs = [cost_of_task[task] for task in tasks]
    extrapolated = extrapolate(
        layout,
        micro_batches,
        seconds=[cost.seconds for cost in costs],
        hop_seconds=stages.p2p_delay,
        first_equal_stages=equal_stages,
        has_reference=has_reference,
    )
    after: dict[tuple[int, bool], StepEndCosts] = {}  # shared by ranks with equal stages and speed
    keys = [(first_equal, rank == straggler_rank) for rank, first_equal in enumerate(extrapolated.first_equal_ranks)]
    for rank, key in enumerate(keys):
        if key not in after:
            rank_stages = extrapolated.rank_stages[rank]
            own_units = straggler if straggler is not None and rank == straggler_rank else units
            after[key] = price_step_end(
                own_units, layout, memory[rank], rank_stages, stages.unit_seconds[rank_stages[0]]
            )
    seconds_after = [after[key].seconds for key in keys]
    total = max(map(add, extrapolated.ends, seconds_after))
    busiest = list(map(add, extrapolated.busy, seconds_after))
    critical = busiest.index(max(busiest))
    ends, small_seconds, update, _ = after[keys[critical]]
    compute, exposed = add_up([(costs[task], times) for task, times in extrapolated.task_counts[critical]])
    _add(exposed, small_seconds)
    _add(exposed, _label_step_ends(layout, ends.exposed))
    held_times = [
        stages.times[stage] for stage in {equal_stages[stage]: None for stage in extrapolated.rank_stages[critical]}
    ]
    compute += ends.slowdown
    # what a rank waits for in a bubble is the work of others, which has the same overhead
    bubble = max(0.0, total - (compute + sum(exposed.values()) + update))
    overhead = estimate_overhead(
        units, layout, extrapolated.rank_stages[critical], work_seconds=compute + update + bubble
    )
    return _step_time(compute, exposed, update, held_times, overhead=overhead, bubble=bubble), critical


def price_step_end(
    units: Units,
    layout: Layout,
    memory: RankMemory,
    rank_stages: tuple[int, ...],
    seconds: Mapping[UnitGroup, OverlappedUnitSeconds],
) -> StepEndCosts:
    """Return the costs of a rank after its passes, or between them.

    ``rank_stages``: its stages; ``seconds``: the seconds of its units. NCCL's small messages are among the launches of
    their operations.
    """
    ends = estimate_step_ends(units, layout, rank_stages, seconds)
    small_seconds = (
        {}
        if units.machine.has_gpus
        else estimate_small_messages(units.counts, units.network, layout, chunks=rank_stages)
    )
    update = update_seconds(units, layout, memory, rank_stages)
    return StepEndCosts(
        ends, small_seconds, update, ends.slowdown + ends.exposed + sum(small_seconds.values()) + update
    )


def _add(exposed: dict[str, float], more: dict[str, float]) -> None:
    """Add the exposed seconds of each axis in ``more`` to ``exposed``."""
    for axis, seconds in more.items():
        exposed[axis] = exposed.get(axis, 0.0) + seconds


def _label_step_ends(layout: Layout, seconds: float) -> dict[str, float]:
    """Return the exposed messages at the ends of a step by axis.

    Without data parallelism they reduce the gradients of replicated weights (tp) or of tied embeddings (pp).
    """
    axis = "dp" if layout.dp * layout.cp > 1 else "tp" if layout.tp > 1 else "pp"
    return {axis: seconds} if seconds else {}


def _step_time(
    compute: float,
    exposed: dict[str, float],
    update: float,
    stages: Sequence[StageTime],
    *,
    overhead: Overhead,
    bubble: float = 0.0,
) -> StepTime:
    """Return a rank's parts, of which compute, update and bubble are processor time, as a ``StepTime``."""
    overhead_seconds = (overhead.clock_ratio - 1) * (compute + update + bubble) + overhead.waits
    compute, update, bubble = (overhead.clock_ratio * seconds for seconds in (compute, update, bubble))
    host = min(overhead.clock_ratio * sum(overhead.gaps), compute)
    compute -= host
    slowest = max(stages, key=lambda stage: stage.longest[0]).longest[1]
    # The largest part bounds the step; compute is named by its longest operation.
    parts = {f"{axis} communication": seconds for axis, seconds in exposed.items()}
    parts |= {"pipeline bubble": bubble, "optimizer": update, slowest: compute}
    parts |= {"host": host, "waits for the last rank": overhead.waits}
    longest = max(parts, key=lambda name: parts[name])
    bubble += overhead.waits
    seconds = compute + sum(exposed.values()) + update + bubble + host
    return StepTime(
        seconds,
        compute,
        bubble,
        exposed,
        update,
        longest,
        host=host,
        waits=overhead.waits,
        overhead=overhead_seconds,
    )


def estimate_small_messages(
    counts: Counts, network: Network, layout: Layout, *, chunks: tuple[int, ...]
) -> dict[str, float]:
    """Return the exposed seconds of messages without weights or activations by axis, for a rank with stages ``chunks``.

    Norm, loss and stop votes once a step; counts and weights of routed tokens in every pass through a layer of experts.
    On a CPU each takes as long as a layer's norm.
    """
    if layout.world == 1:
        return {}
    seconds_by_axis = dict[str, float]()
    messages = list(step_messages(counts, layout, chunks=chunks))
    for chunk in chunks:
        for run, times in counts.stage_work(layout)[chunk]:
            if n_moe_layers := counts.count_moe_layers(run.name):
                messages += list_routing_messages(
                    counts, layout, run, times=times * n_moe_layers * count_passes(layout, counts.job)
                )
    for message in messages:
        mesh_group = make_group(layout, message.group, message.ranks)
        seconds = message.times * network.seconds(message.collective, message.payload, mesh_group)
        seconds_by_axis[message.axis] = seconds_by_axis.get(message.axis, 0.0) + seconds
    return seconds_by_axis

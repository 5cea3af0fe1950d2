"""Seconds of a step: units add up to stages, the schedule orders them, data parallelism adds its ends.

step = play(schedule, seconds of its actions) + exposed gathers and reductions + small messages + update
"""

from __future__ import annotations

from operator import add
from typing import NamedTuple

from fivefold.layout.mesh import group
from fivefold.layout.spec import Layout
from fivefold.optimizers.cost import find_cost
from fivefold.planner.counts.memory.rank_memory import RankMemory
from fivefold.planner.counts.update import stages_held, update_messages, update_products
from fivefold.planner.time.data_parallel import DataParallel, StepEnds
from fivefold.planner.time.durations import Durations
from fivefold.planner.time.small_messages import small_messages
from fivefold.planner.time.stage_time import StageTime, add_up
from fivefold.planner.time.steady_state import extrapolate
from fivefold.planner.time.units import Units


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


class Timeline:
    """Step times of layouts, for one model, job and machine."""

    def __init__(self, units: Units, *, straggler: Units | None = None) -> None:
        """``straggler``: those of one rank that is slower: of a pipeline the one that is the busiest without it."""
        self.straggler = None if straggler is None else Timeline(straggler)
        self.units, self.counts, self.job = units, units.counts, units.counts.job
        self.machine, self.parallel = units.machine, DataParallel(units)
        self.beside, self.data_parallel = self.parallel.beside, self.parallel.gather_reduce
        self.moments = find_cost(self.job.optimizer.kind).moved_bytes(self.job)  # bytes

    def durations(self, layout: Layout) -> Durations:
        """Seconds of the actions of ``layout``; without a pipeline these are F and BW."""
        return Durations(self.parallel, layout)

    def step(self, layout: Layout, memory: list[RankMemory]) -> StepTime:
        """Seconds of the step of ``layout``; ``memory`` says how many elements each rank updates."""
        slow, durations = self.straggler, self.durations(layout)
        if layout.pp == 1:
            return self._alone(layout, memory[0], durations) if slow is None else slow.step(layout, memory)
        found, busiest = self._piped(layout, memory, durations)
        if slow is None:
            return found
        held = stages_held(layout)[busiest]
        late = Durations(self.parallel, layout, straggler=slow.parallel, slow=held)
        return self._piped(layout, memory, late, slow=busiest)[0]

    def _alone(self, layout: Layout, memory: RankMemory, durations: Durations) -> StepTime:
        """Seconds of a step without a pipeline."""
        micro_batches, update = layout.micro_batches(self.job), self._whole_update(layout, memory, (0,))
        stage, ends = durations.stages[0], self.parallel.ends(layout, (0,))
        compute, exposed = add_up([(stage.forward, micro_batches), (stage.whole, micro_batches)])
        _add(exposed, self.small_messages(layout, (0,)))
        return _step_time(compute + ends.slowed, exposed, ends.exposed, update, durations.stages)

    def _piped(
        self, layout: Layout, memory: list[RankMemory], durations: Durations, *, slow: int | None = None
    ) -> tuple[StepTime, int]:  # fmt: skip
        """Seconds of a step in a pipeline, and its critical rank; ``slow``: the rank that straggles."""
        micro_batches, straggler = layout.micro_batches(self.job), self.straggler or self
        line = extrapolate(layout, micro_batches, seconds=durations.seconds, hop=durations.hop, alike=durations.alike)
        after: dict[tuple[int, bool], AfterPasses] = {}  # of ranks with equal stages, as fast
        keys = [(like, rank == slow) for rank, like in enumerate(line.like)]
        for rank, key in enumerate(keys):
            if key not in after:
                after[key] = (straggler if rank == slow else self)._after(layout, memory[rank], line.held[rank])
        late = [after[key].seconds for key in keys]
        total = max(map(add, line.ends, late))
        busiest = list(map(add, line.busy, late))
        critical = busiest.index(max(busiest))
        ends, small, update, _ = after[keys[critical]]
        compute, exposed = add_up([(durations.cost(line.some[task]), times) for task, times in line.tasks[critical]])
        _add(exposed, small)
        stages = [durations.stages[stage] for stage in {durations.alike[stage]: None for stage in line.held[critical]}]
        found = _step_time(compute + ends.slowed, exposed, ends.exposed, update, stages, total=total)
        return found, critical

    def _after(self, layout: Layout, memory: RankMemory, held: tuple[int, ...]) -> AfterPasses:
        """What comes after the passes of a rank that holds some stages, or between them."""
        ends, small = self.parallel.ends(layout, held), self.small_messages(layout, held)
        update = self._whole_update(layout, memory, held)
        return AfterPasses(ends, small, update, ends.slowed + ends.exposed + sum(small.values()) + update)

    def _whole_update(self, layout: Layout, rank: RankMemory, held: tuple[int, ...]) -> float:
        return self.update(layout, rank) + self.matrix_update(layout, held)

    def update(self, layout: Layout, rank: RankMemory) -> float:
        """Seconds of an elementwise update: it reads gradient, weight and moments and writes the last two.

        Clipping reads the gradient twice and writes it. Sums of gradients are zeroed and, on several ranks, scaled.
        """
        recipe, prices, numel = self.job.precision, self.units.prices(layout), rank.updated
        measured = self.units.profiled.update(layout) if self.units.profiled is not None else None
        if measured is not None:
            return measured.seconds * numel / measured.elements
        update = int(numel * (3 * recipe.updated_bytes + 2 * self.moments))
        clip = numel * 3 * recipe.updated_bytes if self.job.optimizer.clip else 0
        cast = numel * (recipe.updated_bytes + recipe.weights_bytes) if recipe.master_bytes else 0
        sums = rank.gradients_bytes * (3 if layout.dp * layout.cp > 1 else 1)
        seconds = prices.moving(update, kernel="adamw") + prices.moving(clip + cast + sums, kernel="add")
        if "optimizer" in layout.offloads(self.job):
            constants = self.units.constants
            both_ways = numel * (recipe.summed_bytes + recipe.weights_bytes)
            seconds = (
                both_ways / (constants.host_link_share * constants.host_link_bandwidth)
                + update / constants.host_memory_bandwidth
            )
        return seconds

    def small_messages(self, layout: Layout, chunks: tuple[int, ...]) -> dict[str, float]:
        """Exposed seconds by axis of a rank's small messages; NCCL's are among the launches of their operations."""
        if self.machine.backend == "nccl":
            return {}
        return small_messages(self.counts, self.units.network, layout, chunks=chunks)

    def matrix_update(self, layout: Layout, chunks: tuple[int, ...]) -> float:
        """Seconds of an update of whole matrices (Muon): its messages and its products, with no overlap."""
        prices, network, seconds = self.units.prices(layout), self.units.network, 0.0
        for message in update_messages(self.counts, layout, chunks=chunks):
            place = group(layout, message.group)
            seconds += message.times * network.seconds(message.collective, message.payload, place)
        for each in update_products(self.counts, layout, chunks=chunks):
            product = prices.matmul(each.rows, each.columns, each.inner, dtype="bf16", batch=each.number)
            seconds += each.times * product
        return seconds


def _add(exposed: dict[str, float], more: dict[str, float]) -> None:
    for axis, seconds in more.items():
        exposed[axis] = exposed.get(axis, 0.0) + seconds


def _step_time(
    compute: float, exposed: dict[str, float], ends: float, update: float, stages: list[StageTime],
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

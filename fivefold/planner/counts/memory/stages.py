"""The stages of a pipeline in bytes.

They are groups of equal units with their profiles and states, and what ranks keep during the full step.

Stages are computed once per model and job: ranks, schedules and mesh orders share them. ``passes.py`` walks through the
groups.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from fivefold.job import Job
from fivefold.layout.sharding import is_gemm_weight, policy, shard_numel
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.planner.counts.counts import Counts, Name, UnitGroup, run_part
from fivefold.planner.counts.memory.liveness import GradientSums, Profile
from fivefold.planner.counts.memory.states import UnitStates, count_scales
from fivefold.planner.counts.operations.local_shapes import LocalDegrees, get_local_degrees

UnitKey = tuple[Name, bool]  # name of a unit, True if it is recomputed
Cause = tuple[Any, ...]  # (index of the group, of the unit in it, phase, operation), or one word


class RunMemory(NamedTuple):
    """A group of equal units with the live bytes and states of one unit.

    ``first`` is the profile that allocates the gradient sums ``born``, ``later`` the one with sums allocated before.
    ``state``: bytes of one unit; ``parts``: the same by what is gathered separately (dense, experts).
    """

    run: UnitGroup
    part: LocalDegrees
    first: Profile
    later: Profile
    state: UnitStates
    parts: tuple[UnitStates, ...]
    born: GradientSums
    logits: int
    noted: bool = True  # False: none of its moments can be the peak


class ModelChunk(NamedTuple):
    """One stage, in bytes.

    ``states``: of all its units; ``kept``: activations of one micro-batch until its backward; ``first_equal_stage``:
    index of the first stage with equal units.
    """

    runs: tuple[RunMemory, ...]
    states: UnitStates
    kept: int
    first_equal_stage: int
    shapes: frozenset[tuple[int, int]]  # of weights with fused wgrad accumulation


class PassKey(NamedTuple):
    """The values that the peak of a pass through a stage depends on, besides the stages themselves."""

    first_equal_stage: int  # the first stage with equal units
    output: int  # bytes of the stage's output that stay allocated until its backward has ended
    kind: str
    first: bool
    last: bool
    lag: int
    held: bool
    every_micro_batch: bool


class PipelineStages(NamedTuple):
    """All stages in model order, and two caches that ``passes.py`` fills.

    ``peaks``: the peak bytes of a pass with their cause; ``late``: the bytes that a micro-batch keeps between B and W,
    by the first stage with equal units and by whether gradients are reduced with every micro-batch.
    """

    chunks: tuple[ModelChunk, ...]
    peaks: dict[PassKey, tuple[int, Cause]]
    late: dict[tuple[int, bool], int]


class StageCache(dict[tuple[object, ...], PipelineStages]):
    """The stages of layouts, by ``stages_key``."""


def stages_key(counts: Counts, layout: Layout) -> tuple[object, ...]:
    """Return the values of a layout that the bytes of its stages depend on."""
    return get_local_degrees(layout), counts.stage_key(layout), counts.states_key(layout)


def build_stages(counts: Counts, layout: Layout) -> PipelineStages:
    """Return the stages of a layout, which layouts of the same ``stages_key`` share."""
    cache, key = counts.caches.get_cache(StageCache), stages_key(counts, layout)
    all_stages = cache.get(key)
    if all_stages is None:
        stages, units = counts.stage_runs(layout), dict[UnitKey, RunMemory]()
        for run in chain(*stages):
            if _unit_key(run) not in units:
                units[_unit_key(run)] = _run_memory(counts, layout, run)
        kinds = [tuple((*_unit_key(run), run.times) for run in runs) for runs in stages]
        chunks: list[ModelChunk] = []
        for index, (runs, kind) in enumerate(zip(stages, kinds, strict=True)):
            first_equal = kinds.index(kind)
            equal = (
                _move_to_layers(chunks[first_equal], runs)
                if first_equal < index
                else _chunk(counts, layout, runs, first_equal, units)
            )
            chunks.append(equal)
        all_stages = cache[key] = PipelineStages(tuple(chunks), {}, {})
    return all_stages


def _unit_key(run: UnitGroup) -> UnitKey:
    """Return the values that the live bytes of a unit of ``run`` depend on, under one layout."""
    return run.name, run.recomputed


def describe(cause: Cause, chunk: ModelChunk | None = None) -> str:
    """Return a cause as text, e.g. ``block 3 backward mlp.act``."""
    if len(cause) == 1 or chunk is None:
        return str(cause[0])
    group_index, unit_index, *words = cause
    return " ".join((chunk.runs[group_index].run.unit_name(unit_index), *words)).strip()


def _chunk(
    counts: Counts,
    layout: Layout,
    runs: tuple[UnitGroup, ...],
    first_equal_stage: int,
    units: Mapping[UnitKey, RunMemory],
) -> ModelChunk:
    """Return a stage that consists of ``units``.

    Of equal groups that recur (every second layer recomputed) only the first and last can be the peak.
    """
    kinds = [(*_unit_key(run), run.times) for run in runs]
    ends = {kinds.index(kind) for kind in kinds} | {len(kinds) - 1 - kinds[::-1].index(kind) for kind in kinds}
    groups = [units[_unit_key(run)]._replace(run=run, noted=index in ends) for index, run in enumerate(runs)]
    total_states = UnitStates()
    for group in groups:
        total_states += UnitStates._make(group.run.times * size for size in group.state)
    return ModelChunk(
        runs=tuple(groups),
        states=total_states,
        # and the scalars on which backward is called: the losses, or a stand-in for the stage's output
        kept=sum(group.run.times * group.later.kept_bytes for group in groups)
        + (
            4 * (1 + counts.model.mtp_depth)
            if runs[-1].name == "head"
            else counts.get_local(get_local_degrees(layout)).width
        ),
        first_equal_stage=first_equal_stage,
        shapes=frozenset(shape for run in runs for shape in counts.shapes(get_local_degrees(layout), run.name)),
    )


def _move_to_layers(chunk: ModelChunk, runs: tuple[UnitGroup, ...]) -> ModelChunk:
    """Return an equal stage of other layers."""
    return chunk._replace(runs=tuple(unit._replace(run=run) for unit, run in zip(chunk.runs, runs, strict=True)))


def _run_memory(counts: Counts, layout: Layout, run: UnitGroup) -> RunMemory:
    """Return the live bytes and states of one unit of a group."""
    part, state = run_part(get_local_degrees(layout), run), counts.states(layout, run.name)
    parts, dense_sums = counts.parts(layout, run.name), state.sums
    expert_sums = parts[-1].sums if counts.count_moe_layers(run.name) else 0
    if counts.adds_table_gradient(layout):
        # The head makes the first gradient of a tied table, so it allocates the embedding's sums.
        table_sums = (
            counts.states(layout, "embed").sums if counts.model.tied_embeddings else 0
        )  # else the last of the head's
        dense_sums += {"head": table_sums, "embed": -dense_sums}.get(str(run.name), 0)
    lookup_sums = _lookup_sum_bytes(counts, layout, run, parts)
    tied = counts.model.tied_embeddings
    if tied or not counts.adds_table_gradient(layout):
        dense_sums -= lookup_sums
    allocated_sums = GradientSums(
        dense_sums - expert_sums, expert_sums, table=lookup_sums, tied=tied and lookup_sums > 0
    )
    profiles = counts.profile(part, run.name, allocated_sums), counts.profile(part, run.name)
    logits = counts.logits(part) if run.name == "head" else 0
    return RunMemory(run, part, *profiles, state, parts, allocated_sums, logits)


def _lookup_sum_bytes(counts: Counts, layout: Layout, run: UnitGroup, parts: tuple[UnitStates, ...]) -> int:
    """Return the bytes of the sums of a table whose first gradient is made by a head with MTP modules."""
    if run.name != "head" or not counts.model.mtp_depth:
        return 0
    if counts.adds_table_gradient(layout):
        return counts.states(layout, "embed").sums
    table_parts = parts[1:-1] if counts.count_moe_layers(run.name) else parts[1:]
    return sum(part.sums for part in table_parts)


# Weights that stay gathered


def held_bytes(units: Iterable[RunMemory], *, but: str = "") -> int:
    """Return the bytes of a stage's weights that may stay gathered from an F to a B.

    The embedding and ``but`` are not counted.
    """
    return sum(unit.run.times * unit.state.gathered for unit in units if unit.run.name not in ("embed", but))


def head_bytes(units: Sequence[RunMemory], *, table: int) -> int:
    """Return the bytes of the head's gathered weights and of a tied ``table``; 0 in a stage without the head."""
    return units[-1].state.gathered + table if units[-1].run.name == "head" else 0


# Inputs and outputs of stages


class StageBuffers(NamedTuple):
    """The buffers of PyTorch's pipelines for a stage.

    They are its output until its backward has ended, and receive buffers of inputs and gradients for each micro-batch.
    ``stream``: bytes of one input or output.

    Source: pytorch/pytorch@v2.13.0:torch/distributed/pipelining/stage.py, fwd_cache, args_recv_info and grad_recv_info.
    """

    stages: int
    stream: int
    received: bool  # each micro-batch has its own receive buffer
    outputs: bool
    graph: bool  # the autograd graph is kept between B and W
    turn: int  # the stage of a V whose next is on the same rank; -1: none

    def output(self, stage: int) -> int:
        """Return the bytes of a stage's output if it is kept until its backward has ended.

        It is 0 for the last stage, and if the output is the input of the next stage on the same rank.
        """
        return self.stream * (self.outputs and stage < self.stages - 1 and stage != self.turn)

    def graph_bytes(self, stage: int) -> int:
        """Return the bytes kept between B and W that count as buffers.

        They are the stage's input and its output's gradient.
        """
        return self.stream * (self.graph and self.received) * ((stage > 0) + (stage < self.stages - 1))


def stage_buffers(layout: Layout, job: Job, *, stages: int, stream: int) -> StageBuffers:
    """Return the buffers that the job's software keeps for the ``stages`` of a layout."""
    stack, piped = job.stack, layout.pp > 1
    return StageBuffers(
        stages,
        stream,
        received=piped and stack.recv_buffers == "preallocated",
        outputs=piped and stack.stage_outputs == "retained",
        graph=stack.deferred_wgrad == "graph",
        turn=stages // 2 - 1 if layout.pipeline.places_v else -1,
    )


# What is allocated throughout a step in addition to the states


def inputs_bytes(model: Model, job: Job, *, layout: Layout) -> int:
    """Return the bytes of a step's token ids and targets (``Job.row_tokens``) and of the position tables."""
    in_fp32 = job.precision.compute in ("fp32", "tf32") or job.precision.autocasts
    tables_bytes = 2 * sum(model.table_dims) * (job.sequence // layout.cp) * (4 if in_fp32 else 2)
    sequences = layout.micro_batches(job) * layout.mbs
    log_probs = 4 * sequences if job.objective == "dpo" else 0  # of the reference
    return 8 * sequences * job.row_tokens(model.mtp_depth) + tables_bytes + log_probs


def scale_index_bytes(counts: Counts, layout: Layout, *, stages: Collection[int]) -> int:
    """Return the bytes kept to gather the matrices of ``stages`` in fp8, on the rank with the largest shards.

    For each of its rows it keeps the index of its block of scales (int64), and fp32 scales if weights are held in fp8.
    """
    recipe, total_bytes = counts.job.precision, 0
    if recipe.gathers != "fp8" or counts.job.stack.name != "fivefold":
        return 0
    for run, times in (work for stage in stages for work in counts.stage_work(layout)[stage]):
        for unit, shards, _ in counts.local_parts(layout, run.name):
            if shards > 1 or recipe.holds_casts:
                matrices = [weight for weight in unit.weights if is_gemm_weight(weight)]
                rows = sum(shard_numel(weight, shards=shards) // weight.shape[-1] for weight in matrices)
                scales = sum(count_scales(weight, recipe) for weight in matrices) if recipe.holds_casts else 0
                total_bytes += times * (8 * rows + 4 * scales)
    return total_bytes


def spare_gradients_bytes(job: Job, chunks: Collection[ModelChunk], *, layout: Layout) -> int:
    """Return the bytes of a rank's unused gradients.

    They are a placeholder per weight shape, buckets that hold every gradient again, or ZeRO-3's bucket next to its
    shards.
    """
    recipe = job.precision
    if job.stack.reduce_bucket and not policy(layout, job).weights_stay:
        return job.stack.reduce_bucket * recipe.summed_bytes
    if job.stack.wgrad_accumulation == "fused_dummy":
        shapes = frozenset[tuple[int, int]]().union(*(chunk.shapes for chunk in chunks))
        return sum(rows * columns for rows, columns in shapes) * recipe.gradients_bytes
    if job.stack.wgrad_accumulation in ("deferred_buckets", "ddp_buckets"):
        return sum(chunk.states.sums for chunk in chunks) * recipe.gradients_bytes // recipe.summed_bytes
    return 0

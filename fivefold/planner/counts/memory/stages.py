"""The stages of a pipeline in bytes: each a list of groups of equal units, with their live bytes and states.

Input: the layers of a stage, the degrees of a rank, and the job. Output: for each group its profile (what a unit keeps
and needs), its states and its buffers, and what the rank keeps for the full step. They are computed once per model and
job, because ranks, schedules and mesh orders share them. ``passes/`` simulates a pass through the groups.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from fivefold.job import Job
from fivefold.layout.sharding import get_policy, shard_numel
from fivefold.layout.spec import Layout
from fivefold.layout.stages import find_first_backward_stage, list_stage_layers
from fivefold.model.spec import Model
from fivefold.model.weight import is_gemm_weight
from fivefold.planner.counts.counts import Counts, Name, UnitGroup, get_group_degrees
from fivefold.planner.counts.ddp_buckets import coalesces_gathers
from fivefold.planner.counts.memory.liveness import GradientSums, UnitProfile
from fivefold.planner.counts.memory.states import UnitStates, count_scales
from fivefold.planner.counts.operations.local_shapes import LocalDegrees, get_local_degrees, has_fp32_stream

UnitKey = tuple[Name, bool]  # name of a unit, True if it is recomputed
Cause = tuple[Any, ...]  # (index of the group, of the unit in it, phase, operation), or one word


class UnitGroupMemory(NamedTuple):
    """A group of equal units with the live bytes and states of one unit.

    ``later_profile``: of a pass whose gradient sums were allocated before; ``first_sums``: those that the first pass
    allocates. ``states``: bytes of one unit; ``parts``: the same by what is gathered separately (dense, experts).
    """

    group: UnitGroup
    degrees: LocalDegrees
    later_profile: UnitProfile
    states: UnitStates
    parts: tuple[UnitStates, ...]
    first_sums: GradientSums
    logits_bytes: int
    can_be_peak: bool = True  # False: none of its moments can be the peak


class ModelChunk(NamedTuple):
    """One stage, in bytes.

    ``states``: of all its units; ``kept_bytes``: activations of one micro-batch until its backward;
    ``first_equal_stage``: index of the first stage with equal units.
    """

    groups: tuple[UnitGroupMemory, ...]
    states: UnitStates
    kept_bytes: int
    first_equal_stage: int
    fused_wgrad_shapes: frozenset[tuple[int, int]]  # of weights with fused wgrad accumulation
    held_input_bytes: int  # its input if no operation keeps it, which the pipeline then holds


class PassKey(NamedTuple):
    """The values that the peak of a pass through a stage depends on, besides the stages themselves."""

    first_equal_stage: int  # the first stage with equal units
    output_bytes: int  # bytes of the stage's output that stay allocated until its backward has ended
    kind: str
    first: bool
    last: bool
    pending_bytes: int
    is_gathered: bool
    every_micro_batch: bool


class PipelineStages(NamedTuple):
    """All stages in model order, and two caches that ``passes/`` fills.

    ``peaks``: the peak bytes of a pass with their cause; ``deferred_bytes``: the bytes that a micro-batch keeps between
    B and W, by the first stage with equal units and by whether gradients are reduced with every micro-batch.
    """

    chunks: tuple[ModelChunk, ...]
    peaks: dict[PassKey, tuple[int, Cause]]
    deferred_bytes: dict[tuple[int, bool], int]


class StageCache(dict[tuple[object, ...], PipelineStages]):
    """The stages of layouts, by ``make_stages_key``."""


def make_stages_key(counts: Counts, layout: Layout) -> tuple[object, ...]:
    """Return the values of a layout that the bytes of its stages depend on."""
    return get_local_degrees(layout), counts.make_stage_key(layout), counts.states_key(layout)


def build_stages(counts: Counts, layout: Layout) -> PipelineStages:
    """Return the stages of a layout, which layouts of the same ``make_stages_key`` share."""
    cache = counts.caches.get_cache(StageCache)
    key = make_stages_key(counts, layout)
    all_stages = cache.get(key)
    if all_stages is None:
        stages = counts.list_stage_groups(layout)
        units = dict[UnitKey, UnitGroupMemory]()
        for run in chain(*stages):
            if _build_unit_key(run) not in units:
                units[_build_unit_key(run)] = _count_group_memory(counts, layout, run)
        kinds = [tuple((*_build_unit_key(run), run.times) for run in runs) for runs in stages]
        chunks: list[ModelChunk] = []
        for index, (runs, kind) in enumerate(zip(stages, kinds, strict=True)):
            first_equal = kinds.index(kind)
            equal = (
                _replace_groups(chunks[first_equal], runs)
                if first_equal < index
                else _build_chunk(counts, layout, runs, first_equal, units)
            )
            chunks.append(equal)
        all_stages = cache[key] = PipelineStages(tuple(chunks), {}, {})
    return all_stages


def _build_unit_key(group: UnitGroup) -> UnitKey:
    """Return the values that the live bytes of a unit of ``group`` depend on, under one layout."""
    return group.name, group.recomputed


def describe(cause: Cause, chunk: ModelChunk | None = None) -> str:
    """Return a cause as text, e.g. ``block 3 backward mlp.act``."""
    if len(cause) == 1 or chunk is None:
        return str(cause[0])
    group_index, unit_index, *words = cause
    return " ".join((chunk.groups[group_index].group.name_unit(unit_index), *words)).strip()


def _build_chunk(
    counts: Counts,
    layout: Layout,
    runs: tuple[UnitGroup, ...],
    first_equal_stage: int,
    units: Mapping[UnitKey, UnitGroupMemory],
) -> ModelChunk:
    """Return a stage that consists of ``units``; without a trained weight in it or below, it keeps nothing.

    Of equal groups that recur between equal ones (every second layer recomputed) only the first and last can be the
    peak: what a neighbor leaves allocated, or gathers ahead, is the same, and the rest grows from one to the next.
    """
    kinds = [(*_build_unit_key(run), run.times) for run in runs]
    contexts = [*zip((None, *kinds[:-1]), kinds, (*kinds[1:], None), strict=True)]
    last = {context: index for index, context in enumerate(contexts)}
    first = {context: index for index, context in reversed([*enumerate(contexts)])}
    ends = {*first.values(), *last.values()}
    groups = [
        units[_build_unit_key(run)]._replace(group=run, can_be_peak=index in ends) for index, run in enumerate(runs)
    ]
    total_states = UnitStates()
    for group in groups:
        total_states += UnitStates._make(group.group.times * size for size in group.states)
    local = counts.get_local(get_local_degrees(layout))
    first_backward = find_first_backward_stage(counts.model, layout, counts.job)
    is_held = first_equal_stage > 0 and not counts.keeps_input(groups[0].degrees, runs[0].name)
    held_input_bytes = local.entry_bytes * is_held
    has_backward = first_equal_stage >= first_backward
    return ModelChunk(
        groups=tuple(groups),
        states=total_states,
        # and the scalars on which backward is called: the losses, or a stand-in for the stage's output
        kept_bytes=has_backward
        * (
            sum(group.group.times * group.later_profile.kept_bytes for group in groups)
            + (4 * (counts.job.loss_sums + counts.model.mtp_depth) if runs[-1].name == "head" else local.width)
            + held_input_bytes * (first_equal_stage > first_backward)
        ),
        first_equal_stage=first_equal_stage,
        fused_wgrad_shapes=frozenset(
            shape for run in runs for shape in counts.fused_wgrad_shapes(get_local_degrees(layout), run.name)
        ),
        held_input_bytes=held_input_bytes,
    )


def _replace_groups(chunk: ModelChunk, runs: tuple[UnitGroup, ...]) -> ModelChunk:
    """Return the same stage with the groups of other layers, which are equal in memory."""
    return chunk._replace(groups=tuple(unit._replace(group=run) for unit, run in zip(chunk.groups, runs, strict=True)))


def _count_group_memory(counts: Counts, layout: Layout, group: UnitGroup) -> UnitGroupMemory:
    """Return the live bytes and states of one unit of a group."""
    degrees = get_group_degrees(get_local_degrees(layout), group)
    gathers_by_weight = coalesces_gathers(counts, layout) and not get_policy(layout, counts.job).weights_stay
    if gathers_by_weight and counts.job.freezes_text:  # DeepSpeed@0.19.8:deepspeed/runtime/zero/linear.py
        degrees = degrees._replace(keeps_linear_inputs=True)
    states = counts.states(layout, group.name)
    parts, dense_sums = counts.parts(layout, group.name), states.sums
    expert_sums = parts[-1].sums if counts.count_moe_layers(group.name) else 0
    if counts.adds_table_gradient(layout):
        # The head makes the first gradient of a tied table, so it allocates the embedding's sums.
        table_sums = (
            counts.count_table_states(layout).sums if counts.model.tied_embeddings else 0
        )  # else the last of the head's
        dense_sums += {"head": table_sums, "embed": -counts.count_table_states(layout).sums}.get(str(group.name), 0)
    lookup_sums = _lookup_sum_bytes(counts, layout, group, parts)
    tied = counts.model.tied_embeddings
    if tied or not counts.adds_table_gradient(layout):
        dense_sums -= lookup_sums
    allocated_sums = GradientSums(
        dense_sums - expert_sums, expert_sums, table=lookup_sums, tied=tied and lookup_sums > 0
    )
    later_profile = counts.profile(degrees, group.name)
    logits = counts.logits(degrees) if group.name == "head" else 0
    return UnitGroupMemory(group, degrees, later_profile, states, parts, allocated_sums, logits)


def _lookup_sum_bytes(counts: Counts, layout: Layout, group: UnitGroup, parts: tuple[UnitStates, ...]) -> int:
    """Return the bytes of the sums of a table whose first gradient is made by a head with MTP modules."""
    if group.name != "head" or not counts.model.mtp_depth:
        return 0
    if counts.adds_table_gradient(layout):
        return counts.count_table_states(layout).sums
    table_parts = parts[1:-1] if counts.count_moe_layers(group.name) else parts[1:]
    return sum(part.sums for part in table_parts)


# Weights that stay gathered


def count_gathered_stage_bytes(units: Iterable[UnitGroupMemory], *, embedding: bool) -> int:
    """Return the bytes of a stage's weights that stay gathered from an F to a B; ``embedding``: its weights too."""
    return sum(unit.group.times * unit.states.gathered for unit in units if embedding or unit.group.name != "embed")


def count_gathered_head_bytes(units: Sequence[UnitGroupMemory], *, table: int) -> int:
    """Return the bytes of the head's gathered weights and of a tied ``table``; 0 in a stage without the head."""
    return units[-1].states.gathered + table if units[-1].group.name == "head" else 0


# Inputs and outputs of stages


class StageBuffers(NamedTuple):
    """The buffers of PyTorch's pipelines for a stage.

    They are its output until its backward has ended, and receive buffers of inputs and gradients for each micro-batch.
    ``stream_bytes``: bytes of one input or output.

    Source: pytorch/pytorch@v2.13.0:torch/distributed/pipelining/stage.py, fwd_cache, args_recv_info and grad_recv_info.
    """

    stages: int
    stream_bytes: int
    has_recv_buffers: bool  # each micro-batch has its own receive buffer
    retains_outputs: bool
    retains_graph: bool  # the autograd graph is kept between B and W
    turning_stage: int  # the stage of a V whose next is on the same rank; -1: none

    def output_bytes(self, stage: int) -> int:
        """Return the bytes of a stage's output if it is kept until its backward has ended.

        It is 0 for the last stage, and if the output is the input of the next stage on the same rank.
        """
        return self.stream_bytes * (self.retains_outputs and stage < self.stages - 1 and stage != self.turning_stage)

    def graph_bytes(self, stage: int) -> int:
        """Return the bytes kept between B and W that count as buffers.

        They are the stage's input and its output's gradient.
        """
        return (
            self.stream_bytes
            * (self.retains_graph and self.has_recv_buffers)
            * ((stage > 0) + (stage < self.stages - 1))
        )


def count_stage_buffers(layout: Layout, job: Job, *, stages: int, stream_bytes: int) -> StageBuffers:
    """Return the buffers that the job's software keeps for the ``stages`` of a layout."""
    stack, has_pipeline = job.stack, layout.pp > 1
    return StageBuffers(
        stages,
        stream_bytes,
        has_recv_buffers=has_pipeline and stack.recv_buffers == "preallocated",
        retains_outputs=has_pipeline and stack.stage_outputs == "retained",
        retains_graph=stack.deferred_wgrad == "graph",
        turning_stage=stages // 2 - 1 if layout.pipeline.is_v_shaped else -1,
    )


# What is allocated throughout a step in addition to the states


def count_input_bytes(model: Model, job: Job, *, layout: Layout) -> int:
    """Return the bytes of a step's token ids and targets (``Job.row_tokens``) and of the position tables."""
    in_fp32 = job.activation_bytes == 4 or has_fp32_stream(model, job)
    tables_bytes = 2 * sum(model.table_dims) * (job.sequence // layout.cp) * (4 if in_fp32 else 2)
    sequences = layout.micro_batches(job) * layout.mbs
    log_probs = 4 * sequences if job.objective == "dpo" else 0  # of the reference
    return 8 * sequences * job.row_tokens(model.mtp_depth) + tables_bytes + log_probs


def count_expert_table_bytes(model: Model, layout: Layout, *, stages: Collection[int]) -> int:
    """Return the bytes of the tables of token ids (int32) that name the experts of layers in ``stages``."""
    moe = model.moe
    if moe is None or not moe.hashed_layers:
        return 0
    layers = list_stage_layers(model, layout)
    hashed = sum(model.hashes_experts(layer) for stage in stages for layer in layers[stage])
    return 4 * hashed * model.vocab * moe.topk


def scale_index_bytes(counts: Counts, layout: Layout, *, stages: Collection[int]) -> int:
    """Return the bytes kept to gather the matrices of ``stages`` in fp8, on the rank with the largest shards.

    For each of its rows it keeps the index of its block of scales (int64), and fp32 scales if weights are held in fp8.
    """
    recipe, total_bytes = counts.job.precision, 0
    if recipe.gathers != "fp8" or not counts.job.stack.is_own_trainer:
        return 0
    for run, times in (work for stage in stages for work in counts.stage_work(layout)[stage]):
        for unit, shards, _ in counts.list_local_parts(layout, run.name):
            if shards > 1 or recipe.holds_casts:
                matrices = [weight for weight in unit.weights if is_gemm_weight(weight)]
                rows = sum(shard_numel(weight, shards=shards) // weight.shape[-1] for weight in matrices)
                scales = sum(count_scales(weight, recipe) for weight in matrices) if recipe.holds_casts else 0
                total_bytes += times * (8 * rows + 4 * scales)
    return total_bytes


def count_spare_gradient_bytes(job: Job, chunks: Collection[ModelChunk], *, layout: Layout) -> int:
    """Return the bytes of a rank's unused gradients.

    They are a placeholder per weight shape, buckets that hold every gradient again, or ZeRO-3's bucket next to its
    shards.
    """
    recipe = job.precision
    if job.stack.reduce_bucket and not get_policy(layout, job).weights_stay:
        return job.stack.reduce_bucket * job.bucket_bytes
    if job.stack.wgrad_accumulation == "fused_dummy":
        shapes = frozenset[tuple[int, int]]().union(*(chunk.fused_wgrad_shapes for chunk in chunks))
        return sum(rows * columns for rows, columns in shapes) * recipe.gradients_bytes
    if job.stack.wgrad_accumulation in ("deferred_buckets", "ddp_buckets"):
        return sum(chunk.states.sums for chunk in chunks) * recipe.gradients_bytes // recipe.summed_bytes
    return 0

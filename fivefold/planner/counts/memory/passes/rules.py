"""What decides the moments of a pass: properties of a layout, its model and its job."""

from __future__ import annotations

from typing import NamedTuple

from fivefold.bounded_types import COUNTED_BYTES
from fivefold.layout.local_weight import pad_vocab
from fivefold.layout.sharding import (
    gathers_for_backward,
    get_policy,
    holds_embedding,
    is_trained,
    joins_ends,
    needs_backward_gather,
    regathers_vision,
    shard_weight,
)
from fivefold.layout.spec import Layout
from fivefold.layout.stages import find_first_backward_stage
from fivefold.planner.counts.counts import Counts, Name, UnitGroup
from fivefold.planner.counts.memory.liveness import NO_SUMS, GradientSums, SplitUnitProfile
from fivefold.planner.counts.memory.reductions import Reductions, plan_reductions
from fivefold.planner.counts.memory.stages import PipelineStages, StageBuffers, UnitGroupMemory, count_stage_buffers
from fivefold.planner.counts.memory.states import count_reduced_width
from fivefold.planner.counts.operations.local_shapes import get_local_degrees
from fivefold.planner.counts.parameter_prefetch import PrefetchedGathers
from fivefold.units import ceil_div


class CoalescedMessages(NamedTuple):
    """The bytes held by messages that join weights of several units; zero and False if messages are per unit."""

    bucket_bytes: int  # bytes of gradients that are reduced at once, as they are accumulated
    copy_width: tuple[int, int]  # bytes of an element in copies of the bucket while it is reduced, and as accumulated
    gathers_by_weight: bool  # weights are gathered one by one, in the order of their use
    allocates_shards: bool  # ZeRO-2: this rank's gradients are allocated from the first reduction on
    gathers_by_stage: dict[int, PrefetchedGathers | None]  # by stage, filled by ``find_prefetched_gathers``
    returned_bytes: dict[Name, int]  # by unit: a gradient that comes back from host memory, if gradients are there

    @property
    def is_uneven(self) -> bool:
        """Return True if live bytes do not grow evenly over equal units."""
        return self.gathers_by_weight or self.bucket_bytes > 0


class PassRules(NamedTuple):
    """The properties of a layout, its model and its job that decide the moments of a pass."""

    counts: Counts
    layout: Layout
    stages: PipelineStages
    reductions: Reductions
    buffers: StageBuffers
    coalesced: CoalescedMessages
    gathers_weights: bool  # weights are gathered for each pass
    keeps_gathered: bool  # weights gathered for an F stay gathered until its B
    keeps_embedding: bool  # so do those of the embedding, whose backward does not need them
    prefetches: bool  # the next unit's weights are gathered while a unit computes
    retains_gather_output: bool  # the gather's output is kept next to the weights while the next unit's are gathered
    joins_ends: bool  # embedding and head are one unit
    regathers_embedding: bool  # the embedding is gathered for its backward
    regathers_vision: bool  # the vision tower, part of the embedding's unit, is gathered for its backward
    retains_graph: bool  # the autograd graph stays between B and W
    keeps_logits: bool  # the caller of the loss keeps the logits until the backward has ended
    offloads_activations: bool  # activations
    stream_bytes: int  # bytes of a stage's input
    token_bytes: int  # bytes of ids and targets, which are copied under context parallelism
    first_equal_stages: tuple[int, ...]  # for each stage, the first one that is equal in everything
    first_backward: int  # the first stage with a trained weight

    @property
    def makes_all(self) -> bool:
        """Return True if W makes all gradients of a unit that defers any."""
        return self.reductions.every_micro_batch or self.retains_graph


def pass_rules(counts: Counts, layout: Layout, stages: PipelineStages) -> PassRules:
    """Return the rules of the passes of a layout with the stages ``stages``."""
    job = counts.job
    stack = counts.job.stack
    degrees = get_local_degrees(layout)
    local = counts.get_local(degrees)
    zero_policy = get_policy(layout, job)
    gathers_weights = not zero_policy.weights_stay
    keeps_gathered = gathers_weights and not gathers_for_backward(layout, job)
    reductions = plan_reductions(counts, layout)
    buffers = count_stage_buffers(layout, job, stages=len(stages.chunks), stream_bytes=local.entry_bytes)
    coalesced = _find_coalesced(counts, layout)
    retains_gather_output = stack.comm_buffers == "retained" and layout.shards > 1 and not coalesced.gathers_by_weight
    first_stages: dict[tuple[int, int], int] = {}
    equality_keys = [
        (chunk.first_equal_stage, buffers.output_bytes(stage)) for stage, chunk in enumerate(stages.chunks)
    ]
    return PassRules(
        counts=counts,
        layout=layout,
        stages=stages,
        reductions=reductions,
        buffers=buffers,
        coalesced=coalesced,
        gathers_weights=gathers_weights,
        keeps_gathered=keeps_gathered,
        keeps_embedding=keeps_gathered
        and holds_embedding(job)
        and not joins_ends(layout, job)
        and not reductions.table.is_local,
        prefetches="dp" in stack.overlap
        and stack.param_all_gather == "overlapped"
        and not (retains_gather_output or zero_policy.runs_alone),
        retains_gather_output=retains_gather_output,
        joins_ends=joins_ends(layout, job),
        regathers_embedding=needs_backward_gather("embed", layout, job)
        and (retains_gather_output or stack.backward_all_gather == "needed"),
        regathers_vision=regathers_vision(layout, job),
        retains_graph=stack.deferred_wgrad == "graph",
        keeps_logits=stack.loss_facts.retains_logits,
        offloads_activations="activations" in layout.list_offloaded(job),
        stream_bytes=local.entry_bytes,
        token_bytes=16 * local.rows if layout.cp > 1 else 0,
        first_equal_stages=tuple(first_stages.setdefault(key, stage) for stage, key in enumerate(equality_keys)),
        first_backward=find_first_backward_stage(counts.model, layout, job),
    )


def split_profile(rules: PassRules, unit: UnitGroupMemory, sums: GradientSums = NO_SUMS) -> SplitUnitProfile:
    """Return the profile of a unit whose backward leaves gradients of weights to a W."""
    return rules.counts.profile_deferred_wgrad(
        unit.degrees, unit.group.name, sums, waiting=rules.reductions.get_waiting(unit)
    )


def is_kept_unit(rules: PassRules, group: UnitGroup) -> bool:
    """Return True if ``keeps_gathered`` keeps a unit's weights: of blocks, and of the embedding if it has hooks.

    FSDP2 frees them in its post-backward hook. That of the embedding, whose input has no gradient, runs when the
    backward has ended.

    Source: pytorch/pytorch@v2.13.0:torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, reshard and post_backward.
    """
    return group.name not in ("embed", "head") or (group.name == "embed" and rules.keeps_embedding)


def _is_block(rules: PassRules, group: UnitGroup) -> bool:
    """Return True if a unit's gathered weights are freed after its forward, or kept for its backward if it has one."""
    return rules.gathers_weights and group.name not in ("embed", "head") and rules.counts.has_backward(group.name)


def is_regathered(rules: PassRules, group: UnitGroup) -> bool:
    """Return True if a unit is gathered for its backward."""
    return _is_block(rules, group) or (rules.regathers_embedding and group.name == "embed")


FP64_BYTES = 8
NORM_ELEMENTS = 250_000_000  # of a gradient whose norm ZeRO-3 computes at once


def _find_coalesced(counts: Counts, layout: Layout) -> CoalescedMessages:
    """Return the messages that the job's software joins under a layout."""
    stack, keeps = counts.job.stack, get_policy(layout, counts.job)
    has_buckets = layout.shards > 1 or keeps.runs_alone
    summed, width = counts.job.precision.summed_bytes, counts.job.count_reduce_bytes(counts.job.precision)
    bucket = stack.reduce_bucket * summed if has_buckets else 0
    flat = counts.job.bucket_bytes  # a flat copy, and another in the dtype of the message
    copy_width = flat + width * (width != flat), summed
    by_weights = stack.zero3_gather == "weights" and not keeps.weights_stay
    allocates_shards = bucket > 0 and keeps.weights_stay and not keeps.gradients_stay
    returned_bytes = _count_returned_bytes(counts, layout) if keeps.host_gradients else {}
    allocates_shards &= not keeps.host_gradients
    return CoalescedMessages(bucket, copy_width, by_weights, allocates_shards, {}, returned_bytes)


def _count_returned_bytes(counts: Counts, layout: Layout) -> dict[Name, int]:
    """Return for each unit the bytes on the device while the norm of its largest gradient's shard is computed.

    It is that of a copy in fp64, larger than the copy in fp32 that leaves then. ZeRO-3 has the shard once more, as it
    came back from host memory, and copies part after part (deepspeed/runtime/zero/stage3.py, partition_grads and
    _constant_buffered_norm2; stage_1_and_2.py, set_norm_for_param_grad_in_gpu).
    """
    returns = get_policy(layout, counts.job).host_gradients == "shards"
    width = count_reduced_width(layout, counts.job) if returns else 0
    most = NORM_ELEMENTS if returns else COUNTED_BYTES
    vocab = pad_vocab(counts.model, counts.job, tp=layout.tp)
    names = dict.fromkeys(run.name for stage in counts.list_stage_groups(layout) for run in stage)
    shard_numels = {
        name: [
            ceil_div(shard_weight(weight, model=counts.model, layout=layout, vocab=vocab).numel, layout.shards)
            for weight in counts.weights(layout, name)
            if is_trained(weight, counts.job)
        ]
        for name in names
    }
    return {
        name: max((width * numel + FP64_BYTES * min(numel, most) for numel in numels), default=0)
        for name, numels in shard_numels.items()
    }

"""Bytes of weights, gradients and optimizer states of one unit (embedding, block, head) on one rank.

    states = weights + gradients + optimizer, each unsharded or 1/S by the ZeRO stage (docs/notation.md §2)

Dense weights are sharded over the shard group of dp·cp, experts over the ranks that hold the same experts.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from fivefold.job import SCALED_ELEMENTS, Job, Recipe
from fivefold.layout.local_weight import pad_vocab
from fivefold.layout.sharding import (
    FsdpUnit,
    count_frozen_bytes,
    count_padded_numel,
    get_policy,
    select_trained,
    shard_numel,
    shard_weight,
    trains_saved_modules,
)
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.model.weight import is_gemm_weight
from fivefold.model.weights import Weight
from fivefold.optimizers.cost import find_cost
from fivefold.units import ceil_div
from fivefold.update import is_quantized


class UnitStates(NamedTuple):
    """Bytes of one unit's states on the first rank, and of the buffers of its all-gather."""

    gathered: int = 0  # gathered (unsharded) weights
    separate: int = 0  # this rank's weights or masters that are not part of the gathered ones, and DPO's reference
    sums: int = 0  # unsharded gradients
    reduced: int = 0  # the gradients that a reduction leaves on this rank
    new_shard: int = 0  # of these, what is not the buffer of the sums
    moments: int = 0
    gather_buffers: int = 0  # buffers of the all-gather: output, and input if it is a copy
    updated_numel: int = 0  # elements that this rank's optimizer updates
    offloaded: int = 0  # this rank's weights in host memory, which each gather copies to the device

    def __add__(self, other: UnitStates) -> UnitStates:  # type: ignore[override]
        return UnitStates._make(ours + theirs for ours, theirs in zip(self, other, strict=True))


def list_local_units(weights: Iterable[Weight], *, model: Model, layout: Layout, job: Job) -> tuple[FsdpUnit, ...]:
    """Return the dense and expert weights of one rank of tp, ep and etp.

    In a pipeline, the head's copy of a tied table is a unit of its own.
    """
    vocab = pad_vocab(model, job, tp=layout.tp)
    local = [shard_weight(weight, model=model, layout=layout, vocab=vocab) for weight in weights]
    experts = FsdpUnit("experts", tuple(weight for weight in local if weight.kind.startswith("expert")))
    table_weights = tuple(weight for weight in local if weight.name.startswith("embed."))
    dense_weights = tuple(
        weight for weight in local if weight not in table_weights and not weight.kind.startswith("expert")
    )
    return (
        *(FsdpUnit("dense", unit_weights) for unit_weights in (dense_weights, table_weights) if unit_weights),
        *([experts] if experts.weights else ()),
    )


def shard_unit(unit: FsdpUnit, layout: Layout) -> tuple[FsdpUnit, int, int]:
    """Return a unit with its number of shards and of replicas of the shard group."""
    if unit.name == "experts":
        return unit, layout.expert_shards, layout.expert_replicas // layout.expert_shards
    return unit, layout.shards, layout.dp * layout.cp // layout.shards


def count_part_states(
    unit: FsdpUnit, *, unsharded: Iterable[Weight], shards: int, layout: Layout, job: Job
) -> UnitStates:
    """Return the states of one part (dense, experts) of a unit on the rank with the largest shards.

    ``unsharded``: the unit's unsharded weights. Of ``layout`` only the ZeRO stage matters, whether it shards, whether
    it has pipeline stages or several micro-batches, and what it offloads.
    """
    if trains_saved_modules(unit, job):
        job = job.replace(precision=job.saved_precision)
    recipe, policy, offloaded = job.precision, get_policy(layout, job), layout.list_offloaded(job)
    # frozen weights are sharded where gathered weights are freed, and have no gradients or states
    keeps_copy = shards > 1 and layout.zero == 2 and job.stack.zero2_shards == "separate"
    shards_frozen = keeps_copy or not policy.weights_stay
    full_numels = {weight.name: weight.numel for weight in unsharded}
    frozen = count_frozen_bytes(unit, shards=shards if shards_frozen else 1, job=job, full_numels=full_numels)
    all_weights, unit = unit.weights, select_trained(unit, job)
    padded = count_padded_numel(unit, shards=shards)
    shard_elements = padded // shards
    weights_bytes = count_kept_gathered_bytes(unit, shards=shards, recipe=recipe)
    # experts without replicas stay gathered
    stays_gathered = shards == 1 and not policy.weights_stay and not policy.runs_alone
    gathers_fp8 = recipe.gathers == "fp8" and any(map(is_gemm_weight, unit.weights))
    is_gathered = policy.weights_stay or stays_gathered
    has_own_shard = gathers_fp8 or keeps_copy or not recipe.sends_masters or not is_gathered
    # the shard on the device then has the dtype of the message
    is_rounded = "optimizer" in offloaded and not policy.weights_stay and job.stack.zero3_gather == "units"
    gather_buffers = 0
    if frozen.gathered and shards_frozen and shards > 1:  # shards of several formats are copied to one input
        gather_buffers = frozen.gathered + weights_bytes
        gather_buffers += gather_buffers // shards
    elif shards > 1 or recipe.holds_casts:
        is_copied = gathers_fp8 or not (has_own_shard and (recipe.sends_masters or is_rounded))
        gather_buffers = _gather_buffer_bytes(unit, shards=shards, recipe=recipe, copied=is_copied)
    if "parameters" in offloaded and job.stack.offloads_with_parameters:
        # this rank's shards come to the device for each gather, and gradients leave it
        offloaded_bytes = frozen.shard + shard_elements * recipe.updated_bytes
        if policy.runs_alone:  # its weights come one after another, each is cast and copied
            copied = max((weight.numel for weight in all_weights), default=0)
            is_cast = recipe.updated_bytes != recipe.high_precision_bytes
            gather_buffers = copied * (recipe.updated_bytes + is_cast * recipe.high_precision_bytes)
        else:
            gather_buffers += offloaded_bytes
        return UnitStates(
            gathered=weights_bytes + frozen.gathered,
            separate=frozen.scales,
            sums=padded * recipe.summed_bytes,
            gather_buffers=gather_buffers,
            updated_numel=shard_elements,
            offloaded=offloaded_bytes,
        )
    separate = frozen.scales + shard_elements * _count_shard_width(
        layout, job, shards=shards, has_own_shard=has_own_shard, is_gathered=is_gathered
    )
    if "parameters" not in offloaded:
        separate += weights_bytes + frozen.gathered if stays_gathered else frozen.shard * shards_frozen
    if job.copies_reference:  # of DPO: a copy of the gathered weights, or of this rank's rows
        separate += weights_bytes if is_gathered else shard_elements * recipe.weights_bytes
    shard_bytes = shard_elements * count_reduced_width(layout, job)
    reduced_bytes = padded * recipe.summed_bytes if shards == 1 and not policy.runs_alone else shard_bytes
    gradients_leave = policy.gradients_stay or bool(policy.host_gradients)
    return UnitStates(
        gathered=0 if stays_gathered or policy.computes_with_shard else weights_bytes + frozen.gathered,
        separate=separate,
        sums=padded * (count_reduced_width(layout, job) if policy.gradients_stay else recipe.summed_bytes),
        reduced=0 if gradients_leave else reduced_bytes,
        new_shard=0 if gradients_leave or shards == 1 else shard_bytes,
        moments=0 if "optimizer" in offloaded else _count_moments(unit, unsharded, shards, layout=layout, job=job),
        gather_buffers=gather_buffers,
        updated_numel=shard_elements,
        offloaded=shard_elements * recipe.high_precision_bytes + frozen.shard if "parameters" in offloaded else 0,
    )


def _count_shard_width(layout: Layout, job: Job, *, shards: int, has_own_shard: bool, is_gathered: bool) -> int:
    """Return the bytes of an element of this rank's weights or masters that are not part of the gathered weights.

    ``has_own_shard``: the shard is not; ``is_gathered``: the gathered weights stay from step to step.
    """
    recipe, stack, offloaded = job.precision, job.stack, layout.list_offloaded(job)
    if "parameters" in offloaded:  # masters stay, unless the optimizer goes too
        return 0 if "optimizer" in offloaded else recipe.updated_bytes
    if "optimizer" in offloaded:  # the shard to gather from stays on the device (DeepSpeed's offload_optimizer)
        return 0 if is_gathered else recipe.high_precision_bytes
    # DeepSpeed's ZeRO-1 and -2 update a clone of this rank's weights, in fp32 too
    # (deepspeedai/DeepSpeed@0.19.8:deepspeed/runtime/zero/stage_1_and_2.py, single_partition_of_fp32_groups)
    runs_alone = get_policy(layout, job).runs_alone
    is_cloned = stack.reduce_bucket > 0 and layout.zero in (1, 2) and (shards > 1 or runs_alone)
    # DeepSpeed's ZeRO-3 has shards next to the masters, in fp32 too: it would not clone those on its device, which it
    # compares with a name (deepspeedai/DeepSpeed@0.19.8:deepspeed/runtime/zero/stage3.py, _create_fp32_partitions)
    gathers_copies = stack.zero3_gather == "weights" and not is_gathered
    return recipe.updated_bytes * (has_own_shard or is_cloned) + recipe.high_precision_bytes * gathers_copies


def _count_moments(unit: FsdpUnit, unsharded: Iterable[Weight], shards: int, *, layout: Layout, job: Job) -> int:
    """Return the bytes of optimizer states of the largest shard."""
    quantised = frozenset(weight.name for weight in unsharded if is_quantized(weight.numel, vector=weight.is_vector))
    moments = find_cost(job.optimizer.kind).state_bytes(unit.weights, shards=shards, quantised=quantised, job=job)
    return moments - 4 * len(unit.weights) if updates_flat_tensor(layout, job) else moments


def count_sent_gradient_width(layout: Layout, job: Job) -> int:
    """Return the bytes of an element of reduced gradients that cross the link to the host after each reduction.

    DeepSpeed copies a shard to the host and back: it is summed, and its norm computed, on the device (stage3.py,
    partition_grads). Its ZeRO-2 does so to sum gradients of several micro-batches (stage_1_and_2.py,
    async_accumulate_grad_in_cpu_via_gpu); those of the last leave with the update (``count_update_link_bytes``).
    """
    if get_policy(layout, job).host_gradients == "shards" or accumulates_on_host(layout, job):
        return 2 * count_reduced_width(layout, job)
    is_sent = "parameters" in layout.list_offloaded(job) and job.stack.offloads_with_parameters
    return count_reduced_width(layout, job) if is_sent else 0


def accumulates_on_host(layout: Layout, job: Job) -> bool:
    """Tell whether DeepSpeed's ZeRO-2 sums the gradients of several micro-batches in host memory."""
    in_buckets = get_policy(layout, job).host_gradients == "buckets"
    return in_buckets and layout.zero == 2 and layout.micro_batches(job) > 1


def count_reduced_width(layout: Layout, job: Job) -> int:
    """Return the bytes of an element of the reduced gradients that a rank keeps for the optimizer."""
    return job.precision.updated_bytes if runs_reduction(layout, job) else job.precision.summed_bytes


def runs_reduction(layout: Layout, job: Job) -> bool:
    """Tell whether FSDP moves a unit's gradients to buffers in the dtype of the update, on one rank too.

    Source: pytorch/pytorch@v2.13.0:torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, foreach_reduce, whose
    only rank copies its input to the output.
    """
    return layout.zero >= 2 and job.stack.reduced_gradients == "updated"


def updates_flat_tensor(layout: Layout, job: Job) -> bool:
    """Return True if this rank's part of all weights is updated as one tensor, with one step count."""
    joins = job.stack.reduce_bucket > 0 and layout.zero > 0 and find_cost(job.optimizer.kind).updates_flat_buffer
    return joins and "optimizer" not in layout.list_offloaded(job)


def count_kept_gathered_bytes(unit: FsdpUnit, *, shards: int, recipe: Recipe) -> int:
    """Return the bytes of a unit's gathered weights as they are kept, padding included."""
    if recipe.holds_casts:
        return count_gathered_bytes(unit, shards=shards, recipe=recipe)
    return count_padded_numel(unit, shards=shards) * recipe.weights_bytes


def count_gathered_bytes(unit: FsdpUnit, *, shards: int, recipe: Recipe) -> int:
    """Return the bytes of the all-gather of a unit's weights: ``shards`` equal shards, padding included."""
    wide_bytes = recipe.high_precision_bytes
    widths = [1 if recipe.gathers == "fp8" and is_gemm_weight(weight) else wide_bytes for weight in unit.weights]
    sizes = (shard_numel(weight, shards=shards) for weight in unit.weights)
    return shards * sum(size * width for size, width in zip(sizes, widths, strict=True))


def _gather_buffer_bytes(unit: FsdpUnit, *, shards: int, recipe: Recipe, copied: bool) -> int:
    """Return the bytes of the all-gather's output and, if ``copied``, of its input.

    In fp8 each weight's rows are cast before they are copied to the input, while there is no output yet.
    """
    output_bytes = count_gathered_bytes(unit, shards=shards, recipe=recipe)
    if recipe.gathers != "fp8" or not any(map(is_gemm_weight, unit.weights)):
        return 0 if shards == 1 else output_bytes + (output_bytes // shards if copied else 0)
    sizes = [shard_numel(weight, shards=shards) for weight in unit.weights if is_gemm_weight(weight)]
    received = output_bytes if shards > 1 else 0
    return output_bytes // shards + max(received, max(sizes, default=0) * (recipe.high_precision_bytes + 1))


def count_scales(weight: Weight, recipe: Recipe) -> int:
    """Return the number of scales of a matrix that is gathered in fp8."""
    *experts, rows, columns = weight.shape
    block = SCALED_ELEMENTS.get(recipe.scaling)
    return prod(experts) * (ceil_div(rows, block) * ceil_div(columns, block) if block else 1)

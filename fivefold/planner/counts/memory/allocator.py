"""GPU memory beyond live tensors at the peak: fragmentation of PyTorch's cache, the CUDA context, NCCL's buffers.

    reserved = peak + free blocks too small to use       driver = reserved + context + buffers of each communicator

PyTorch's allocator splits the smallest free block that fits; a tensor larger than every free block gets a new segment.
Assumed: every block is split when the second largest temporary is allocated, and when the largest is, if its block was
taken (``_estimate_fragments``); so also for tensors that an update concatenates. Expandable segments avoid this.
Source: pytorch/pytorch, c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import nlargest
from typing import NamedTuple

from fivefold.job import Job
from fivefold.layout.sharding import count_frozen_bytes, get_policy, is_trained, select_trained
from fivefold.layout.spec import Layout
from fivefold.machine.spec import Machine
from fivefold.planner.counts.counts import Counts, UnitGroup, get_group_degrees
from fivefold.planner.counts.memory.peak import RankMemory, make_table
from fivefold.planner.counts.memory.stages import build_stages
from fivefold.planner.counts.operations.local_shapes import get_local_degrees
from fivefold.planner.counts.operations.op import Op
from fivefold.units import MIB, ceil_div


class AllocatorConstants(NamedTuple):
    """Constants of PyTorch's allocator, CUDA and NCCL; sources: docs/explanation/how-a-step-costs/constants.md."""

    # What nvidia-smi shows for an idle PyTorch process on an A100 (kernels loaded):
    # bigscience-workshop/bigscience@053adaf:train/tr11-176B-ml/chronicles-prequel.md.
    context_bytes: int = 1573 * MIB
    # NCCL_BUFFSIZE is 4 MiB for each channel and direction (NCCL's documentation of its environment variables); NCCL
    # takes 16 channels and more between GPUs of one node.
    communicator_bytes: int = 16 * 2 * 4 * MIB
    # Share of the fragmentation counted here that an allocator cannot avoid however little memory it has: 0.10 to 1.25
    # of it, 0.40 on average, in dry runs of eight jobs (docs/how-a-step-costs/memory-risk.md).
    unreclaimable: float = 0.5
    split_later: int = 3  # number of largest temporary tensors that ``_estimate_fragments`` considers
    bucket_elements: int = 500_000_000  # gradients that DeepSpeed reduces at once (default of reduce_bucket_size)


PUBLISHED = AllocatorConstants()


def count_driver_bytes(machine: Machine, layout: Layout) -> int:
    """Return the bytes of a rank that tensors cannot use: the CUDA context and NCCL's buffers; 0 on a CPU.

    At most half of the memory is returned, so that a GPU of a few GiB can still be planned for.
    """
    return _sum_driver_bytes(machine, count_communicators(layout))


def bound_driver_bytes(machine: Machine, world: int) -> int:
    """Return ``count_driver_bytes`` of the layout over ``world`` ranks that has the fewest communicators."""
    return _sum_driver_bytes(machine, 2 if world > 1 else 0)


def _sum_driver_bytes(machine: Machine, groups: int) -> int:
    driver_total = PUBLISHED.context_bytes + groups * PUBLISHED.communicator_bytes if machine.has_gpus else 0
    return min(driver_total, machine.chip.memory_bytes // 2)


def count_communicators(layout: Layout) -> int:
    """Return how many NCCL communicators a rank of the layout has: one for all ranks, and one for each axis."""
    return sum(degree > 1 for degree in (layout.world, layout.dp, layout.tp, layout.cp, layout.pp, layout.ep))


class AllocatorTotals(NamedTuple):
    """Bytes that PyTorch reserves and that the driver shows, on the rank with the most."""

    reserved_bytes: int
    driver_bytes: int


def estimate_allocator_totals(
    counts: Counts, layout: Layout, ranks: list[RankMemory], constants: AllocatorConstants = PUBLISHED
) -> AllocatorTotals:
    """Return reserved and driver bytes of a layout; ``ranks`` as ``memory`` returns them."""
    rank_stages = list_stages(layout, counts.job)
    reserved = max(
        _count_reserved(counts, layout, rank, chunks, constants)
        for rank, chunks in zip(ranks, rank_stages, strict=True)
    )
    groups_bytes = count_communicators(layout) * constants.communicator_bytes
    return AllocatorTotals(reserved, reserved + constants.context_bytes + groups_bytes)


def segment(size: int) -> int:
    """Return the bytes of the segment that PyTorch's allocator requests for a tensor of ``size`` bytes."""
    if size <= 0:
        return 0
    if size <= MIB:
        return 2 * MIB
    return 20 * MIB if size < 10 * MIB else ceil_div(size, 2 * MIB) * 2 * MIB


def list_stages(layout: Layout, job: Job) -> Sequence[tuple[int, ...]]:
    """Return the stages of each pipeline rank."""
    return ((0,),) if layout.pp == 1 else make_table(layout, job).rank_stages


def _count_reserved(
    counts: Counts, layout: Layout, rank: RankMemory, chunks: Sequence[int], constants: AllocatorConstants
) -> int:
    """Return the bytes that PyTorch reserves on one rank with the stages ``chunks``."""
    if counts.job.stack.expandable_segments:
        return segment(rank.peak_bytes)
    part, stages = get_local_degrees(layout), counts.list_stage_groups(layout)
    runs = {run.name: run for chunk in chunks for run in stages[chunk]}.values()
    passes_bytes = segment(rank.passes_bytes) + sum(
        map(segment, _count_concatenated(counts, layout, rank, runs, constants))
    )
    scatter_inputs = sum(
        run.times * _reduce_scatter_inputs(counts.unit(get_group_degrees(part, run), run.name).ops) for run in runs
    )
    fragments = _estimate_fragments(counts, layout, rank, chunks, runs, constants)
    return (
        max(segment(rank.peak_bytes), passes_bytes)
        + fragments
        + (scatter_inputs if counts.job.stack.run_ahead and counts.job.stack.async_tp else 0)
    )


def _estimate_fragments(
    counts: Counts,
    layout: Layout,
    rank: RankMemory,
    chunks: Sequence[int],
    runs: Iterable[UnitGroup],
    constants: AllocatorConstants,
) -> int:
    """Return the bytes of free blocks that the largest temporary tensors cannot use again.

    What is kept goes into the blocks of freed activations, if they have room for it. Else it goes into the block of the
    largest tensor, usually the logits, and the rest of that block is lost. If a pipeline rank holds activations of
    several micro-batches, those of the others go there.
    """
    first, second, third = (*map(segment, _list_largest(counts, layout, runs, n=constants.split_later)), 0, 0, 0)[:3]
    kept_bytes = _count_persistent_bytes(counts, layout, rank, chunks)
    has_room = rank.activations_bytes - first >= kept_bytes  # the logits are activations too
    stages = build_stages(counts, layout).chunks
    one_micro_batch = sum(stages[stage].kept_bytes for stage in chunks)
    lost_bytes = first if rank.activations_bytes > one_micro_batch else 0 if has_room else first - kept_bytes
    return second + max(min(first, second + third), lost_bytes)


def _count_persistent_bytes(counts: Counts, layout: Layout, rank: RankMemory, chunks: Iterable[int]) -> int:
    """Return the bytes that are kept from one micro-batch to the next, or with a single one from one step to the next.

    These are the sums of gradients, unless they are sharded, or the optimizer's moments.
    """
    if layout.micro_batches(counts.job) == 1 or not get_policy(layout, counts.job).gradients_stay:
        return rank.optimizer_bytes
    stages = counts.list_stage_groups(layout)
    return sum(run.times * counts.states(layout, run.name).sums for chunk in chunks for run in stages[chunk])


def _reduce_scatter_inputs(ops: Iterable[Op]) -> int:
    """Return the bytes of a unit's inputs to tp's reduce-scatters in the forward."""
    messages = [op.message for op in ops if op.message]
    return sum(
        message.payload
        for message in messages
        if message.axis in ("tp", "tp_outer") and message.forward == "reduce_scatter"
    )


def _count_concatenated(
    counts: Counts, layout: Layout, rank: RankMemory, runs: Iterable[UnitGroup], constants: AllocatorConstants
) -> list[int]:
    """Return the bytes of tensors that an update concatenates and that are allocated at once.

    They are a reduction bucket, unless the passes count it, with the larger of the largest weight's gradient in fp64
    (for the norm) and all gradients of this rank twice (as summed and as cast); and all weights.
    """
    recipe, joined = counts.job.precision, counts.job.stack.flat_copies
    sizes, numel = [], rank.joined_numel
    if "gradients" in joined and not get_policy(layout, counts.job).host_gradients:
        norm_copies = [8 * min(rank.updated_numel, max(_list_numels(counts, layout, runs), default=0))]
        gradient_copies = [numel * recipe.summed_bytes, numel * recipe.updated_bytes]
        sizes += max(norm_copies, gradient_copies, key=sum) + [constants.bucket_elements * recipe.summed_bytes] * (
            layout.dp > 1 and not counts.job.stack.reduce_bucket
        )
    if "weights" in joined:
        sizes.append(rank.parameters_bytes - rank.updated_numel * recipe.updated_bytes)
    return sizes


def _list_numels(counts: Counts, layout: Layout, runs: Iterable[UnitGroup]) -> Iterator[int]:
    """Yield the elements of every trained weight of ``runs`` on one rank."""
    for run in runs:
        for unit, *_ in counts.list_local_parts(layout, run.name):
            yield from (weight.numel for weight in select_trained(unit, counts.job).weights)


def _list_largest(counts: Counts, layout: Layout, runs: Iterable[UnitGroup], *, n: int) -> list[int]:
    """Return the sizes of a rank's ``n`` largest temporary tensors: activations, gradients, gathered units."""
    part, keeps = get_local_degrees(layout), get_policy(layout, counts.job)
    sizes: list[int] = []
    for run in runs:
        state = counts.states(layout, run.name)
        sizes += counts.largest_tensors(get_group_degrees(part, run), run.name)
        if counts.job.stack.zero3_gather == "weights" and not keeps.weights_stay:
            sizes += _list_gathered_weights(counts, layout, run)
        elif not keeps.weights_stay:
            sizes += [state.gathered, state.gather_buffers]
        sizes += [] if keeps.gradients_stay else [state.sums]
    return nlargest(n, sizes)


def _list_gathered_weights(counts: Counts, layout: Layout, run: UnitGroup) -> Iterator[int]:
    """Yield the bytes of every weight of a unit where each is gathered by itself, from its shard, into its own tensor.

    Source: deepspeedai/DeepSpeed@0.19.8:deepspeed/runtime/zero/partition_parameters.py, all_gather_coalesced.
    """
    for unit, *_ in counts.list_local_parts(layout, run.name):
        for weight in unit.weights:
            if is_trained(weight, counts.job):
                yield weight.numel * counts.job.precision.high_precision_bytes
            else:
                yield count_frozen_bytes(unit._replace(weights=(weight,)), shards=1, job=counts.job).gathered

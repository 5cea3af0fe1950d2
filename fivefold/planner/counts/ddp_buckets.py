"""Data-parallel messages that join the gradients, or the weights, of several units.

    DistributedDataParallel   all_reduce of buckets of 25 MiB, the first of 1; full with the weight that fills it
    DeepSpeed, ZeRO-1 and -2  all_reduce of buckets of ``reduce_bucket`` elements; one all_gather of all weights
    DeepSpeed, ZeRO-3         reduce_scatter of such buckets; all_gathers of weights (``parameter_prefetch.py``)
Sources: pytorch/pytorch@v2.13.0:torch/csrc/distributed/c10d/reducer.cpp, compute_bucket_assignment_by_size;
deepspeedai/DeepSpeed@0.19.8:deepspeed/runtime/zero/stage_1_and_2.py, average_tensor, stage3.py, and engine.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from fivefold.layout.sharding import FsdpUnit, get_policy, select_trained, shard_numel, trains_saved_modules
from fivefold.layout.spec import Layout
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.memory.states import count_gathered_bytes
from fivefold.planner.counts.message import RepeatedMessage
from fivefold.planner.counts.parameter_prefetch import list_prefetch_messages
from fivefold.units import ceil_div

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20  # of DistributedDataParallel
UNSHARDED = 500_000_000  # elements of DeepSpeed's buckets under ZeRO-0 (engine.py, MEMORY_OPT_ALLREDUCE_SIZE)
PADDED_ELEMENTS = 2  # elements; DeepSpeed pads each rank's part of all weights to a multiple


class BucketGradient(NamedTuple):
    """The gradient of a weight: elements that are sent, bytes of each, the number of shards, and of their replicas."""

    numel: int
    width: int
    shards: int
    replicas: int


def coalesces_reductions(counts: Counts) -> bool:
    """Return True if gradients are reduced in buckets, not unit by unit."""
    return counts.job.stack.wgrad_accumulation == "ddp_buckets" or counts.job.stack.reduce_bucket > 0


def coalesces_gathers(counts: Counts, layout: Layout) -> bool:
    """Return True if weights are gathered all at once or weight by weight, not unit by unit."""
    if get_policy(layout, counts.job).weights_stay:
        return counts.job.stack.reduce_bucket > 0
    return counts.job.stack.zero3_gather == "weights"


def list_coalesced_messages(counts: Counts, layout: Layout, *, chunks: tuple[int, ...]) -> Iterator[RepeatedMessage]:
    """Yield the joined messages of a rank that holds the stages ``chunks``; they replace those of its units."""
    if coalesces_reductions(counts):
        yield from _list_reductions(counts, layout, chunks=chunks)
    if coalesces_gathers(counts, layout):
        if not get_policy(layout, counts.job).weights_stay:
            yield from list_prefetch_messages(counts, layout, chunks=chunks)
        elif layout.shards > 1:
            recipe = counts.job.precision
            units = [select_trained(unit, counts.job) for unit, *_ in _list_weights(counts, layout, chunks)]
            weights_bytes = sum(count_gathered_bytes(unit, shards=1, recipe=recipe) for unit in units)
            alignment = PADDED_ELEMENTS * layout.shards * recipe.high_precision_bytes
            yield RepeatedMessage("dp", "all_gather", 1, ceil_div(weights_bytes, alignment) * alignment, layout.shards)


def _list_weights(counts: Counts, layout: Layout, chunks: Iterable[int]) -> Iterator[tuple[FsdpUnit, int, int]]:
    """Yield the weights of the stages in model order, each unit with its number of shards and of replicas."""
    for chunk in chunks:
        for run in counts.list_stage_groups(layout)[chunk]:
            for _ in range(run.times):
                yield from counts.list_local_parts(layout, run.name)


def list_gradients(counts: Counts, layout: Layout, chunks: Iterable[int]) -> list[BucketGradient]:
    """Return the gradients of the stages in the order of their trained weights."""
    job = counts.job
    return [
        BucketGradient(
            shards * shard_numel(weight, shards=shards) if layout.zero == 3 else weight.numel,
            job.count_reduce_bytes(job.saved_precision if trains_saved_modules(unit, job) else job.precision),
            shards,
            replicas,
        )
        for unit, shards, replicas in _list_weights(counts, layout, chunks)
        for weight in select_trained(unit, counts.job).weights
    ]


def count_largest_gradient(counts: Counts, layout: Layout, chunks: Iterable[int]) -> int:
    """Return the elements of the largest gradient of the stages."""
    return max((gradient.numel for gradient in list_gradients(counts, layout, chunks)), default=0)


def list_update_groups(counts: Counts, layout: Layout, chunks: Iterable[int]) -> list[int]:
    """Return the elements of this rank's shards that ZeRO-3 updates one after another, each joined to one tensor.

    DeepSpeed ends a group with the weight that fills it (deepspeedai/DeepSpeed@0.19.8:deepspeed/runtime/zero/stage3.py,
    _create_fp16_sub_groups).
    """
    groups = [0]
    for gradient in list_gradients(counts, layout, chunks):
        if groups[-1] >= counts.job.stack.update_group_size:
            groups.append(0)
        groups[-1] += gradient.numel // gradient.shards
    return groups


def divide_into_buckets(sizes: Iterable[int], *, most: int) -> Iterator[int]:
    """Yield the elements of DeepSpeed's buckets: a bucket is reduced before a gradient that would not fit into it."""
    bucket = 0
    for size in sizes:
        if bucket and bucket + size > most:
            yield bucket
            bucket = 0
        bucket += size
    if bucket:
        yield bucket


def _list_reductions(counts: Counts, layout: Layout, *, chunks: tuple[int, ...]) -> Iterator[RepeatedMessage]:
    """Yield the bucketed reductions, starting with the gradient of the last weight.

    DeepSpeed under ZeRO-0 and -1 starts with the first, because it reduces only after all gradients exist.
    """
    job, reduced = counts.job, list_gradients(counts, layout, chunks)
    width, ranks = job.count_reduce_bytes(job.precision), layout.dp * layout.cp
    reduced = [gradient for gradient in reduced if gradient.shards * gradient.replicas > 1]
    if job.stack.wgrad_accumulation == "ddp_buckets":
        for width in sorted({gradient.width for gradient in reduced}):  # DDP joins gradients of one dtype
            joined = [gradient for gradient in reversed(reduced) if gradient.width == width]
            yield from _fill_buckets(joined, width=width)
        return
    bucket_elements = job.stack.reduce_bucket if layout.shards > 1 else UNSHARDED
    if layout.zero <= 1:
        sizes: Iterable[int] = [gradient.numel for gradient in reduced]
    else:
        sizes = [gradient.numel for gradient in reversed(reduced)]
    times = layout.micro_batches(job) if counts.reduces_every_micro_batch(layout) else 1
    collective = "reduce_scatter" if layout.zero == 3 else "all_reduce"
    group = "replica" if layout.shards == 1 else "shard"
    for elements in divide_into_buckets(sizes, most=bucket_elements):
        yield RepeatedMessage("dp", collective, times, elements * width, ranks, group)


def _fill_buckets(ready: Iterable[BucketGradient], *, width: int) -> Iterator[RepeatedMessage]:
    """Yield the all-reduces of DistributedDataParallel's buckets."""
    bucket_bytes, capacity = 0, FIRST_BUCKET_BYTES
    for gradient in ready:
        bucket_bytes += gradient.numel * width
        if bucket_bytes >= capacity:
            yield RepeatedMessage("dp", "all_reduce", 1, bucket_bytes, gradient.replicas, "replica")
            bucket_bytes, capacity = 0, BUCKET_BYTES
    if bucket_bytes:
        yield RepeatedMessage("dp", "all_reduce", 1, bucket_bytes, gradient.replicas, "replica")

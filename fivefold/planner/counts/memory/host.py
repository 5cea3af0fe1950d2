"""Host memory of a node that offloading takes: optimizer states, parameters and activations of its ranks.

parameters    the rank's shards from which weights are gathered, frozen ones too: what the optimizer updates (FSDP2's
              CPUOffloadPolicy), or copies of it in the dtype of the gathered weights (DeepSpeed's offload_param)
optimizer     (master weights + moments + gradients) of the rank's shard, which the CPU updates (DeepSpeed's
              ZeRO-Offload, arXiv:2101.06840), and what the update of Fivefold's trainer holds meanwhile
activations   those that the rank with the highest peak would keep on the device at its peak
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate

from fivefold.job import Job
from fivefold.layout.sharding import get_policy
from fivefold.layout.spec import Layout
from fivefold.machine.spec import Machine
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.ddp_buckets import list_gradients
from fivefold.planner.counts.memory.peak import count_rank_memory
from fivefold.planner.counts.memory.states import accumulates_on_host, count_reduced_width
from fivefold.planner.counts.update import count_scratch_bytes, list_stages
from fivefold.units import ceil_div


def count_host_bytes(counts: Counts, layout: Layout, machine: Machine) -> int:
    """Return the bytes of host memory that the ranks of one node take, each counted as the fullest.

    0 without offloading.
    """
    job = counts.job
    offloaded = layout.list_offloaded(job)
    if not offloaded:
        return 0
    counts_without_offload = counts if not job.offload else Counts(counts.model, job.replace(offload=()))
    width = _count_updated_width(layout, job)
    ranks = zip(
        count_rank_memory(counts, layout),
        count_rank_memory(counts_without_offload, layout.replace(offload=())),
        strict=True,
    )
    gradients = get_policy(layout, job).host_gradients
    updates_in_blocks = "optimizer" in offloaded and job.stack.updates_in_blocks
    buffer_bytes = [
        (_count_bucket_buffers(counts, layout, held) if gradients == "buckets" else 0)
        + (count_scratch_bytes(counts, layout, chunks=held) if updates_in_blocks else 0)
        for held in list_stages(layout)
    ]
    rank_bytes = max(
        rank.offloaded_bytes
        + (on_device.optimizer_bytes + on_device.updated_numel * width if "optimizer" in offloaded else 0)
        + (on_device.activations_bytes if "activations" in offloaded else 0)
        + buffers
        for (rank, on_device), buffers in zip(ranks, buffer_bytes, strict=True)
    )
    return rank_bytes * min(machine.ranks_per_node, layout.world)


def _count_updated_width(layout: Layout, job: Job) -> int:
    """Return the bytes of an updated element in host memory besides moments, and shards that are gathered from.

    They are gradients and, unless the shards themselves are updated, master weights. Gradients have the dtype of the
    update (Fivefold; NVIDIA/Megatron-LM@core_v0.16.1:megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py,
    _set_sub_optimizer_grads), unless they are accumulated there. DeepSpeed's ZeRO-3 has gradients twice: as they are
    reduced, and as the optimizer reads them (deepspeedai/DeepSpeed@0.19.8:deepspeed/runtime/zero/stage3.py,
    grad_partitions_flat_buffer and initialize_optimizer_states). Its ZeRO-1 and -2 have updated weights once more, in
    the dtype in which they are sent to the device (stage_1_and_2.py, param_buffer_of_bit16_for_cpu_offload_groups).
    """
    recipe, gradients = job.precision, get_policy(layout, job).host_gradients
    if gradients == "buckets":
        return 2 * recipe.updated_bytes + recipe.high_precision_bytes
    width = count_reduced_width(layout, job)
    if "parameters" in layout.list_offloaded(job) and job.stack.offloads_with_parameters:
        return width
    return (width if gradients == "shards" else 0) + 2 * recipe.updated_bytes


def _count_bucket_buffers(counts: Counts, layout: Layout, held: tuple[int, ...]) -> int:
    """Return the bytes of buffers for gradients of DeepSpeed's ZeRO-1 and -2 on a rank that holds the stages ``held``.

    They are a largest weight's gradient and, where micro-batches are summed, every gradient of which the rank has a
    part, in full (stage_1_and_2.py, temp_grad_buffer_for_cpu_offload and accumulated_grads_in_cpu).
    """
    sizes = [gradient.numel for gradient in list_gradients(counts, layout, held)]
    numel = max(sizes, default=0)
    if accumulates_on_host(layout, counts.job):
        numel += _count_touched_numel(sizes, shards=layout.shards)
    return numel * counts.job.precision.high_precision_bytes


def _count_touched_numel(sizes: list[int], *, shards: int) -> int:
    """Return the elements of all weights of which the fullest of ``shards`` equal parts of a flat tensor has some."""
    total, starts = sum(sizes), [0, *accumulate(sizes)]
    part = ceil_div(total, shards)
    ends = ((shard * part, min((shard + 1) * part, total)) for shard in range(shards) if shard * part < total)
    return max(starts[bisect_left(starts, end)] - starts[bisect_right(starts, start) - 1] for start, end in ends)

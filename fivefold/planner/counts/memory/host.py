"""Host memory of a node that offloading takes: optimizer states, parameters and activations of its ranks.

parameters    the rank's shards from which weights are gathered, frozen ones too: what the optimizer updates (FSDP2's
              CPUOffloadPolicy), or copies of it in the dtype of the gathered weights (DeepSpeed's offload_param)
optimizer     (master weights + moments + summed gradients) of the rank's shard, which the CPU updates
              (DeepSpeed's ZeRO-Offload, arXiv:2101.06840)
activations   those that the rank with the highest peak would keep on the device at its peak
"""

from __future__ import annotations

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.spec import Machine
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.memory.peak import count_rank_memory
from fivefold.planner.counts.memory.states import count_reduced_width, offloads_gradients


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
    rank_bytes = max(
        rank.offloaded_bytes
        + (on_device.optimizer_bytes + on_device.updated_numel * width if "optimizer" in offloaded else 0)
        + (on_device.activations_bytes if "activations" in offloaded else 0)
        for rank, on_device in ranks
    )
    return rank_bytes * min(machine.ranks_per_node, layout.world)


def _count_updated_width(layout: Layout, job: Job) -> int:
    """Return the bytes of an updated element in host memory besides moments, and shards that are gathered from.

    They are gradients and, unless the shards themselves are updated, master weights. DeepSpeed's ZeRO-3 has gradients
    twice: as they are reduced, and as the optimizer reads them (deepspeedai/DeepSpeed@0.19.8:
    deepspeed/runtime/zero/stage3.py, grad_partitions_flat_buffer and initialize_optimizer_states).
    """
    recipe = job.precision
    width = count_reduced_width(layout, job)
    if "parameters" in layout.list_offloaded(job) and job.stack.offloads_with_parameters:
        return width
    return width + recipe.updated_bytes * (2 if offloads_gradients(layout, job) else 1)

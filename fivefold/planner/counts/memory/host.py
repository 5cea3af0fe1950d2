"""Host memory of a node that offloading takes: optimizer states and activations of its ranks.

parameters    those of the optimizer, and the rank's shards of frozen weights (FSDP2's CPUOffloadPolicy)
optimizer     (master weights + moments + summed gradients) of the rank's shard, which the CPU updates
              (DeepSpeed's ZeRO-Offload, arXiv:2101.06840)
activations   those that the rank with the highest peak would keep on the device at its peak
"""

from __future__ import annotations

from fivefold.layout.spec import Layout
from fivefold.machine.spec import Machine
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.memory.peak import count_rank_memory
from fivefold.planner.counts.memory.states import count_reduced_width


def count_host_bytes(counts: Counts, layout: Layout, machine: Machine) -> int:
    """Return the bytes of host memory that the ranks of one node take, each counted as the fullest.

    0 without offloading.
    """
    job = counts.job
    offloaded = layout.list_offloaded(job)
    if not offloaded:
        return 0
    counts_without_offload = counts if not job.offload else Counts(counts.model, job.replace(offload=()))
    offloads_parameters = "parameters" in offloaded
    # the shards of parameters hold what the optimizer updates
    width = count_reduced_width(layout, job) + (0 if offloads_parameters else job.precision.updated_bytes)
    rank_bytes = max(
        (rank.optimizer_bytes + rank.updated_numel * width if "optimizer" in offloaded else 0)
        + (rank.parameters_bytes if offloads_parameters else 0)
        + (rank.activations_bytes if "activations" in offloaded else 0)
        for rank in count_rank_memory(counts_without_offload, layout.replace(offload=()))
    )
    return rank_bytes * min(machine.ranks_per_node, layout.world)

"""What a GPU's driver has given away at the peak: PyTorch's cache, the CUDA context, NCCL's buffers.

    reserved = peak + what lies free but split       driver = reserved + context + buffers of each communicator

PyTorch's allocator takes the smallest free block that fits and splits it; a tensor larger than every free block gets
a segment of its own. The two largest that come and go find the cache split by smaller ones when they come. With
expandable segments nothing is split for good. Source: pytorch/pytorch, c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from heapq import nlargest
from typing import NamedTuple

from fivefold.layout.schedule import schedule
from fivefold.layout.sharding import policy
from fivefold.layout.spec import Layout
from fivefold.machine.spec import Machine
from fivefold.plan.count.counts import Counts, run_part
from fivefold.plan.count.memory import RankMemory
from fivefold.plan.count.part import part_of
from fivefold.units import MIB, ceil_div

# What nvidia-smi shows of an idle PyTorch process, on an A100 (kernels loaded):
# bigscience-workshop/bigscience@053adaf:train/tr11-176B-ml/chronicles-prequel.md.
CONTEXT_BYTES = 1573 * MIB
# NCCL_BUFFSIZE is 4 MiB for each channel and direction (NCCL's documentation of its environment variables); NCCL takes
# 16 channels and more between GPUs of one node.
COMMUNICATOR_BYTES = 16 * 2 * 4 * MIB
SPLIT_LATER = 2  # tensors that find no block


COMMUNICATORS = 4  # of a usual layout


def room_bytes(machine: Machine) -> int:
    """What a GPU has for tensors: less the context and NCCL's buffers. Fragments are not taken off, since PyTorch can
    avoid them (expandable segments). On CPU all of the memory.
    """
    taken = CONTEXT_BYTES + COMMUNICATORS * COMMUNICATOR_BYTES if machine.backend == "nccl" else 0
    return max(machine.chip.memory_bytes - taken, machine.chip.memory_bytes // 2)


class Held(NamedTuple):
    """Bytes of the fullest rank."""

    reserved_bytes: int
    driver_bytes: int


def held(counts: Counts, layout: Layout, ranks: list[RankMemory]) -> Held:
    """What PyTorch reserves and what the driver shows, for the ``ranks`` of ``memory``."""
    reserved = max(
        segment(rank.peak_bytes) + (0 if counts.job.expandable_segments else sum(map(segment, largest)))
        for rank, largest in zip(ranks, _largest(counts, layout), strict=True)
    )
    groups = sum(degree > 1 for degree in (layout.world, layout.dp, layout.tp, layout.cp, layout.pp, layout.ep))
    return Held(reserved, reserved + CONTEXT_BYTES + groups * COMMUNICATOR_BYTES)


def segment(size: int) -> int:
    """Bytes that the allocator asks of the driver for a tensor that no free block holds."""
    if size <= 0:
        return 0
    if size <= MIB:
        return 2 * MIB
    return 20 * MIB if size < 10 * MIB else ceil_div(size, 2 * MIB) * 2 * MIB


def _largest(counts: Counts, layout: Layout) -> list[list[int]]:
    """Of every pipeline rank the largest tensors that come and go: activations, gradients, gathered units."""
    part, runs, keeps = part_of(layout), counts.stage_runs(layout), policy(layout)
    places = ((0,),) if layout.pp == 1 else schedule(layout.schedule, pp=layout.pp, v=layout.v,
                                                     micro_batches=layout.micro_batches(counts.job)).held  # fmt: skip
    found = []
    for chunks in places:
        sizes: list[int] = []
        for run in {run.name: run for chunk in chunks for run in runs[chunk]}.values():
            state = counts.states(layout, run.name)
            sizes += counts.largest(run_part(part, run), run.name)
            sizes += [] if keeps.weights_stay else [state.whole, state.travel]
            sizes += [] if keeps.gradients_stay else [state.sums]
        found.append(nlargest(SPLIT_LATER, sizes))
    return found

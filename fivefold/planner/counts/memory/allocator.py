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
from typing import Literal, NamedTuple

from fivefold.job import Job
from fivefold.layout.mesh import RankGroup, group
from fivefold.layout.sharding import count_frozen_bytes, get_policy, is_trained, select_trained
from fivefold.layout.spec import Layout
from fivefold.machine.spec import Machine
from fivefold.planner.counts.counts import Counts, UnitGroup, get_group_degrees
from fivefold.planner.counts.memory.peak import RankMemory, make_table
from fivefold.planner.counts.memory.stages import ModelChunk, build_stages
from fivefold.planner.counts.memory.states import runs_reduction
from fivefold.planner.counts.operations.local_shapes import get_local_degrees
from fivefold.stack.spec import Stack
from fivefold.units import MIB, ceil_div


class AllocatorConstants(NamedTuple):
    """Constants of PyTorch's allocator, CUDA and NCCL; sources: docs/explanation/how-a-step-costs/constants.md."""

    # What nvidia-smi shows for an idle PyTorch process on an A100 (kernels loaded):
    # bigscience-workshop/bigscience@053adaf:train/tr11-176B-ml/chronicles-prequel.md. Since CUDA 11.7 kernels are
    # loaded at their first use, but published lengths of QLoRA on one GPU hold as much (decision 067).
    context_bytes: int = 1573 * MIB
    # A connection of an NCCL channel, sent and received: 2 and 10 MiB between GPUs of a node (NVIDIA/nccl#1685), which
    # are 4 MiB (Simple), 4.7 (LL128) and 0.5 (LL) in steps of 2; twice 10 through a NIC that reads GPU memory
    # (NVIDIA/nccl@v2.10.3-1:src/transport/p2p.cc, net.cc).
    connection_bytes: int = 12 * MIB
    far_connection_bytes: int = 20 * MIB
    # A channel for each NVLink of 25 GB/s and its copy, which are 24 on an A100 (NVIDIA/nccl#964), or two for each NIC.
    max_channels: int = 24
    peer_channels: int = 32  # of sends and receives for each peer in a node of 8 (NVIDIA/nccl#1685); else 2
    # Share of the fragmentation counted here that an allocator cannot avoid however little memory it has: 0.10 to 1.25
    # of it, 0.40 on average, in dry runs of eight jobs (docs/explanation/how-a-step-costs/memory-risk.md).
    unreclaimable: float = 0.5
    split_later: int = 3  # number of largest temporary tensors that ``_estimate_fragments`` considers
    bucket_elements: int = 500_000_000  # gradients that DeepSpeed reduces at once (default of reduce_bucket_size)


PUBLISHED = AllocatorConstants()


NVLINK_BYTES_PER_SECOND = 25e9  # each direction of a link
GROUPS = ("world", "dp", "tp", "cp", "pp", "ep")


def count_driver_bytes(
    machine: Machine, layout: Layout, stack: Stack, constants: AllocatorConstants = PUBLISHED
) -> int:
    """Return the bytes of a rank that tensors cannot use: the CUDA context and NCCL's buffers; 0 on a CPU.

    At most half of the memory is returned, so that a GPU of a few GiB can still be planned for.
    """
    names = (*GROUPS, *(stack.second_communicators if layout.pp > 1 else ()))
    sizes = [
        _count_communicator_bytes(machine, group(layout, name), _list_connections(layout, stack, name), constants)
        for name in names
    ]
    return _limit_driver_bytes(machine, constants.context_bytes + sum(sizes))


def bound_driver_bytes(machine: Machine, world: int, stack: Stack) -> int:
    """Return a lower bound of ``count_driver_bytes`` of layouts over ``world`` ranks.

    They have a communicator of all ranks and another one, at least of two ranks, which are neighbours or far apart. One
    that connects at run time may have a single connection, and is left out.
    """
    everything = _list_connections(Layout(dp=world), stack, "world")
    sizes = [_count_communicator_bytes(machine, RankGroup(world, 1), everything, PUBLISHED)]
    if not stack.runtime_connect:
        pairs = [RankGroup(min(2, world), stride) for stride in (1, ceil_div(world, 2))]
        sizes.append(min(_count_communicator_bytes(machine, pair, everything, PUBLISHED) for pair in pairs))
    return _limit_driver_bytes(machine, PUBLISHED.context_bytes + sum(sizes))


def _limit_driver_bytes(machine: Machine, driver_bytes: int) -> int:
    return min(driver_bytes, machine.chip.memory_bytes // 2) if machine.has_gpus else 0


class Connections(NamedTuple):
    """The connections of a group that hold NCCL's buffers: a ring, a tree, and peers of sends and receives."""

    ring: bool
    tree: Literal["none", "between_nodes", "anywhere"]
    peers: int  # to which a rank sends, or from which it receives


def _list_connections(layout: Layout, stack: Stack, name: str) -> Connections:
    """Return what NCCL connects for the group ``name``.

    Rings and trees are connected when a communicator is made, or at run time when a collective first uses them. Trees
    are used by all-reduces, in a node only by few of them, as their base latency is higher and their bandwidth lower
    than a ring's (NVIDIA/nccl@v2.22.3-1:src/graph/tuning.cc). Stages and rings of attention only send and receive.
    """
    n_ranks, exchanges_heads = group(layout, name).ranks, layout.context_parallelism.exchanges_heads
    if (name == "ep" and stack.dispatcher == "all_to_all") or (name == "cp" and exchanges_heads):
        peers = n_ranks - 1
    else:
        peers = min(n_ranks - 1, {"pp": 2, "cp": 1}.get(name, 0))
    if not stack.runtime_connect:
        return Connections(ring=True, tree="anywhere", peers=peers)
    reduces = name in ("world", "tp") or (name == "dp" and layout.shards == 1)
    return Connections(ring=name not in ("pp", "cp"), tree="between_nodes" if reduces else "none", peers=peers)


def _count_communicator_bytes(
    machine: Machine, ranks: RankGroup, connections: Connections, constants: AllocatorConstants
) -> int:
    """Return the bytes of a communicator's buffers on a rank, in the mean over its ranks.

    channels x connection x (1 in a ring + 2 (n - 1) / n in a tree)     + peers x channels x connection
    """
    n_ranks, near = ranks.ranks, machine.links[0]
    if n_ranks <= 1:
        return 0
    local = min(n_ranks, max(1, near.span // ranks.stride))
    in_node = n_ranks == local
    channels = min(constants.max_channels, 2 * max(1, round(near.bandwidth / NVLINK_BYTES_PER_SECOND)))
    if not in_node:
        channels = min(channels, 2 * local)
    connection_bytes = constants.connection_bytes if local > 1 else constants.far_connection_bytes
    has_tree = connections.tree == "anywhere" or (connections.tree == "between_nodes" and not in_node)
    neighbours = n_ranks * connections.ring + 2 * (n_ranks - 1) * has_tree  # of all ranks
    per_peer = constants.peer_channels if in_node and n_ranks <= 8 and channels == constants.max_channels else 2
    return channels * connection_bytes * neighbours // n_ranks + connections.peers * per_peer * connection_bytes


class AllocatorTotals(NamedTuple):
    """Bytes that PyTorch reserves and that the driver shows, on the rank with the most."""

    reserved_bytes: int
    driver_bytes: int


def estimate_allocator_totals(
    counts: Counts,
    machine: Machine,
    layout: Layout,
    ranks: list[RankMemory],
    constants: AllocatorConstants = PUBLISHED,
) -> AllocatorTotals:
    """Return reserved and driver bytes of a layout; ``ranks`` as ``memory`` returns them."""
    chunks = build_stages(counts, layout).chunks
    reserved = max(
        _count_reserved(counts, layout, rank, [chunks[stage] for stage in stages], constants)
        for rank, stages in zip(ranks, list_stages(layout, counts.job), strict=True)
    )
    return AllocatorTotals(reserved, reserved + count_driver_bytes(machine, layout, counts.job.stack, constants))


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
    counts: Counts, layout: Layout, rank: RankMemory, chunks: Sequence[ModelChunk], constants: AllocatorConstants
) -> int:
    """Return the bytes that PyTorch reserves on one rank with the stages ``chunks``."""
    stack = counts.job.stack
    if stack.expandable_segments:
        return segment(rank.peak_bytes)
    runs = {unit.group.name: unit.group for chunk in chunks for unit in chunk.groups}.values()
    passes_bytes = segment(rank.passes_bytes) + sum(
        map(segment, _count_concatenated(counts, layout, rank, runs, constants))
    )
    scatter_inputs = _count_scatter_inputs(counts, layout, runs) if stack.run_ahead and stack.async_tp else 0
    fragments = _estimate_fragments(counts, layout, rank, chunks, runs, constants)
    return max(segment(rank.peak_bytes), passes_bytes) + fragments + scatter_inputs


def _estimate_fragments(
    counts: Counts,
    layout: Layout,
    rank: RankMemory,
    chunks: Sequence[ModelChunk],
    runs: Iterable[UnitGroup],
    constants: AllocatorConstants,
) -> int:
    """Return the bytes of free blocks that the largest temporary tensors cannot use again.

    What is kept goes into the blocks of freed activations, if they have room for it. Else it goes into the block of the
    largest tensor, usually the logits, and the rest of that block is lost. If a pipeline rank holds activations of
    several micro-batches, those of the others go there. Gradients that are allocated one by one leave the rests of
    blocks (``_list_remainders``); without a pipeline that of the logits too, in which the head's gradient lies.
    """
    first, second, third = (*map(segment, _list_largest(counts, layout, runs, n=constants.split_later)), 0, 0, 0)[:3]
    kept_bytes = _count_persistent_bytes(counts, layout, rank, chunks)
    has_room = rank.activations_bytes - first >= kept_bytes  # the logits are activations too
    one_micro_batch = sum(chunk.kept_bytes for chunk in chunks)
    lost_bytes = first if rank.activations_bytes > one_micro_batch else 0 if has_room else first - kept_bytes
    remainders = _list_remainders(counts, layout, runs)
    if layout.pp == 1:
        lost_bytes = max(lost_bytes, *(entry.rest for entry in remainders if segment(entry.block) == first), 0)
    remainders_bytes = sum(entry.rest * entry.times for entry in remainders if segment(entry.block) != first)
    return second + max(min(first, second + third), lost_bytes) + remainders_bytes


class Remainder(NamedTuple):
    """The ``rest`` of a free ``block`` in which gradients lie; ``times``: the number of units that have it."""

    rest: int
    block: int
    times: int


def _list_remainders(counts: Counts, layout: Layout, runs: Iterable[UnitGroup]) -> list[Remainder]:
    """Return what is left of the blocks in which gradients lie that the first backward allocates one by one.

    A gradient takes the smallest block of a freed activation of its unit that it fits in, or what another one left of
    such a block. What is left stays lost until the update frees the gradients. Gradients in permanent buffers, and
    those that ZeRO-2 and -3 reduce after each backward, leave nothing.
    """
    job = counts.job
    is_separate = job.stack.wgrad_accumulation == "separate"
    stay_in_place = get_policy(layout, job).gradients_stay and not runs_reduction(layout, job)
    if not is_separate or layout.micro_batches(job) == 1 or not stay_in_place:
        return []
    part, remainders = get_local_degrees(layout), []
    for run in runs:
        ops = counts.unit(get_group_degrees(part, run), run.name).ops
        blocks = sorted({size for op in ops for size in op.writes.values() if size > MIB})
        rests: list[Remainder] = []
        for size in sorted((job.precision.summed_bytes * n for op in ops for n in op.wgrad_numels), reverse=True):
            place = min((entry for entry in rests if entry.rest >= size), default=None)
            if place is not None:
                rests.remove(place)
            else:
                block = next((block for block in blocks if block >= size), size)
                place = Remainder(block, block, run.times)
            rests.append(place._replace(rest=place.rest - size))
        remainders += rests
    return remainders


def _count_persistent_bytes(counts: Counts, layout: Layout, rank: RankMemory, chunks: Iterable[ModelChunk]) -> int:
    """Return the bytes that are kept from one micro-batch to the next, or with a single one from one step to the next.

    These are the sums of gradients, unless they are sharded, or the optimizer's moments.
    """
    if layout.micro_batches(counts.job) == 1 or not get_policy(layout, counts.job).gradients_stay:
        return rank.optimizer_bytes
    return sum(chunk.states.sums for chunk in chunks)


def _count_scatter_inputs(counts: Counts, layout: Layout, runs: Iterable[UnitGroup]) -> int:
    """Return the bytes of the inputs of ``runs`` to tp's reduce-scatters in the forward."""
    part = get_local_degrees(layout)
    return sum(
        run.times * op.message.payload
        for run in runs
        for op in counts.unit(get_group_degrees(part, run), run.name).ops
        if op.message and op.message.axis in ("tp", "tp_outer") and op.message.forward == "reduce_scatter"
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

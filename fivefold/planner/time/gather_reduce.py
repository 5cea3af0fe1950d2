"""Seconds of one unit's data-parallel messages: the gather of its weights and the reduction of its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fivefold.job import Job
from fivefold.layout.local_weight import pad_vocab
from fivefold.layout.mesh import RankGroup, group, make_group
from fivefold.layout.sharding import get_policy, is_trained, shard_weight
from fivefold.layout.spec import Layout
from fivefold.planner.counts.counts import Counts, Name, ends_on_different_ranks
from fivefold.planner.counts.memory.states import count_sent_gradient_width
from fivefold.planner.counts.message import RepeatedMessage
from fivefold.planner.counts.traffic import copy_messages, count_passes, list_unit_messages
from fivefold.planner.time.network import Network
from fivefold.units import ceil_div

GatherReduceKey = tuple[object, ...]

# Layers whose weights Megatron has in one parameter.
FUSED = {"q": "linear_qkv", "k": "linear_qkv", "v": "linear_qkv", "gate": "linear_fc1", "up": "linear_fc1"}


class GatherReduceTime(NamedTuple):
    """Seconds to gather a unit's weights, to reduce its gradients, and of further all-reduces (``copies``).

    ``copies``: all-reduces of replicated weights, and over replicas if that is done less often than the reduction.
    ``gather_busy``, ``reduce_busy``: seconds of them that keep a core busy (``Network.busy_seconds``). ``again``:
    seconds to gather the weights for a backward, if that happens less often than for a forward. ``copy_out``,
    ``copy_in``: seconds in which compute waits for gathered weights to be copied out of the buffer of their message,
    and for gradients to be copied into that of theirs (``Stack.copies_comm_buffers``). ``buckets``: how many messages
    these are, less than one if a message has weights of other units too (``Stack.ddp_bucket_size``). ``first_sum``,
    ``later_sum``: seconds of kernels that accumulate a unit's gradients after the first backward of a step, and after
    each later one (``count_accumulated_bytes``).
    """

    gather: float
    reduce: float
    copies: float
    gather_busy: float = 0.0
    reduce_busy: float = 0.0
    again: float | None = None
    copy_out: float = 0.0
    copy_in: float = 0.0
    buckets: float = 1.0
    first_sum: float = 0.0
    later_sum: float = 0.0


def gather_reduce_key(counts: Counts, layout: Layout) -> GatherReduceKey:
    """Return the values of a layout that ``gather_reduce_seconds`` depends on."""
    return (
        layout.tp,
        layout.tp_inner,
        layout.sp,
        layout.ep,
        layout.etp,
        layout.zero,
        layout.shards,
        layout.dp,
        layout.cp,
        layout.pp,
        layout.order,
        layout.pipeline.enters_both_ends,
        ends_on_different_ranks(layout),
        counts.job.stack.replicated_grad_reduce == "weight" and layout.mbs,
        layout.offload,
    )


class MessageLists(NamedTuple):
    """The messages of ``list_unit_messages`` for any number of micro-batches, and those of ``copy_messages``."""

    of_shards: tuple[RepeatedMessage, ...]
    copies: tuple[RepeatedMessage, ...]


class MessageCache(dict[tuple[object, ...], MessageLists]):
    """The messages of units by what they depend on, which is not where the ranks of a group are."""


def _list_messages(counts: Counts, layout: Layout, name: Name) -> MessageLists:
    """Return the messages of a unit, listed once for all orders of the mesh."""
    repeats = counts.job.stack.replicated_grad_reduce == "weight"  # after each backward, if they are reduced often
    key = (
        name,
        counts.states_key(layout),
        layout.sp,
        layout.pipeline.enters_both_ends,
        repeats and (count_passes(layout, counts.job), counts.reduces_every_micro_batch(layout)),
    )
    cache = counts.caches.get_cache(MessageCache)
    messages = cache.get(key)
    if messages is None:
        of_shards = tuple(list_unit_messages(counts, layout, name))
        messages = cache[key] = MessageLists(of_shards, tuple(copy_messages(counts, layout, name)))
    return messages


def gather_reduce_seconds(
    counts: Counts,
    network: Network,
    layout: Layout,
    name: Name,
    *,
    host_link_bandwidth: float,
    copy_seconds: Callable[[float], float] | None = None,
) -> GatherReduceTime:
    """Return the seconds of one unit's messages, each sent once.

    ``host_link_bandwidth``: bytes/s between a rank and its host, over which offloaded shards go before and after.
    ``copy_seconds``: returns the seconds of a kernel that reads and writes n bytes, if a stack copies between the
    buffers of messages and the tensors of weights and gradients.
    """
    copied_out = copied_in = 0
    reduces_every_backward = counts.reduces_every_micro_batch(layout, name)
    gather = reduce = copies = gather_busy = reduce_busy = 0.0
    buckets = _count_unit_buckets(counts, layout, name)
    messages = _list_messages(counts, layout, name)
    for message in messages.of_shards:
        filled = buckets.get(_find_buffer(message), 1.0)
        mesh_group = make_group(layout, message.group, message.ranks)
        collective = message.collective, int(message.payload / filled), mesh_group
        seconds = filled * network.seconds(*collective)
        busy = filled * network.busy_seconds(*collective)
        if message.collective == "all_gather":
            gather, gather_busy = gather + seconds, gather_busy + busy
        elif message.group.endswith("replica") and reduces_every_backward:
            copies += seconds
        else:
            reduce, reduce_busy = reduce + seconds, reduce_busy + busy
        out_bytes, in_bytes = _count_copied_bytes(message, counts.job)
        copied_out, copied_in = copied_out + out_bytes, copied_in + in_bytes
    for message in messages.copies:
        is_dualpipe = message.axis == "pp"
        mesh_group = (
            _find_dualpipe_replicas(layout) if is_dualpipe else make_group(layout, message.group, message.ranks)
        )
        copies += message.times * network.seconds(message.collective, message.payload, mesh_group)
    if layout.list_offloaded(counts.job):
        sent_width = count_sent_gradient_width(layout, counts.job)
        # the only rank of FSDP2 copies weights in the stream that computes (_fsdp_param_group.py, wait_for_unshard)
        blocks = get_policy(layout, counts.job).runs_alone and counts.job.stack.offloads_with_parameters
        for part in counts.parts(layout, name):
            gather += part.offloaded / host_link_bandwidth
            gather_busy += blocks * part.offloaded / host_link_bandwidth
            reduce += part.updated_numel * sent_width / host_link_bandwidth
    n_buckets = max(buckets.values(), default=1.0)
    time = GatherReduceTime(gather, reduce, copies, gather_busy, reduce_busy, buckets=n_buckets)
    if copy_seconds is None:
        return time
    return time._replace(copy_out=copy_seconds(copied_out), copy_in=copy_seconds(copied_in))


def _find_buffer(message: RepeatedMessage) -> str:
    """Return the buffer of gradients that a message is of: Megatron has one of experts, and one of other weights."""
    return message.group.removesuffix("shard").removesuffix("replica")


def _count_elements(counts: Counts, layout: Layout, name: Name) -> dict[str, tuple[int, int]]:
    """Return the elements of a unit's gradients in each buffer, and the ranks that reduce them."""
    elements: dict[str, tuple[int, int]] = {}
    for message in _list_messages(counts, layout, name).of_shards:
        if message.collective != "all_gather":  # of two, the first: over the shards, then over their replicas
            numel = message.payload // counts.job.count_reduce_bytes(counts.job.precision)
            elements.setdefault(_find_buffer(message), (numel, message.ranks))
    return elements


class BucketCache(dict[tuple[object, ...], dict[tuple[str, Name], float]]):
    """``_fill_buckets`` by what it depends on."""


def _count_unit_buckets(counts: Counts, layout: Layout, name: Name) -> dict[str, float]:
    """Return how many buckets of each buffer a unit's weights fill, if messages are of buckets.

    Without overlap, Megatron's buffer is one bucket. A rank's share of all weights stands for the weights of its stage.
    """
    size, size_per_rank = counts.job.stack.ddp_bucket_size
    if not size or layout.zero == 3:
        return {}
    totals: dict[str, int] = {}
    work: dict[Name, int] = {}
    for stage in counts.stage_work(layout):
        for run, times in stage:
            work[run.name] = work.get(run.name, 0) + times
    for unit, times in work.items():
        for buffer, (numel, _) in _count_elements(counts, layout, unit).items():
            totals[buffer] = totals.get(buffer, 0) + times * numel
    elements = _count_elements(counts, layout, name)
    buckets = {buffer: numel / max(1, numel, totals[buffer] // layout.pp) for buffer, (numel, _) in elements.items()}
    if "dp" in counts.job.stack.overlap:
        sizes = {buffer: max(size, size_per_rank * ranks) for buffer, (_, ranks) in elements.items()}
        tied = ends_on_different_ranks(layout)
        key = layout.tp, layout.tp_inner, layout.ep, layout.etp, tied, *work.items(), *sizes.items()
        cache = counts.caches.get_cache(BucketCache)
        if key not in cache:
            cache[key] = _fill_buckets(counts, layout, work, sizes)
        buckets = {buffer: max(least, cache[key].get((buffer, name), 0.0)) for buffer, least in buckets.items()}
    return buckets


def _fill_buckets(
    counts: Counts, layout: Layout, work: dict[Name, int], sizes: dict[str, int]
) -> dict[tuple[str, Name], float]:
    """Return how many buckets each unit fills, by buffer and unit.

    From the last weight to the first, a bucket is complete with the weight by which it has ``sizes`` elements or more,
    so that no weight is in two (NVIDIA/Megatron-LM@d98e8a6:megatron/core/distributed/param_and_grad_buffer.py).
    """
    buckets: dict[tuple[str, Name], float] = {}

    def close(buffer: str, shares: dict[Name, int]) -> None:
        total = sum(shares.values())
        for unit, numel in shares.items():
            buckets[buffer, unit] = buckets.get((buffer, unit), 0.0) + numel / total / work[unit]

    for buffer, size in sizes.items():
        shares: dict[Name, int] = {}
        filled = 0
        for unit, times in reversed(work.items()):
            for numel, n_left in times * _list_parameters(counts, layout, unit, experts=buffer != "")[::-1]:
                while n_left:
                    taken = min(n_left, ceil_div(size - filled, numel))
                    shares[unit] = shares.get(unit, 0) + taken * numel
                    filled, n_left = filled + taken * numel, n_left - taken
                    if filled >= size:
                        close(buffer, shares)
                        shares, filled = {}, 0
        close(buffer, shares)
    return buckets


def _list_parameters(counts: Counts, layout: Layout, name: Name, *, experts: bool) -> list[tuple[int, int]]:
    """Return the elements of a unit's trained weights on one rank, and their number: one, or one for each expert."""
    vocab = pad_vocab(counts.model, counts.job, tp=layout.tp)
    parameters: dict[tuple[str, ...], tuple[int, int]] = {}
    for weight in counts.weights(layout, name):
        if weight.kind.startswith("expert") != experts or not is_trained(weight, counts.job):
            continue
        local = shard_weight(weight, model=counts.model, layout=layout, vocab=vocab)
        number = local.shape[0] if experts else 1
        module = tuple(FUSED.get(part, part) for part in weight.name.split("."))
        fused, _ = parameters.get(module, (0, number))
        parameters[module] = fused + local.numel // number, number
    return list(parameters.values())


def _count_copied_bytes(message: RepeatedMessage, job: Job) -> tuple[int, int]:
    """Return the bytes read and written to copy out of the buffer of a gather, and into that of a reduction.

    FSDP2 copies weights out, and gradients in as the dtype in which they are summed
    (pytorch/pytorch@v2.13.0:torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, on the stream of compute).

    FSDP concatenates gradients to a flat one, casts it to the dtype of the reduction, divides it by about the root of
    the number of ranks, and its shard by the rest (pytorch/pytorch@00ae0bc:torch/distributed/fsdp/_runtime_utils.py,
    _post_backward_hook; @07b3040:torch/distributed/algorithms/_comm_hooks/default_hooks.py, reduce_scatter_hook).

    DistributedDataParallel copies gradients to buckets and back. A bucket in another dtype than its message is cast,
    and what was reduced is cast back (deepspeedai/DeepSpeed@0.19.8:deepspeed/runtime/zero/stage_1_and_2.py,
    allreduce_bucket; Aleph-Alpha/scaling@737f855:src/scaling/core/optimizer/allreduce.py).
    """
    stack, recipe = job.stack, job.precision
    copies_weights = stack.comm_buffers == "retained"
    width = job.count_reduce_bytes(recipe)
    numel = message.payload // width
    if message.collective == "all_gather":
        return 2 * message.payload * copies_weights, 0
    reduced = numel if message.collective == "all_reduce" else numel // message.ranks
    cast = (numel + reduced) * (job.bucket_bytes + width) * (stack.reduce_bucket > 0 and job.bucket_bytes != width)
    if message.collective == "all_reduce":
        return 0, cast + 4 * message.payload * (stack.wgrad_accumulation == "ddp_buckets")
    if copies_weights:
        return 0, cast + numel * (recipe.gradients_bytes + width)
    if not stack.flat_shards:
        return 0, cast
    flat_cast = (recipe.gradients_bytes + width) * (recipe.gradients_bytes != width)
    divided = numel + numel // message.ranks * (message.ranks > 2)  # two ranks divide before the reduction only
    return 0, cast + numel * (2 * recipe.gradients_bytes + flat_cast) + 2 * divided * width


def _find_dualpipe_replicas(layout: Layout) -> RankGroup:
    """Return the two ranks that hold the same stages under DualPipe: the ends of the pipeline, the worst case."""
    pp = group(layout, "pp")
    return RankGroup(2, (pp.ranks - 1) * pp.stride)

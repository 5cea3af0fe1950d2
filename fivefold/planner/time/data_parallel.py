"""Exposed seconds of data parallelism's messages at the ends of a step.

    ends = the last reduction + the exposed part of the others in the last backward + all-reduces of replicated weights
           + all-gathers of the updated weights

A reduction overlaps the backward of the units after it, as far as ZeRO-3's gathers leave time, and in the trainer the
reduction of the embedding overlaps the next forward; the gather after the update overlaps the first forward. Under
ZeRO-3 the first gather of a micro-batch and its last reduction overlap nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from fivefold.layout.mesh import make_group
from fivefold.layout.sharding import get_policy
from fivefold.layout.spec import Layout
from fivefold.planner.counts.counts import Name, UnitGroup
from fivefold.planner.counts.traffic import list_unit_messages
from fivefold.planner.time.network import MessageTime
from fivefold.planner.time.unit_overlap import OverlappedUnitSeconds, overlaps_next_forward
from fivefold.planner.time.units import Units

Value = TypeVar("Value")

Repeated = list[tuple[Value, int]]  # values in order, each with the number of equal ones


class UnitEnds(NamedTuple):
    """A unit at the ends of a step.

    ``gather`` and ``reduce``: its messages after all backwards; ``last``: the last reduction if there is one after
    every backward. ``copies``: seconds of replica all-reduces. ``buffer_copies``: seconds in which compute waits for
    copies to and from the buffers of these messages. ``forward_overlap`` and ``backward_overlap``: seconds that other
    messages can overlap, in a forward and in a backward. ``buckets``: as in ``GatherReduceTime``.
    """

    gather: MessageTime
    reduce: MessageTime
    last: MessageTime
    copies: float
    buffer_copies: float
    every_micro_batch: bool
    forward_overlap: float
    backward_overlap: float
    buckets: float


class StepEnds(NamedTuple):
    """Seconds before the first and after the last micro-batch: exposed messages, and the slowdown of compute."""

    exposed: float
    slowdown: float


def estimate_step_ends(
    units: Units, layout: Layout, chunks: tuple[int, ...], seconds: Mapping[UnitGroup, OverlappedUnitSeconds]
) -> StepEnds:
    """Return the cost of the reductions after the last backward and the gathers before the first forward.

    ``chunks``: the stages of the rank; ``seconds``: the seconds of its units.
    """
    if layout.dp * layout.cp * layout.tp == 1 and not layout.pipeline.enters_both_ends:
        return StepEnds(0.0, 0.0)
    copies = buffer_copies = 0.0
    buckets = 0.0  # of the first stage's first unit, whose weights are gathered first and reduced last
    gathers: Repeated[MessageTime] = []  # in the order of the units
    reduces: Repeated[MessageTime] = []
    forward: Repeated[float] = []  # compute of the first stage's units
    backward: Repeated[float] = []
    stays_gathered = get_policy(layout, units.job).weights_stay
    stage_work = units.counts.stage_work(layout)
    equal_stages = units.counts.equal_stages(layout)  # the order of stages matters only to the first message
    stage_counts = Counter(map(equal_stages.__getitem__, chunks)) if len(chunks) > 1 else {equal_stages[chunks[0]]: 1}
    for chunk, n_stages in stage_counts.items():
        for run, n_units in stage_work[chunk]:
            times = n_stages * n_units
            unit = _estimate_unit_ends(units, run.name, seconds[run], stays_gathered=stays_gathered)
            buckets = buckets or unit.buckets
            copies = copies + times * unit.copies
            buffer_copies = buffer_copies + times * unit.buffer_copies
            if stays_gathered:
                gathers.append((unit.gather, times))
            if not unit.every_micro_batch:
                reduces.append((unit.reduce, times))
            elif not reduces and units.overlaps:
                reduces.append((unit.last, 1))
            if chunk == equal_stages[chunks[0]]:
                forward.append((unit.forward_overlap, n_units))
                backward.append((unit.backward_overlap, n_units))
    gather, reduce = (sum([times * message.seconds for message, times in messages]) for messages in (gathers, reduces))
    if stays_gathered and units.job.stack.param_all_gather == "broadcast":
        gather = _broadcast_seconds(units, layout, chunks)
    if not units.overlaps:
        return StepEnds(gather + reduce + copies, buffer_copies)
    first, last = (0.0, 0.0) if stays_gathered else _estimate_micro_batch_ends(units, layout, seconds)
    alone = layout.micro_batches(units.job) * (first + last)
    # A first message of no bytes leaves nothing exposed, and rounding less than nothing.
    exposed_gather = gather
    if units.job.stack.param_all_gather == "overlapped":
        exposed_gather = max(0.0, gather - _sum_overlapped_seconds(gathers, forward, chunks=len(chunks)))
    exposed_reduce = max(0.0, reduce - _sum_overlapped_seconds(reduces, backward, chunks=len(chunks)))
    if units.job.stack.ddp_bucket_size[0] and chunks[0] and layout.zero < 3:
        # on later ranks of a pipeline, Megatron has one bucket for all weights of a stage
        # (NVIDIA/Megatron-LM@d98e8a6:megatron/core/distributed/distributed_data_parallel.py, pp_rank > 0)
        exposed_gather = max(exposed_gather, gather / len(chunks))
        exposed_reduce = max(exposed_reduce, reduce / len(chunks))
    elif buckets < 1:  # the first bucket has weights of further units, as the last one reduced has
        exposed_gather = max(exposed_gather, min(gather, gathers[0][0].seconds / buckets if gathers else 0.0))
        exposed_reduce = max(exposed_reduce, min(reduce, reduces[0][0].seconds / buckets if reduces else 0.0))
    return StepEnds(
        exposed_gather + exposed_reduce + copies + alone,
        units.contention * (gather + reduce - exposed_gather - exposed_reduce - alone) + buffer_copies,
    )


def _estimate_micro_batch_ends(
    units: Units, layout: Layout, seconds: Mapping[UnitGroup, OverlappedUnitSeconds]
) -> tuple[float, float]:
    """Return the further exposed seconds of a micro-batch's first gather and of its last reduction under ZeRO-3.

    A unit's gather is counted as if it overlapped the unit's own forward, and its messages in the backward as if they
    overlapped its own backward. That is right for all blocks but the first, which follows the embedding: a gather
    overlaps the unit before, and a reduction the backward of the unit before. With g, r, f and b of a block's gather,
    reduction, forward and backward, L blocks are counted L · max(0, g - f) and L · max(0, g + r - b), and expose

        forward:  g + (L - 1) · max(0, g - f)
        backward: max(0, g - b) + (L - 2) · max(0, g + r - b) + max(0, r - b) + r

    A forward's gathers wait for the last step of the optimizer or backward, and a backward ends with its reductions:

    - FSDP2 (torch 2.13.0, torch/distributed/fsdp/_fully_shard): ``FSDPState._root_pre_forward`` lets the streams of the
      gathers wait for the current one, or for the optimizer alone (``set_post_optim_event``); after a backward,
      ``_root_post_backward_final_callback`` lets the current stream wait for all reductions (``finalize_backward``).
      After ``set_is_last_backward(False)`` it does not, but the next gather follows them in the same communicator.
    - FSDP1 (torch 2.13.0, torch/distributed/fsdp/_runtime_utils.py): ``_wait_for_computation_stream`` and
      ``_post_backward_final_callback`` do the same.
    - DeepSpeed 0.19.6 (deepspeedai/DeepSpeed@edaa722:deepspeed/runtime): each forward fills the queue of its prefetches
      again (zero/parameter_offload.py, ``_start_of_forward_hook``), and each backward reduces its last bucket and waits
      for it (engine.py, ``allreduce_gradients``; zero/stage3.py, ``independent_gradient_partition_epilogue``). Its
      first gather has only as many modules of the block as fit into ``prefetch_bucket_size``
      (zero/partitioned_param_coordinator.py, ``_fetch_sub_module_impl``). Its last bucket has between none and
      ``reduce_bucket`` elements, for which a block's reduction stands here.

    Fivefold's trainer does as FSDP. Stages of a pipeline have other micro-batches to compute meanwhile.
    """
    if layout.pp > 1:
        return 0.0, 0.0
    blocks = [run for run, _ in units.counts.stage_work(layout)[0] if run.name not in ("embed", "head")]
    if not blocks:
        return 0.0, 0.0
    block = seconds[blocks[0]]
    messages, (forward_free, backward_free) = block.messages, block.free_seconds
    gather, reduce = messages.forward, MessageTime(messages.time.reduce, messages.time.reduce_busy)
    first = min(gather.overlappable_seconds, block.time.forward + messages.forward_copy + forward_free)
    if units.job.stack.zero3_gather == "weights":
        numel = units.counts.states(layout, blocks[0].name).gathered // units.job.precision.high_precision_bytes
        first *= min(1.0, units.job.stack.prefetch_bucket_size / max(1, numel))
    if not messages.every_micro_batch:
        return first, 0.0
    room = block.time.backward + block.time.weight + messages.accumulation + messages.backward_copy + backward_free
    again = messages.backward.overlappable_seconds - reduce.overlappable_seconds

    def expose(overlappable_seconds: float) -> float:
        return max(0.0, overlappable_seconds - room)

    counted = 2 * expose(messages.backward.overlappable_seconds)
    return first, max(0.0, reduce.overlappable_seconds + expose(again) + expose(reduce.overlappable_seconds) - counted)


def _estimate_unit_ends(units: Units, name: Name, seconds: OverlappedUnitSeconds, *, stays_gathered: bool) -> UnitEnds:
    """Return a unit at the ends of a step."""
    messages, unit_time, (forward_free, backward_free) = seconds.messages, seconds.time, seconds.free_seconds
    time = messages.time
    backward_overlap = unit_time.backward + unit_time.weight + messages.accumulation + backward_free
    # ``backward`` counts a reduction after every backward as overlapped by it, but the last one follows it
    last_overlap = time.reduce if overlaps_next_forward(name, units.job) else backward_overlap
    return UnitEnds(
        MessageTime(time.gather, time.gather_busy),
        MessageTime(time.reduce, time.reduce_busy),
        MessageTime(min(time.reduce, last_overlap), min(time.reduce_busy, last_overlap)),
        time.copies,
        time.copy_out * stays_gathered + time.copy_in * (not messages.every_micro_batch),
        messages.every_micro_batch,
        unit_time.forward + forward_free,
        max(0.0, backward_overlap - messages.backward.seconds),
        time.buckets,
    )


def _broadcast_seconds(units: Units, layout: Layout, chunks: tuple[int, ...]) -> float:
    """Return the seconds in which each rank of a shard group in turn broadcasts the full tensors that it updates."""
    payloads: dict[tuple[str, int], int] = {}
    for chunk in chunks:
        for run, times in units.counts.stage_work(layout)[chunk]:
            for message in list_unit_messages(units.counts, layout, run.name):
                if message.collective == "all_gather":
                    group_key = message.group, message.ranks
                    payloads[group_key] = payloads.get(group_key, 0) + times * message.payload
    return sum(
        ranks * units.network.seconds("broadcast", payload // ranks, make_group(layout, name, ranks))
        for (name, ranks), payload in payloads.items()
    )


def _sum_overlapped_seconds(messages: Repeated[MessageTime], compute: Repeated[float], *, chunks: int) -> float:
    """Return the overlapped seconds of all but the first message.

    Each overlaps the previous unit, one message at a time.

    ``compute``: compute of the first stage's units. The messages of the rank's other stages are fully overlapped.
    """
    if not messages:
        return 0.0
    (first, times), *rest = messages
    later_messages = [(first, times - 1), *rest]
    if chunks == 1:
        return _overlap_in_order(later_messages, compute)
    waiting_seconds = sum([times * message.overlappable_seconds for message, times in later_messages])
    return (1 - 1 / chunks) * waiting_seconds + min(
        waiting_seconds / chunks, sum([times * room for room, times in compute])
    )


def _overlap_in_order(messages: Repeated[MessageTime], compute: Repeated[float]) -> float:
    """Return the overlapped seconds of messages, each overlapping one element of ``compute``."""
    overlapped, n_left, available, remaining = 0.0, 0, 0.0, iter(compute)
    for message, times in messages:
        while times:
            if not n_left:
                available, n_left = next(remaining, (0.0, times))
            n_overlapped = min(times, n_left)
            overlapped += n_overlapped * min(message.overlappable_seconds, available)
            times, n_left = times - n_overlapped, n_left - n_overlapped
    return overlapped

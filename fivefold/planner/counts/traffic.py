"""Messages that one rank takes part in during one optimizer step, by axis and collective, with their bytes.

    zero0          an all_reduce of the gradients of each unit
    zero1 to 3     a reduce_scatter of them, under 2 and 3 per micro-batch, unless the stack reduces once a step
    zero1, zero2   an all_gather of the weights after the update
    zero3          an all_gather of the weights for each forward and backward (``sharding.needs_backward_gather``)
    tp, cp, ep     the messages in the lists of operations
    pp             the residual stream over each boundary between stages, and its gradient back
    end of step    an all_reduce of 12 bytes (norm, loss, vote to stop), and 4 per further predicted token

``ddp_buckets.py`` has the messages that join several units.
"""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.job import Job
from fivefold.layout.mesh import group
from fivefold.layout.sharding import (
    count_frozen_bytes,
    count_padded_numel,
    find_extra_reduce_axis,
    get_policy,
    joins_ends,
    needs_backward_gather,
    regathers_vision,
    select_trained,
    shard_numel,
    trains_saved_modules,
)
from fivefold.layout.spec import Layout
from fivefold.layout.stages import find_first_backward_stage
from fivefold.model.vision_weights import is_vision
from fivefold.model.weight import is_gemm_weight
from fivefold.planner.counts.counts import Counts, Name, UnitGroup, get_group_degrees
from fivefold.planner.counts.ddp_buckets import coalesces_gathers, coalesces_reductions, list_coalesced_messages
from fivefold.planner.counts.memory.states import count_gathered_bytes, count_scales
from fivefold.planner.counts.message import RepeatedMessage
from fivefold.planner.counts.operations.adapters import runs_in_reference
from fivefold.planner.counts.operations.local_shapes import get_local_degrees
from fivefold.planner.counts.operations.op import Op, OpMessage
from fivefold.planner.counts.update import update_messages
from fivefold.step import Traffic, count_sent_bytes


def list_messages(counts: Counts, layout: Layout, *, chunks: tuple[int, ...] = (0,)) -> list[RepeatedMessage]:
    """Return every message of a step of a rank that holds the stages ``chunks``, in no particular order."""
    micro_batches = count_passes(layout, counts.job)
    stages = counts.stage_work(layout)
    rank_messages = [*step_messages(counts, layout, chunks=chunks), *update_messages(counts, layout, chunks=chunks)]
    rank_messages += list_coalesced_messages(counts, layout, chunks=chunks)
    joined = {"all_gather"} if coalesces_gathers(counts, layout) else set()
    joined |= {"all_reduce", "reduce_scatter"} if coalesces_reductions(counts) else set()
    for chunk in chunks:
        for run, times in stages[chunk]:
            unit_messages_once = [
                sent for sent in _list_sent_messages(counts, layout, run.name) if sent.collective not in joined
            ]
            unit_messages_once += copy_messages(counts, layout, run.name)
            rank_messages += [message._replace(times=message.times * times) for message in unit_messages_once]
            ops = counts.unit(get_group_degrees(get_local_degrees(layout), run), run.name).ops
            for op in ops:
                if op.message is not None:
                    reference = runs_in_reference(op, counts.job)
                    rank_messages += _list_op_messages(
                        op, op.message, layout, times=times * micro_batches, reference=reference
                    )
            if routed := counts.count_moe_layers(run.name):
                rank_messages += list_routing_messages(counts, layout, run, times=times * micro_batches * routed)
        rank_messages += _list_p2p_messages(counts, layout, chunk=chunk, micro_batches=micro_batches)
    return rank_messages


def count_passes(layout: Layout, job: Job) -> int:
    """Return the number of micro-batches that a rank sends through each of its stages."""
    micro_batches = layout.micro_batches(job)  # DualPipe: half go through the rank's replica
    return micro_batches // 2 if layout.pipeline.enters_both_ends else micro_batches


def list_unit_messages(counts: Counts, layout: Layout, name: Name) -> Iterator[RepeatedMessage]:
    """Yield a unit's data-parallel messages of a step: gathers, reduce-scatters, all-reduces over replicas.

    Where a message joins several units (``ddp_buckets.py``), this is the unit's share, which it is charged for.
    """
    micro_batches = count_passes(layout, counts.job)
    reduces_every_backward = counts.reduces_every_micro_batch(layout, name)
    for whole_unit, shards, replicas in counts.list_local_parts(layout, name):
        unit = select_trained(whole_unit, counts.job)
        recipe = counts.job.saved_precision if trains_saved_modules(unit, counts.job) else counts.job.precision
        stay = get_policy(layout, counts.job).weights_stay
        padded = count_padded_numel(unit, shards=shards)
        width = counts.job.count_reduce_bytes(recipe)
        prefix = "expert_" if unit.name == "experts" else ""
        if shards > 1:
            regathers = needs_backward_gather(name, layout, counts.job) and counts.has_backward(name)
            regathers |= is_vision(whole_unit.weights[0]) and regathers_vision(layout, counts.job)
            gathers = 1 if stay else micro_batches * (2 if regathers else 1)
            if counts.job.has_reference and not stay:  # the head stays gathered while the reference runs
                gathers += 1 if name == "head" or (name == "embed" and counts.model.shares_table) else micro_batches
            group = f"{prefix}shard"
            payload = count_gathered_bytes(unit, shards=shards, recipe=recipe)
            payload += 0 if stay else count_frozen_bytes(whole_unit, shards=shards, job=counts.job).gathered
            if payload:
                yield RepeatedMessage("dp", "all_gather", gathers, payload, shards, group)
        if not padded:  # every weight is frozen
            continue
        if shards > 1:
            reduces = micro_batches if reduces_every_backward else 1
            all_reduces = counts.job.stack.reduce_bucket and stay
            yield RepeatedMessage(
                "dp",
                "all_reduce" if all_reduces else "reduce_scatter",
                reduces,
                padded * width,
                shards,
                group,
            )
        if replicas > 1:
            payload = padded // shards * width
            yield RepeatedMessage("dp", "all_reduce", 1, payload, replicas, f"{prefix}replica")


def _list_sent_messages(counts: Counts, layout: Layout, name: Name) -> list[RepeatedMessage]:
    """Return ``list_unit_messages`` as they are sent: if embedding and head are one unit, the head sends for both."""
    messages_of_unit = list(list_unit_messages(counts, layout, name))
    if name not in ("embed", "head") or not joins_ends(layout, counts.job):
        return messages_of_unit
    if name == "embed":
        return []
    sizes = {
        (message.collective, message.group): message.payload for message in list_unit_messages(counts, layout, "embed")
    }
    return [
        message._replace(payload=message.payload + sizes.get((message.collective, message.group), 0))
        for message in messages_of_unit
    ]


def copy_messages(counts: Counts, layout: Layout, name: Name) -> Iterator[RepeatedMessage]:
    """Yield the gradient all-reduces that follow those of data parallelism.

    They are over tp for weights replicated over tp (``sharding.find_extra_reduce_axis``), and under DualPipe of all
    weights with the other rank that holds the same stages.
    """
    width, model = counts.job.precision.summed_bytes, counts.model
    outer = layout.tp // layout.tp_inner
    groups: dict[str, int] = {"tp": layout.tp, "kv": layout.tp // model.kv_heads, "tp_outer": outer}
    for unit, shards, _ in counts.list_local_parts(layout, name):
        sizes: dict[str, list[int]] = {replica_group: [] for replica_group in groups}
        per_weight = (
            counts.job.stack.replicated_grad_reduce == "weight"
        )  # reduced as they are made, before ZeRO shards them
        times = count_passes(layout, counts.job) if per_weight and counts.reduces_every_micro_batch(layout) else 1
        for weight in select_trained(unit, counts.job).weights:
            if kind := find_extra_reduce_axis(weight, model=model, layout=layout):
                sizes[kind].append(weight.numel if per_weight else shard_numel(weight, shards=shards))
        for replica_group, ranks in groups.items():
            mesh_group = "tp" if replica_group == "kv" else replica_group
            numels = sizes[replica_group] if per_weight else [sum(sizes[replica_group])]
            yield from (
                RepeatedMessage("tp", "all_reduce", times, numel * width, ranks, mesh_group)
                for numel in numels
                if numel
            )
        if layout.pipeline.enters_both_ends:
            yield RepeatedMessage(
                "pp", "all_reduce", 1, count_padded_numel(unit, shards=shards) // shards * width, 2, "pp"
            )


def list_routing_messages(counts: Counts, layout: Layout, run: UnitGroup, *, times: int) -> Iterator[RepeatedMessage]:
    """Yield an MoE layer's messages other than its tokens, ``times`` per step.

    They carry token counts, routing weights and the dispatch's fp8 scales; for the balance loss and capacity, counts
    per expert and sequence, if sequences span several ranks.
    """
    part = get_group_degrees(get_local_degrees(layout), run)
    moe = counts.model.moe
    assert moe is not None
    local = counts.get_local(part)
    ops = counts.unit(part, run.name).ops
    resent_axes = {op.message.axis for op in ops if op.recomputed and op.message}
    # the dispatch is planned again only under full recomputation, if something after it runs again
    planned = next(index for index, op in enumerate(ops) if op.name == "moe.dispatch")
    replans = "layer" in part.recomputed and any(op.recomputed for op in ops[planned + 1 :])
    plan_times = times * (2 if replans and counts.has_backward(run.name) else 1)
    # none below the first adapter of the first block
    backward_times = times if any(op.name == "moe.topk" and op.differentiates != () for op in ops) else 0
    copies = local.stream_rows * moe.computed_per_token
    ep_times, etp_times = (times * (2 if axis in resent_axes else 1) for axis in ("ep", "etp"))
    weights = 4 * copies
    if layout.ep > 1:
        yield RepeatedMessage("ep", "all_to_all", plan_times, 8 * moe.experts, layout.ep, "ep")
        yield RepeatedMessage("ep", "all_to_all", ep_times + backward_times, weights, layout.ep, "ep")
    if layout.etp > 1:
        yield RepeatedMessage("etp", "all_gather", plan_times, 8 * moe.experts * layout.etp, layout.etp, "etp")
        for collective, n_messages in (("all_gather", etp_times), ("reduce_scatter", backward_times)):
            if n_messages:
                yield RepeatedMessage("etp", collective, n_messages, weights * layout.etp, layout.etp, "etp")
    if scales := local.row_scales_bytes * copies:  # of fp8 rows in the forward, and of their gradients
        if layout.ep > 1:
            yield RepeatedMessage("ep", "all_to_all", ep_times + times, scales, layout.ep, "ep")
        if layout.etp > 1:
            yield RepeatedMessage("etp", "all_gather", etp_times + times, scales * layout.etp, layout.etp, "etp")
    split_axes = [axis for axis, is_split in (("tp", part.sp), ("cp", layout.cp > 1)) if is_split]
    counts_bytes = 8 * layout.mbs * moe.choices
    if split_axes and moe.balance == "aux" and moe.aux_coefficient and backward_times:
        for axis in split_axes:
            yield RepeatedMessage(axis, "all_reduce", backward_times, counts_bytes, group(layout, axis).ranks, axis)
    if split_axes and moe.capacity is not None:  # counts of each part of a sequence
        parts = layout.tp * layout.cp * (layout.context_parallelism.parts_per_rank if layout.cp > 1 else 1)
        for axis in split_axes:
            yield RepeatedMessage(axis, "all_reduce", plan_times, counts_bytes * parts, group(layout, axis).ranks, axis)


def step_messages(counts: Counts, layout: Layout, *, chunks: tuple[int, ...]) -> Iterator[RepeatedMessage]:
    """Yield the messages sent once a step.

    They are the norm and loss, the tied table's gradient between the two ends of the pipeline (none if one rank holds
    both), scales, and counts per expert for loss-free balancing.
    """
    stages = counts.stage_work(layout)
    ends = {0, len(stages) - 1} & set(chunks)
    if layout.world > 1:
        sums = counts.job.loss_sums + counts.model.mtp_depth  # besides the norm and the vote to stop
        yield RepeatedMessage("world", "all_reduce", 1, 4 * (2 + sums), layout.world, "world")
    if layout.pp > 1 and counts.model.shares_table and len(ends) == 1 and counts.trains_table:
        *_, (unit, shards, _) = counts.list_local_parts(layout, "embed")
        table = unit._replace(weights=unit.weights[:1])
        payload = count_padded_numel(table, shards=shards) // shards * counts.job.precision.summed_bytes
        yield RepeatedMessage("pp", "all_reduce", 1, payload, 2, "pp")
    yield from _scale_messages(counts, layout, chunks=chunks)
    moe = counts.model.moe
    if moe and moe.balance == "free" and not counts.job.freezes_text:  # tokens per expert, of all layers of this rank
        runs = (work for chunk in chunks for work in stages[chunk])
        payload = 8 * moe.choices * sum(times * counts.count_moe_layers(run.name) for run, times in runs)
        if payload and layout.world > layout.pp:
            yield RepeatedMessage("dp", "all_reduce", 1, payload, layout.world // layout.pp, "stage")
        if payload and layout.pipeline.enters_both_ends:
            yield RepeatedMessage("pp", "all_reduce", 1, payload, 2, "pp")


def _scale_messages(counts: Counts, layout: Layout, *, chunks: tuple[int, ...]) -> Iterator[RepeatedMessage]:
    """Yield the all-reduces of max |w| per scale after the update, for weights that are gathered in fp8."""
    sizes, recipe = dict[tuple[str, int], int](), counts.job.precision
    if recipe.gathers == "fp8":
        for run, times in (work for chunk in chunks for work in counts.stage_work(layout)[chunk]):
            for unit, shards, _ in counts.list_local_parts(layout, run.name):
                group = "expert_shard" if unit.name == "experts" else "shard"
                scales = sum(count_scales(weight, recipe) for weight in unit.weights if is_gemm_weight(weight))
                sizes[group, shards] = sizes.get((group, shards), 0) + times * scales
    for (group, shards), scales_count in sizes.items():
        if shards > 1 and scales_count:
            yield RepeatedMessage("dp", "all_reduce", 1, 4 * scales_count, shards, group)


def _list_op_messages(
    op: Op, message: OpMessage, layout: Layout, *, times: int, reference: bool
) -> Iterator[RepeatedMessage]:
    """Yield the messages of one operation: forward, backward, and repeated ones (regathered for dW, or recomputed).

    ``reference``: it also runs in the forward of DPO's reference.
    """
    ranks = group(layout, message.axis).ranks
    axis = message.axis.partition("_")[0]  # both of 2D tp count as tp
    times *= message.times
    if op.recomputed:
        message = message.uncast
    if message.forward:
        forwards = 1 + op.recomputed + reference
        yield RepeatedMessage(axis, message.forward, times * forwards, message.payload, ranks, message.axis)
    for collective, payload in message.scales:
        yield RepeatedMessage(axis, collective, times, payload, ranks, message.axis)
    if message.regather and not op.recomputed:
        yield RepeatedMessage(axis, message.regather, times, message.uncast.payload, ranks, message.axis)
    if message.backward:
        payload, parts = message.payload, message.backward_parts
        payload = payload if message.backward_payload is None else message.backward_payload // parts
        yield RepeatedMessage(axis, message.backward, times * parts, payload, ranks, message.axis)


def _list_p2p_messages(counts: Counts, layout: Layout, *, chunk: int, micro_batches: int) -> Iterator[RepeatedMessage]:
    """Yield a stage's sends: its output to the next stage and its input's gradient back, unless on the same rank."""
    if layout.pp == 1:
        return
    last = layout.pp * layout.v - 1
    turn_stage = layout.pp - 1 if layout.pipeline.is_v_shaped else -1  # this stage and the next are on one rank
    first_backward = find_first_backward_stage(counts.model, layout, counts.job)
    sends_gradient = chunk > first_backward and chunk - 1 != turn_stage
    forwards = 2 if counts.job.has_reference else 1  # the reference's and the policy's
    sends = micro_batches * (forwards * (chunk < last and chunk != turn_stage) + sends_gradient)
    if not sends:
        return
    yield from list_stage_messages(counts, layout, times=sends)


def list_stage_messages(counts: Counts, layout: Layout, *, times: int = 1) -> Iterator[RepeatedMessage]:
    """Yield the messages that carry a stream to the next stage: one, or a part from each rank of tp, gathered there."""
    size = counts.get_local(get_local_degrees(layout)).entry_bytes
    scatters = counts.job.stack.scatter_gather_tensors and layout.tp > 1 and not layout.sp
    yield RepeatedMessage("pp", "p2p", times, size // layout.tp if scatters else size, 2, "pp")
    if scatters:
        yield RepeatedMessage("tp", "all_gather", times, size, layout.tp, "tp")


def list_first_stages(layout: Layout) -> tuple[int, ...]:
    """Return the stages of the first pipeline rank."""
    return layout.pipeline.stages_of_rank(0, pp=layout.pp, v=layout.v)


def sum_traffic(counts: Counts, layout: Layout) -> tuple[Traffic, ...]:
    """Return the messages of the first pipeline rank, and the bytes that one rank sends, by axis and collective."""
    totals: dict[tuple[str, str], tuple[int, int]] = {}
    for message in list_messages(counts, layout, chunks=list_first_stages(layout)):
        key = message.axis, message.collective
        count, sent = totals.get(key, (0, 0))
        bytes_each = count_sent_bytes(message.collective, payload=message.payload, ranks=message.ranks)
        totals[key] = count + message.times, sent + message.times * bytes_each
    return tuple(
        Traffic(axis=axis, collective=collective, calls=count, bytes=sent)
        for (axis, collective), (count, sent) in sorted(totals.items())
    )

"""Memory of one pipeline rank in bytes: states, and the peak of a step with its cause.

    peak = max over (every pass through a stage + what is in flight during it), and over the update

The peak of a pass follows from its stage (``passes/``); what is in flight during it from the schedule
(``in_flight.py``): activations of other micro-batches, allocated gradient sums, messages in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import nlargest
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple, TypeVar

from fivefold.bounded_types import COUNTED_BYTES
from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.schedule import schedule
from fivefold.layout.schedule.pipeline_schedule import ScheduleName
from fivefold.layout.schedule.table import Table
from fivefold.layout.sharding import get_policy
from fivefold.layout.spec import Layout
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.ddp_buckets import count_largest_gradient, list_update_groups
from fivefold.planner.counts.memory.in_flight import GatheredHeads, LivePass, PassOptions, list_unpipelined_passes
from fivefold.planner.counts.memory.passes import (
    count_b_freed_bytes,
    count_deferred_bytes,
    count_w_reduced_bytes,
    list_pass_moments,
    pass_peak,
)
from fivefold.planner.counts.memory.passes.rules import PassRules, pass_rules
from fivefold.planner.counts.memory.stages import (
    ModelChunk,
    build_stages,
    count_expert_table_bytes,
    count_gathered_head_bytes,
    count_gathered_stage_bytes,
    count_input_bytes,
    count_spare_gradient_bytes,
    describe,
    make_stages_key,
    scale_index_bytes,
)
from fivefold.planner.counts.memory.states import (
    UnitStates,
    count_reduced_width,
    updates_flat_tensor,
)
from fivefold.planner.counts.update import count_scratch_bytes

ORDER = {"F": 0, "B": 1, "BW": 1, "W": 2}
GROUPS_OF_A_SIZE = 3  # groups of micro-batches after which more of the same size change no peak

Value = TypeVar("Value")


class PeakMoment(NamedTuple):
    """Live bytes at one moment of a step; ``live_bytes`` is the sum of all fields after it except ``kept_bytes``."""

    cause: str
    live_bytes: int
    kept_bytes: int  # activations of the other micro-batches in flight
    gradients_bytes: int  # sums, and this rank's reduced shard of them
    states_bytes: int  # resident weights, optimizer states, inputs
    activations_bytes: int  # kept for a backward, of all micro-batches
    gathers_bytes: int  # gathered weights
    logits_bytes: int
    temporary_bytes: int  # gradients of activations and of single weights, scratch, copies made by the update


class RankMemory(NamedTuple):
    """Bytes of one pipeline rank; the fields are those of ``step.StageMemory``."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    peak_bytes: int
    peak_cause: str
    updated_numel: int  # elements that the optimizer updates here
    joined_numel: int  # of these, those that are updated at once, if software joins them to one tensor
    passes_bytes: int = 0  # the peak of forwards and backwards, without the update
    offloaded_bytes: int = 0  # shards of weights in host memory


class RankCache(dict[tuple[object, ...], list[RankMemory]]):
    """Memory of all pipeline ranks, by the bytes of their stages and the schedule."""


def count_rank_memory(counts: Counts, layout: Layout) -> list[RankMemory]:
    """Return the memory of every pipeline rank, in order.

    It is computed once for layouts with equal stages and schedule.
    """
    cache = counts.caches.get_cache(RankCache)
    key = (*make_stages_key(counts, layout), layout.schedule, layout.pp, layout.v)
    if (known := cache.get(key)) is not None:
        return known
    rank_bytes = _count_rank_bytes(pass_rules(counts, layout, build_stages(counts, layout)))
    fullest = _find_pipelined_peaks(rank_bytes) if layout.pp > 1 else [_find_unpipelined_peak(rank_bytes)]
    ranks = cache[key] = [_rank_memory(rank_bytes, rank, peak) for rank, peak in enumerate(fullest)]
    return ranks


class PassesPeak(NamedTuple):
    """The largest bytes of a rank's passes, including what is in flight, the cause, and the largest activations."""

    live_bytes: int
    cause: str
    kept_bytes: int


def _find_unpipelined_peak(rank_bytes: RankBytes) -> PassesPeak:
    """Return the peak of the passes without a pipeline."""
    rules = rank_bytes.rules
    passes = list_unpipelined_passes(*rank_bytes.schedule[-2:])
    peaks = {pass_kind: pass_peak(rules, pass_kind) for pass_kind in dict.fromkeys(kind for kind, _ in passes)}
    _check_sizes([[size for size, _ in peaks.values()]], rank_bytes.layout)
    live_bytes, kept_bytes = [], []
    for live_pass in passes:
        pass_kind, counts = live_pass
        in_flight = _multiply_counts(rank_bytes, live_pass, 0)
        live_bytes.append(sum(in_flight) + peaks[pass_kind][0])
        own_bytes = _count_micro_batch_bytes(rank_bytes, pass_kind.kind, pass_kind.stage)
        kept_bytes.append(sum(in_flight[:2]) + counts[-2] * rules.stream_bytes + own_bytes)
    fullest = passes[live_bytes.index(max(live_bytes))].pass_kind
    return PassesPeak(max(live_bytes), describe(peaks[fullest][1], rules.stages.chunks[0]), max(kept_bytes))


def _find_pipelined_peaks(rank_bytes: RankBytes) -> list[PassesPeak]:
    """Return the peak of every rank's passes; those of all ranks are compared as arrays."""
    import numpy as np

    from fivefold.planner.counts.memory.pipelined_passes import group_equal_passes, list_live_passes

    rules, chunks = rank_bytes.rules, rank_bytes.rules.stages.chunks
    numbers, rank_of, distinct, places = list_live_passes(*rank_bytes.schedule)
    representatives, place = group_equal_passes(*rank_bytes.schedule, rules.first_equal_stages)
    peaks = [pass_peak(rules, distinct[pass_kind]) for pass_kind in representatives]
    starts = np.searchsorted(rank_of, np.arange(len(rank_bytes.stages) + 1)).tolist()
    numbers_by_rank = [numbers[start:end] for start, end in pairwise(starts)]
    bytes_per_count = np.array(rank_bytes.bytes_per_count)
    activation_counts = 2 * len(rank_bytes.stages[0])
    in_flight, activations_in_flight = (
        np.concatenate(  # a product of integers by einsum takes three quarters of the time of @
            [
                np.einsum("pc,c->p", rows[:, :n], sizes[:n])
                for rows, sizes in zip(numbers_by_rank, bytes_per_count, strict=True)
            ]
        )
        for n in (bytes_per_count.shape[1], activation_counts)
    )
    pass_bytes = np.array(_check_sizes([[size for size, _ in peaks]], rank_bytes.layout)[0])
    live = in_flight + pass_bytes[place]
    own_bytes = np.array(
        [
            _count_micro_batch_bytes(rank_bytes, distinct[pass_kind].kind, distinct[pass_kind].stage)
            for pass_kind in representatives
        ]
    )
    activations = activations_in_flight + numbers[:, -2] * rules.stream_bytes + own_bytes[place]
    kept_bytes, top_bytes = (np.maximum.reduceat(values, starts[:-1]).tolist() for values in (activations, live))
    ranks = []
    for rank, (start, end) in enumerate(pairwise(starts)):
        fullest = start + int(live[start:end].argmax())
        cause = describe(peaks[place[fullest]][1], chunks[distinct[places[fullest]].stage])
        ranks.append(PassesPeak(top_bytes[rank], cause, kept_bytes[rank]))
    return ranks


def _list_passes(rank_bytes: RankBytes, rank: int) -> Iterator[LivePass]:
    """Yield the passes of a rank that can be its peak; in time order without a pipeline."""
    if rank_bytes.layout.pp == 1:
        yield from list_unpipelined_passes(*rank_bytes.schedule[-2:])
        return
    from fivefold.planner.counts.memory.pipelined_passes import list_live_passes

    yield from list_live_passes(*rank_bytes.schedule).iterate_rank(rank)


def _multiply_counts(rank_bytes: RankBytes, live_pass: LivePass, rank: int) -> list[int]:
    """Return the bytes of each element of ``LivePass.counts``."""
    return [count * size for count, size in zip(live_pass.counts, rank_bytes.bytes_per_count[rank], strict=True)]


def list_live_bytes(counts: Counts, layout: Layout, *, rank: int = 0) -> list[PeakMoment]:
    """Return the live bytes of a rank at every moment that could be its peak, in order.

    Without a pipeline: the first micro-batch, the second, which equals all others, and the last. With one: one pass of
    each kind through each stage, with the most in flight (``planner/time/memory_over_time.py`` has every action).
    """
    rank_bytes = _count_rank_bytes(pass_rules(counts, layout, build_stages(counts, layout)))
    fullest: dict[tuple[int, ...], tuple[int, LivePass]] = {}
    for number, live_pass in enumerate(_list_passes(rank_bytes, rank)):
        sort_key = (live_pass.pass_kind.stage, ORDER[live_pass.pass_kind.kind]) if layout.pp > 1 else (number,)
        size = pass_peak(rank_bytes.rules, live_pass.pass_kind)[0] + sum(_multiply_counts(rank_bytes, live_pass, rank))
        fullest[sort_key] = max(fullest.get(sort_key, (-1, live_pass)), (size, live_pass), key=itemgetter(0))
    moments = [
        moment for sort_key in sorted(fullest) for moment in _list_moments(rank_bytes, fullest[sort_key][1], rank)
    ]
    base = rank_bytes.resident_bytes[rank]
    gradients = _count_gradients(rank_bytes.rules, rank_bytes.states[rank])
    update = rank_bytes.update_bytes[rank]
    if rank_bytes.rules.reductions.is_persistent:
        base -= gradients
    temporary = update + rank_bytes.recv_buffer_bytes[rank]
    return [*moments, PeakMoment("optimizer", base + gradients + temporary, 0, gradients, base, 0, 0, 0, temporary)]


class PassMoments(NamedTuple):
    """The moments of a pass, and the bytes of all micro-batches' activations before and after it."""

    kept_before: int
    kept_after: int
    moments: list[PeakMoment]


def iterate_pass_moments(
    counts: Counts, layout: Layout, *, rank: int = 0, micro_batches: int = 1
) -> Iterator[PassMoments]:
    """Yield the moments of each pass of ``list_live_bytes``.

    With a pipeline of every pass of ``micro_batches``, in time order.
    """
    rank_bytes = _count_rank_bytes(pass_rules(counts, layout, build_stages(counts, layout)))
    passes = _list_passes(rank_bytes, 0)
    if layout.pp > 1:
        from fivefold.planner.counts.memory.pipelined_passes import iterate_passes

        table = schedule(
            layout.schedule,
            pp=layout.pp,
            v=layout.v,
            micro_batches=micro_batches,
            first_backward=rank_bytes.rules.first_backward,
        )
        passes = iterate_passes(table, rank, rank_bytes.schedule[-1])
    return (_pass_moments(rank_bytes, live_pass, rank) for live_pass in passes)


def make_table(layout: Layout, job: Job) -> Table:
    """Return the schedule of a layout, shortened if that does not change the maximum of live micro-batches."""
    return schedule(layout.schedule, pp=layout.pp, v=layout.v, micro_batches=_count_enough_micro_batches(layout, job))


def _count_enough_micro_batches(layout: Layout, job: Job) -> int:
    """Return the number of micro-batches that is enough to reach the peak.

    After the warm-up, only GPipe holds more. An interleaved schedule whose groups are of two sizes, pp + 1 and then
    pp micro-batches, needs ``GROUPS_OF_A_SIZE`` of each: of more, each holds what the one before it does. Without such
    groups the number equals the one that ``planner/time/steady_state.py`` simulates.
    """
    pp, micro_batches = layout.pp, layout.micro_batches(job)
    if pp == 1:
        return min(3, micro_batches)
    remainder = micro_batches % pp
    if layout.pipeline.is_interleaved and remainder:
        larger = min(remainder, GROUPS_OF_A_SIZE)
        is_long = micro_batches // pp >= remainder + GROUPS_OF_A_SIZE
        return (larger + GROUPS_OF_A_SIZE) * pp + larger if is_long else micro_batches
    if layout.pipeline.forwards_first or micro_batches <= 4 * pp + remainder:
        return micro_batches
    return 3 * pp + remainder


class RankBytes(NamedTuple):
    """The bytes that the pipeline ranks of one layout hold; lists have one element for each rank."""

    layout: Layout
    rules: PassRules
    schedule: tuple[ScheduleName, int, int, int, PassOptions]  # as ``list_live_passes`` takes it
    stages: Sequence[tuple[int, ...]]
    states: list[UnitStates]
    resident_bytes: list[int]  # allocated throughout a step
    recv_buffer_bytes: list[int]  # buffers of messages, also allocated throughout a step
    joined_numels: list[int]  # elements that are updated at once
    update_bytes: list[int]  # copies of gradients and scratch of the update
    bytes_per_count: list[list[int]]  # bytes for each element of ``LivePass.counts``, by rank
    kept_bytes: list[int]  # by stage: activations of one micro-batch on the device, until its backward


def _count_rank_bytes(rules: PassRules) -> RankBytes:
    """Return what is allocated on the ranks during each pass and throughout; equal ranks are counted once."""
    counts, layout, job = rules.counts, rules.layout, rules.counts.job
    reductions, chunks = rules.reductions, rules.stages.chunks
    tied = reductions.table.head_accumulates and reductions.table.is_output
    gathered_heads: GatheredHeads = ("tied" if tied else "own") if rules.gathers_weights else ""
    pass_rules_key = PassOptions(
        reductions.pending_after,
        rules.keeps_gathered,
        rules.buffers.has_recv_buffers,
        gathered_heads,
        rules.first_backward,
    )
    schedule_key = layout.schedule, layout.pp, layout.v, _count_enough_micro_batches(layout, job), pass_rules_key
    stages = make_table(layout, job).rank_stages if layout.pp > 1 else ((0,),)
    max_count = 1
    if layout.pp > 1:
        from fivefold.planner.counts.memory.pipelined_passes import list_live_passes

        max_count = int(list_live_passes(*schedule_key).counts.max())
    kinds = [tuple(rules.first_equal_stages[stage] for stage in held) for held in stages]
    first_equal = [kinds.index(rank_kinds) for rank_kinds in kinds]  # the first rank with equal stages

    def count_distinct(count: Callable[[tuple[int, ...]], Value]) -> list[Value]:
        known = {rank: count(stages[rank]) for rank in set(first_equal)}
        return [known[rank] for rank in first_equal]

    kept_bytes = [
        _count_on_device(rules, chunks[kind])
        - rules.stream_bytes * (rules.buffers.has_recv_buffers and kind > 0 and not rules.offloads_activations)
        + rules.buffers.output_bytes(kind)
        for kind in rules.first_equal_stages
    ]
    totals = count_distinct(lambda held: _sum_states(rules, held))
    gradient_bytes = [_count_gradients(rules, total) if reductions.is_persistent else 0 for total in totals]
    joined_numels = count_distinct(lambda held: max(_list_update_groups(rules, held)))
    staging_bytes = count_distinct(lambda held: _count_staging_bytes(rules, held))
    scratch = count_distinct(lambda held: count_scratch_bytes(counts, layout, chunks=held))
    inputs = count_input_bytes(counts.model, job, layout=layout)
    table_bytes = [count_expert_table_bytes(counts.model, layout, stages=held) for held in stages]
    index_bytes = count_distinct(lambda held: scale_index_bytes(counts, layout, stages=held))
    spare_bytes = count_distinct(
        lambda held: count_spare_gradient_bytes(job, [chunks[stage] for stage in held], layout=layout)
    )
    weights = count_distinct(lambda held: _count_bytes_per_count(rules, held, gathered_heads, kept_bytes))
    return RankBytes(
        layout=layout,
        rules=rules,
        schedule=schedule_key,
        stages=stages,
        states=totals,
        resident_bytes=[
            _count_parameters(rules, total) + total.moments + inputs + sum(others)
            for total, *others in zip(
                totals, gradient_bytes, table_bytes, index_bytes, spare_bytes, staging_bytes, strict=True
            )
        ],
        recv_buffer_bytes=[_count_receive_buffers(rules, held) for held in stages],
        joined_numels=joined_numels,
        update_bytes=[
            _count_update_bytes(job, layout, numel, size) for numel, size in zip(joined_numels, scratch, strict=True)
        ],
        bytes_per_count=_check_sizes(weights, layout, times=max_count),
        kept_bytes=kept_bytes,
    )


def _rank_memory(rank_bytes: RankBytes, rank: int, peak: PassesPeak) -> RankMemory:
    """Return the memory of a rank whose passes have this peak."""
    total = rank_bytes.states[rank]
    base = rank_bytes.resident_bytes[rank] + rank_bytes.recv_buffer_bytes[rank]
    gradients = _count_gradients(rank_bytes.rules, total)
    passes_peak = base + peak.live_bytes
    zero_policy = get_policy(rank_bytes.layout, rank_bytes.rules.counts.job)
    gradients_left = rank_bytes.rules.reductions.is_persistent or zero_policy.host_gradients == "buckets"
    update = base + (0 if gradients_left else gradients) + rank_bytes.update_bytes[rank]
    return RankMemory(
        parameters_bytes=_count_parameters(rank_bytes.rules, total),
        gradients_bytes=gradients,
        optimizer_bytes=total.moments,
        activations_bytes=peak.kept_bytes,
        peak_bytes=max(update, passes_peak),
        peak_cause="optimizer" if update > passes_peak else peak.cause,
        updated_numel=total.updated_numel,
        joined_numel=rank_bytes.joined_numels[rank],
        passes_bytes=passes_peak,
        offloaded_bytes=total.offloaded,
    )


def _pass_moments(rank_bytes: RankBytes, live_pass: LivePass, rank: int) -> PassMoments:
    """Return the moments of a pass, with activations before and after it."""
    moments = list(_list_moments(rank_bytes, live_pass, rank))
    pass_kind = live_pass.pass_kind
    other_bytes = moments[0].kept_bytes
    kept = rank_bytes.kept_bytes[pass_kind.stage]
    deferred = count_deferred_bytes(rank_bytes.rules, pass_kind.stage) if pass_kind.kind in ("B", "W") else 0
    before, after = {"F": (0, kept), "B": (kept, deferred), "BW": (kept, 0), "W": (deferred, 0)}[pass_kind.kind]
    return PassMoments(other_bytes + before, other_bytes + after, moments)


def _list_moments(rank_bytes: RankBytes, live_pass: LivePass, rank: int) -> Iterator[PeakMoment]:
    """Yield the moments of a pass, including what is in flight during it."""
    stages = len(rank_bytes.stages[rank])
    in_flight = _multiply_counts(rank_bytes, live_pass, rank)
    other_bytes = sum(in_flight[: 2 * stages])
    gradient_sums = sum(in_flight[2 * stages : 6 * stages])
    base = rank_bytes.resident_bytes[rank]
    gathered = sum(in_flight[6 * stages : 7 * stages])
    messages = in_flight[-1] + rank_bytes.recv_buffer_bytes[rank]
    if rank_bytes.rules.reductions.is_persistent:
        gradients = _count_gradients(rank_bytes.rules, rank_bytes.states[rank])
        gradient_sums, base = gradient_sums + gradients, base - gradients
    chunk = rank_bytes.rules.stages.chunks[live_pass.pass_kind.stage]
    for moment in list_pass_moments(rank_bytes.rules, live_pass.pass_kind, include_non_peak_units=True):
        logits = min(moment.logits, moment.other)
        part_bytes = (
            gradient_sums + moment.gradients,
            base,
            other_bytes + moment.activations,
            gathered + moment.gathered,
            logits,
            moment.other - logits + messages,
        )
        yield PeakMoment(describe(moment.cause, chunk), sum(part_bytes), other_bytes, *part_bytes)


def _check_sizes(sizes: list[list[int]], layout: Layout, *, times: int = 1) -> list[list[int]]:
    """Return ``sizes`` if ``times`` the sum of each row fits 64-bit integers; else raise a ``UserError``."""
    if (max_bytes := times * max(sum(map(abs, row)) for row in sizes)) > COUNTED_BYTES:
        raise UserError(
            f"layout {str(layout)!r} would hold about {max_bytes:.0e} bytes on a rank, more than the "
            f"{COUNTED_BYTES:.0e} that can be counted; shorten the sequence, or lower mbs or the model"
        )
    return sizes


# What is in flight during a pass


def _count_bytes_per_count(
    rules: PassRules, rank_stages: Sequence[int], gathered_heads: GatheredHeads, kept_bytes: Sequence[int]
) -> list[int]:
    """Return the bytes for each element of ``LivePass.counts``, on a rank that holds these stages."""
    reductions = rules.reductions
    chunks = [rules.stages.chunks[stage] for stage in rank_stages]
    in_flight = [0 if rules.offloads_activations else kept_bytes[stage] for stage in rank_stages]
    split = rules.layout.pipeline.splits_backward and not rules.offloads_activations
    deferred = [count_deferred_bytes(rules, stage) if split else 0 for stage in rank_stages]
    sums = [0 if reductions.is_persistent else _count_kept_gradients(rules, chunk.states) for chunk in chunks]
    if reductions.keeps_unsharded:  # the bucket stays allocated to the end of the step
        with_head = [chunk.groups[-1].group.name == "head" for chunk in chunks]
        sums = [size + reductions.bucket_bytes * head for size, head in zip(sums, with_head, strict=True)]
    made_by_w = [
        0
        if reductions.is_persistent
        else sum(unit.group.times * reductions.count_expert_sums_by_w(unit) for unit in chunk.groups)
        for chunk in chunks
    ]
    if reductions.every_micro_batch and not reductions.is_bucketed:
        made_by_w = [count_w_reduced_bytes(rules, stage) if split else 0 for stage in rank_stages]
    elif rules.retains_graph and split and not reductions.is_persistent:
        made_by_w = sums
    sums = [table_sums - by_w for table_sums, by_w in zip(sums, made_by_w, strict=True)]
    freed_by_b = [
        -count_b_freed_bytes(rules, stage) if rules.layout.pipeline.splits_backward else 0 for stage in rank_stages
    ]
    freed_by_reduce = [
        _count_gradients(rules, chunk.states) - _count_kept_gradients(rules, chunk.states) - freed
        for chunk, freed in zip(chunks, freed_by_b, strict=True)
    ]
    if (
        reductions.table.head_accumulates
        and {0, len(rules.stages.chunks) - 1} <= {*rank_stages}
        and len(rank_stages) > 1
    ):
        # the head allocates the table's sums with its first gradient
        table = reductions.table.states
        table_sums = 0 if reductions.is_persistent else table.sums
        sums[0] -= _count_kept_gradients(rules, table) if table_sums else 0
        job, model = rules.counts.job, rules.counts.model
        by_w = split and reductions.every_micro_batch and not job.stack.loss_facts.chunked and not model.mtp_depth
        (made_by_w if by_w else sums)[-1] += table_sums
        freed_by_reduce[0] += _count_kept_gradients(rules, table) - table_sums if table_sums else 0
    shared = reductions.table.states.gathered if reductions.table.is_local else 0
    gathered_heads_bytes = [
        count_gathered_head_bytes(chunk.groups, table=shared) if gathered_heads else 0 for chunk in chunks
    ]
    gathered = (
        [count_gathered_stage_bytes(chunk.groups, embedding=rules.keeps_embedding) for chunk in chunks]
        if rules.keeps_gathered
        else gathered_heads_bytes
    )
    return [*in_flight, *deferred, *sums, *made_by_w, *freed_by_b, *freed_by_reduce, *gathered, 0, rules.stream_bytes]


def _count_micro_batch_bytes(rank_bytes: RankBytes, kind: str, stage: int) -> int:
    """Return the bytes that the micro-batch itself keeps after its pass."""
    return (
        rank_bytes.kept_bytes[stage]
        if kind == "F"
        else count_deferred_bytes(rank_bytes.rules, stage)
        if kind == "B"
        else 0
    )


def _count_on_device(rules: PassRules, chunk: ModelChunk) -> int:
    """Return a micro-batch's activations on the device; offloaded: those of two units, one running, one in transfer."""
    if rules.offloads_activations:
        unit_bytes = [unit.later_profile.kept_bytes for unit in chunk.groups for _ in range(min(2, unit.group.times))]
        return sum(nlargest(2, unit_bytes))
    return chunk.kept_bytes


def _count_receive_buffers(rules: PassRules, rank_stages: Sequence[int]) -> int:
    """Return the bytes of a step's receive buffers, and of what backwards leave that are not simulated."""
    if not rules.buffers.has_recv_buffers:
        return 0
    layout, job = rules.layout, rules.counts.job
    micro_batches = layout.micro_batches(job)
    last = len(rules.stages.chunks) - 1
    unsimulated = micro_batches - _count_enough_micro_batches(layout, job)
    inputs, outputs = (sum(stage != end for stage in rank_stages) for end in (0, last))
    leftover = inputs + outputs * (layout.v > 1)
    return rules.stream_bytes * (micro_batches * (inputs + outputs) + unsimulated * leftover)


# States


def _sum_states(rules: PassRules, rank_stages: Sequence[int]) -> UnitStates:
    stage_states = [rules.stages.chunks[stage].states for stage in rank_stages]
    total = stage_states[0] if len(stage_states) == 1 else sum(stage_states, start=UnitStates())
    if not updates_flat_tensor(rules.layout, rules.counts.job):
        return total
    n_steps = len(_list_update_groups(rules, rank_stages))
    return total._replace(moments=total.moments + 4 * n_steps)


def _list_update_groups(rules: PassRules, rank_stages: Sequence[int]) -> list[int]:
    """Return the elements that are updated at once, one group after another."""
    numel = sum(rules.stages.chunks[stage].states.updated_numel for stage in rank_stages)
    is_grouped = rules.layout.zero == 3 and not get_policy(rules.layout, rules.counts.job).weights_stay
    if not is_grouped or not 0 < rules.counts.job.stack.update_group_size < numel:
        return [numel]
    return list_update_groups(rules.counts, rules.layout, rank_stages)


def _count_staging_bytes(rules: PassRules, rank_stages: Sequence[int]) -> int:
    """Return the bytes through which gradients come back from host memory: DeepSpeed keeps a largest weight's.

    Source: deepspeedai/DeepSpeed@0.19.8:deepspeed/runtime/zero/stage_1_and_2.py, temp_grad_buffer_for_gpu_offload.
    """
    counts, layout = rules.counts, rules.layout
    if get_policy(layout, counts.job).host_gradients != "buckets":
        return 0
    return count_largest_gradient(counts, layout, rank_stages) * counts.job.precision.high_precision_bytes


def _count_parameters(rules: PassRules, total: UnitStates) -> int:
    return (0 if rules.gathers_weights else total.gathered) + total.separate


def _count_gradients(rules: PassRules, total: UnitStates) -> int:
    """Return the bytes of the gradients that the optimizer reads."""
    return total.sums if rules.reductions.keeps_unsharded else total.reduced


def _count_kept_gradients(rules: PassRules, total: UnitStates) -> int:
    """Return the bytes of gradients between micro-batches."""
    return total.reduced if rules.reductions.every_micro_batch or rules.reductions.is_bucketed else total.sums


def _count_update_bytes(job: Job, layout: Layout, numel: int, scratch_bytes: int) -> int:
    """Return the bytes that the update of ``numel`` elements holds on the device in addition to states and gradients.

    Updated weights are cast on the device before they are copied to shards in host memory.
    """
    recipe, copied_bytes, offloaded = job.precision, 0, layout.list_offloaded(job)
    if "optimizer" in offloaded and ("parameters" in offloaded or get_policy(layout, job).host_gradients):
        return 0  # the CPU updates what lies in host memory
    if "optimizer" in offloaded:  # updated by the CPU
        scratch_bytes = 0
    elif "parameters" in offloaded and not recipe.sends_masters:
        scratch_bytes = max(scratch_bytes, numel * recipe.high_precision_bytes)
    if count_reduced_width(layout, job) != recipe.updated_bytes:  # a copy of the gradients in the update's dtype
        copied_bytes += recipe.updated_bytes
    if "gradients" in job.stack.flat_copies:
        copied_bytes += recipe.summed_bytes
    return scratch_bytes + numel * copied_bytes

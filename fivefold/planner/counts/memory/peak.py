"""Memory of one pipeline rank in bytes: states, and the peak of a step with its cause.

    peak = max over (every pass through a stage + what is in flight during it), and over the update

The peak of a pass follows from its stage (``passes.py``); what is in flight during it from the schedule
(``in_flight.py``): activations of other micro-batches, allocated gradient sums, messages in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import nlargest
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple, TypeVar

import numpy as np

from fivefold.bounded_types import COUNTED_BYTES
from fivefold.job import Job
from fivefold.layout.schedule import schedule
from fivefold.layout.schedule.pipeline_schedule import ScheduleName
from fivefold.layout.schedule.table import Table
from fivefold.layout.spec import Layout
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.memory.in_flight import (
    Heads,
    Ints,
    LivePass,
    LivePasses,
    Rules,
    group_equal_passes,
    iterate_passes,
    live_passes,
)
from fivefold.planner.counts.memory.passes import (
    PassRules,
    deferred_bytes,
    freed_in_b,
    pass_moments,
    pass_peak,
    pass_rules,
    reduced_by_w,
)
from fivefold.planner.counts.memory.stages import (
    ModelChunk,
    build_stages,
    describe,
    head_bytes,
    held_bytes,
    inputs_bytes,
    scale_index_bytes,
    spare_gradients_bytes,
    stages_key,
)
from fivefold.planner.counts.memory.states import UnitStates, updates_one
from fivefold.planner.counts.update import scratch_bytes
from fivefold.record import UserError

ORDER = {"F": 0, "B": 1, "BW": 1, "W": 2}

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
    updated: int  # elements that the optimizer updates here
    passes_bytes: int = 0  # the peak of forwards and backwards, without the update


class RankCache(dict[tuple[object, ...], list[RankMemory]]):
    """Memory of all pipeline ranks, by the bytes of their stages and the schedule."""


def memory(counts: Counts, layout: Layout) -> list[RankMemory]:
    """Return the memory of every pipeline rank, in order.

    It is computed once for layouts with equal stages and schedule.

    All passes of all ranks are compared as arrays.
    """
    cache, key = counts.caches.get_cache(RankCache), (*stages_key(counts, layout), layout.schedule, layout.pp, layout.v)
    if (known := cache.get(key)) is not None:
        return known
    stages = build_stages(counts, layout)
    rules, chunks = pass_rules(counts, layout, stages), stages.chunks
    rank_bytes = _count_held_by_ranks(rules)
    numbers, rank_of, distinct, places = rank_bytes.passes
    representatives, place = group_equal_passes(*rank_bytes.schedule, rules.kinds)
    peaks = [pass_peak(rules, distinct[pass_kind]) for pass_kind in representatives]
    in_flight = numbers * rank_bytes.weights[rank_of]
    live = in_flight.sum(axis=1) + np.array(_check_sizes([[size for size, _ in peaks]], layout)[0])[place]
    own_bytes = np.array(
        [
            _micro_batch_bytes(rank_bytes, distinct[pass_kind].kind, distinct[pass_kind].stage)
            for pass_kind in representatives
        ]
    )
    activations = (
        in_flight[:, : 2 * len(rank_bytes.stages[0])].sum(axis=1) + numbers[:, -2] * rules.stream + own_bytes[place]
    )
    starts = np.searchsorted(rank_of, np.arange(len(rank_bytes.stages) + 1))
    kept_bytes, top_bytes = (np.maximum.reduceat(values, starts[:-1]).tolist() for values in (activations, live))
    ranks = cache[key] = []
    for rank, (start, end) in enumerate(pairwise(starts.tolist())):
        fullest = start + int(live[start:end].argmax())
        cause = describe(peaks[place[fullest]][1], chunks[distinct[places[fullest]].stage])
        ranks.append(_rank_memory(rank_bytes, rank, top_bytes[rank], cause, kept=kept_bytes[rank]))
    return ranks


def list_live_bytes(counts: Counts, layout: Layout, *, rank: int = 0) -> list[PeakMoment]:
    """Return the live bytes of a rank at every moment that could be its peak, in order.

    Without a pipeline: the first micro-batch, the second, which equals all others, and the last. With one: one pass of
    each kind through each stage, with the most in flight (``planner/time/memory_over_time.py`` has every action).
    """
    rank_bytes = _count_held_by_ranks(pass_rules(counts, layout, build_stages(counts, layout)))
    fullest: dict[tuple[int, ...], tuple[int, LivePass]] = {}
    for number, live_pass in enumerate(rank_bytes.passes.row(rank)):
        sort_key = (live_pass.own.stage, ORDER[live_pass.own.kind]) if layout.pp > 1 else (number,)
        size = pass_peak(rank_bytes.rules, live_pass.own)[0] + int(np.dot(live_pass.counts, rank_bytes.weights[rank]))
        fullest[sort_key] = max(fullest.get(sort_key, (-1, live_pass)), (size, live_pass), key=itemgetter(0))
    moments = [moment for sort_key in sorted(fullest) for moment in _moments(rank_bytes, fullest[sort_key][1], rank)]
    base, gradients, update = (
        rank_bytes.base[rank],
        _gradients(rank_bytes.rules, rank_bytes.totals[rank]),
        rank_bytes.updates[rank],
    )
    if rank_bytes.rules.reductions.is_persistent:
        base -= gradients
    temporary = update + rank_bytes.received[rank]
    return [*moments, PeakMoment("optimizer", base + gradients + temporary, 0, gradients, base, 0, 0, 0, temporary)]


class PassMoments(NamedTuple):
    """The moments of a pass, and the bytes of all micro-batches' activations before and after it."""

    kept_before: int
    kept_after: int
    moments: list[PeakMoment]


def passes(counts: Counts, layout: Layout, *, rank: int = 0, micro_batches: int = 1) -> Iterator[PassMoments]:
    """Yield the moments of each pass of ``list_live_bytes``.

    With a pipeline of every pass of ``micro_batches``, in time order.
    """
    rank_bytes = _count_held_by_ranks(pass_rules(counts, layout, build_stages(counts, layout)))
    row = rank_bytes.passes.row(0)
    if layout.pp > 1:
        table = schedule(layout.schedule, pp=layout.pp, v=layout.v, micro_batches=micro_batches)
        row = iterate_passes(table, rank, rank_bytes.schedule[-1])
    return (_pass_moments(rank_bytes, live_pass, rank) for live_pass in row)


def make_table(layout: Layout, job: Job) -> Table:
    """Return the schedule of a layout, shortened if that does not change the maximum of live micro-batches."""
    return schedule(layout.schedule, pp=layout.pp, v=layout.v, micro_batches=_count_enough_micro_batches(layout, job))


def _count_enough_micro_batches(layout: Layout, job: Job) -> int:
    """Return the number of micro-batches that is enough to reach the peak.

    After the warm-up, only GPipe and interleaved schedules with uneven rounds hold more; the number equals the one that
    ``planner/time/steady_state.py`` simulates.
    """
    pp, micro_batches = layout.pp, layout.micro_batches(job)
    if pp == 1:
        return min(3, micro_batches)
    remainder = micro_batches % pp
    if (
        layout.pipeline.forwards_first
        or (layout.pipeline.is_interleaved and remainder)
        or micro_batches <= 4 * pp + remainder
    ):
        return micro_batches
    return 3 * pp + remainder


class HeldByRanks(NamedTuple):
    """The bytes that the pipeline ranks of one layout hold; lists have one element for each rank."""

    layout: Layout
    rules: PassRules
    schedule: tuple[ScheduleName, int, int, int, Rules]  # as ``live_passes`` takes it
    passes: LivePasses
    stages: Sequence[tuple[int, ...]]
    totals: list[UnitStates]
    base: list[int]  # allocated throughout a step
    received: list[int]  # buffers of messages, also allocated throughout a step
    updates: list[int]  # copies of gradients and scratch of the update
    weights: Ints  # bytes for each element of ``LivePass.counts``, by rank
    kept: list[int]  # by stage: activations of one micro-batch on the device, until its backward


def _count_held_by_ranks(rules: PassRules) -> HeldByRanks:
    """Return what is allocated on the ranks during each pass and throughout; equal ranks are counted once."""
    counts, layout, job = rules.counts, rules.layout, rules.counts.job
    reductions, chunks = rules.reductions, rules.stages.chunks
    tied = reductions.table.adds and reductions.table.is_output
    heads: Heads = ("tied" if tied else "own") if rules.gathers else ""
    pass_rules_key = Rules(reductions.pending_after, rules.keeps, rules.buffers.received, heads)
    schedule_key = layout.schedule, layout.pp, layout.v, _count_enough_micro_batches(layout, job), pass_rules_key
    passes_of_ranks = live_passes(*schedule_key)
    stages = make_table(layout, job).rank_stages if layout.pp > 1 else ((0,),)
    kinds = [tuple(rules.kinds[stage] for stage in held) for held in stages]
    first_equal = [kinds.index(rank_kinds) for rank_kinds in kinds]  # the first rank with equal stages

    def count_distinct(count: Callable[[tuple[int, ...]], Value]) -> list[Value]:
        known = {rank: count(stages[rank]) for rank in set(first_equal)}
        return [known[rank] for rank in first_equal]

    kept = [
        _count_on_device(rules, chunks[kind])
        - rules.stream * (rules.buffers.received and kind > 0 and not rules.offloads)
        + rules.buffers.output(kind)
        for kind in rules.kinds
    ]
    totals = count_distinct(lambda held: _total(rules, held))
    scratch = count_distinct(lambda held: scratch_bytes(counts, layout, chunks=held))
    inputs = inputs_bytes(counts.model, job, layout=layout)
    index_bytes = count_distinct(lambda held: scale_index_bytes(counts, layout, stages=held))
    spare_bytes = count_distinct(
        lambda held: spare_gradients_bytes(job, [chunks[stage] for stage in held], layout=layout)
    )
    weights = count_distinct(lambda held: _weights(rules, held, heads, kept))
    return HeldByRanks(
        layout=layout,
        rules=rules,
        schedule=schedule_key,
        passes=passes_of_ranks,
        stages=stages,
        totals=totals,
        base=[
            _parameters(rules, total)
            + total.moments
            + inputs
            + scales
            + spare_gradients
            + (_gradients(rules, total) if reductions.is_persistent else 0)
            for total, scales, spare_gradients in zip(totals, index_bytes, spare_bytes, strict=True)
        ],
        received=[_count_receive_buffers(rules, held) for held in stages],
        updates=[_count_gradient_copies(job, total) + size for total, size in zip(totals, scratch, strict=True)],
        weights=np.array(_check_sizes(weights, layout, times=int(passes_of_ranks.counts.max(initial=1)))),
        kept=kept,
    )


def _rank_memory(held: HeldByRanks, rank: int, top: int, cause: str, *, kept: int) -> RankMemory:
    """Return the memory of a rank whose fullest pass takes ``top`` bytes, including what is in flight."""
    total, base = held.totals[rank], held.base[rank] + held.received[rank]
    gradients, passes_peak = _gradients(held.rules, total), base + top
    update = base + (0 if held.rules.reductions.is_persistent else gradients) + held.updates[rank]
    if update > passes_peak:
        cause = "optimizer"
    parameters, peak = _parameters(held.rules, total), max(update, passes_peak)
    return RankMemory(parameters, gradients, total.moments, kept, peak, cause, total.updated, passes_peak)


def _pass_moments(held: HeldByRanks, live_pass: LivePass, rank: int) -> PassMoments:
    """Return the moments of a pass, with activations before and after it."""
    moments, pass_kind = list(_moments(held, live_pass, rank)), live_pass.own
    other_bytes, kept = moments[0].kept_bytes, held.kept[pass_kind.stage]
    late_size = deferred_bytes(held.rules, pass_kind.stage) if pass_kind.kind in ("B", "W") else 0
    before, after = {"F": (0, kept), "B": (kept, late_size), "BW": (kept, 0), "W": (late_size, 0)}[pass_kind.kind]
    return PassMoments(other_bytes + before, other_bytes + after, moments)


def _moments(held: HeldByRanks, live_pass: LivePass, rank: int) -> Iterator[PeakMoment]:
    """Yield the moments of a pass, including what is in flight during it."""
    stages, in_flight = len(held.stages[rank]), live_pass.counts * held.weights[rank]
    other_bytes, gradient_sums = int(in_flight[: 2 * stages].sum()), int(in_flight[2 * stages : 6 * stages].sum())
    base, gathered = held.base[rank], int(in_flight[6 * stages : 7 * stages].sum())
    messages = int(in_flight[-1]) + held.received[rank]
    if held.rules.reductions.is_persistent:
        gradients = _gradients(held.rules, held.totals[rank])
        gradient_sums, base = gradient_sums + gradients, base - gradients
    chunk = held.rules.stages.chunks[live_pass.own.stage]
    for moment in pass_moments(held.rules, live_pass.own, all_ends=True):
        logits = min(moment.logits, moment.rest)
        part_bytes = (
            gradient_sums + moment.gradients,
            base,
            other_bytes + moment.activations,
            gathered + moment.gathers,
            logits,
            moment.rest - logits + messages,
        )
        yield PeakMoment(describe(moment.cause, chunk), sum(part_bytes), other_bytes, *part_bytes)


def _check_sizes(sizes: list[list[int]], layout: Layout, *, times: int = 1) -> list[list[int]]:
    """Return ``sizes`` if ``times`` the sum of each row fits 64-bit integers; else raise a ``UserError``."""
    if (max_bytes := times * max(sum(map(abs, row)) for row in sizes)) > COUNTED_BYTES:
        raise UserError(
            f"layout {str(layout)!r} would hold about {max_bytes:.0e} bytes on a rank, and more than "
            f"{COUNTED_BYTES:.0e} are not counted; shorten the sequence, or lower mbs or the model"
        )
    return sizes


# What is in flight during a pass


def _weights(rules: PassRules, held: Sequence[int], heads: Heads, kept: Sequence[int]) -> list[int]:
    """Return the bytes for each element of ``LivePass.counts``, on a rank that holds these stages."""
    reductions, chunks = rules.reductions, [rules.stages.chunks[stage] for stage in held]
    in_flight = [0 if rules.offloads else kept[stage] for stage in held]
    split = rules.layout.pipeline.splits_backward and not rules.offloads
    deferred = [deferred_bytes(rules, stage) if split else 0 for stage in held]
    sums = [0 if reductions.is_persistent else _gradient_bytes(rules, chunk.states) for chunk in chunks]
    if reductions.stays:  # the bucket stays allocated to the end of the step
        with_head = [chunk.runs[-1].run.name == "head" for chunk in chunks]
        sums = [size + reductions.bucket * head for size, head in zip(sums, with_head, strict=True)]
    made_by_w = [
        0 if reductions.is_persistent or reductions.is_bucketed else reductions.experts_by_w(chunk.runs)
        for chunk in chunks
    ]
    if reductions.every_micro_batch and not reductions.is_bucketed:
        made_by_w = [reduced_by_w(rules, stage) if split else 0 for stage in held]
    elif rules.graph and split and not reductions.is_persistent:
        made_by_w = sums
    sums = [table_sums - by_w for table_sums, by_w in zip(sums, made_by_w, strict=True)]
    freed_by_b = [-freed_in_b(rules, stage) if rules.layout.pipeline.splits_backward else 0 for stage in held]
    freed_by_reduce = [
        _gradients(rules, chunk.states) - _gradient_bytes(rules, chunk.states) - freed
        for chunk, freed in zip(chunks, freed_by_b, strict=True)
    ]
    if reductions.table.adds and {0, len(rules.stages.chunks) - 1} <= {*held} and len(held) > 1:
        # the head allocates the table's sums with its first gradient
        table = reductions.table.states
        table_sums = 0 if reductions.is_persistent else table.sums
        sums[0] -= _gradient_bytes(rules, table) if table_sums else 0
        job, model = rules.counts.job, rules.counts.model
        by_w = split and reductions.every_micro_batch and job.stack.loss != "chunked" and not model.mtp_depth
        (made_by_w if by_w else sums)[-1] += table_sums
        freed_by_reduce[0] += _gradient_bytes(rules, table) - table_sums if table_sums else 0
    shared = reductions.table.states.gathered if reductions.table.here else 0
    of_heads = [head_bytes(chunk.runs, table=shared) if heads else 0 for chunk in chunks]
    gathered = [held_bytes(chunk.runs) for chunk in chunks] if rules.keeps else of_heads
    return [*in_flight, *deferred, *sums, *made_by_w, *freed_by_b, *freed_by_reduce, *gathered, 0, rules.stream]


def _micro_batch_bytes(held: HeldByRanks, kind: str, stage: int) -> int:
    """Return the bytes that the micro-batch itself keeps after its pass."""
    return held.kept[stage] if kind == "F" else deferred_bytes(held.rules, stage) if kind == "B" else 0


def _count_on_device(rules: PassRules, chunk: ModelChunk) -> int:
    """Return a micro-batch's activations on the device; offloaded: those of two units, one running, one in transfer."""
    if rules.offloads:
        unit_bytes = [unit.later.kept_bytes for unit in chunk.runs for _ in range(min(2, unit.run.times))]
        return sum(nlargest(2, unit_bytes))
    return chunk.kept


def _count_receive_buffers(rules: PassRules, held: Sequence[int]) -> int:
    """Return the bytes of a step's receive buffers, and of what backwards leave that are not simulated."""
    if not rules.buffers.received:
        return 0
    layout, job = rules.layout, rules.counts.job
    micro_batches, last = layout.micro_batches(job), len(rules.stages.chunks) - 1
    unplayed = micro_batches - _count_enough_micro_batches(layout, job)
    inputs, outputs = (sum(stage != end for stage in held) for end in (0, last))
    leftover = inputs + outputs * (layout.v > 1)
    return rules.stream * (micro_batches * (inputs + outputs) + unplayed * leftover)


# States


def _total(rules: PassRules, held: Sequence[int]) -> UnitStates:
    stage_states = [rules.stages.chunks[stage].states for stage in held]
    total = stage_states[0] if len(stage_states) == 1 else sum(stage_states, start=UnitStates())
    return total._replace(moments=total.moments + 4) if updates_one(rules.layout, rules.counts.job) else total


def _parameters(rules: PassRules, total: UnitStates) -> int:
    return (0 if rules.gathers else total.gathered) + total.apart


def _gradients(rules: PassRules, total: UnitStates) -> int:
    """Return the bytes of the gradients that the optimizer reads."""
    return total.sums if rules.reductions.stays else total.reduced


def _gradient_bytes(rules: PassRules, total: UnitStates) -> int:
    """Return the bytes of gradients between micro-batches."""
    return total.reduced if rules.reductions.every_micro_batch or rules.reductions.is_bucketed else total.sums


def _count_gradient_copies(job: Job, total: UnitStates) -> int:
    """Return the bytes of copies of the gradients during the update."""
    recipe, copy_bytes = job.precision, 0
    if recipe.summed_bytes != recipe.updated_bytes:  # a copy in the update's dtype
        copy_bytes = total.updated * recipe.updated_bytes
    return copy_bytes + (total.updated * recipe.summed_bytes if "gradients" in job.stack.flat_copies else 0)

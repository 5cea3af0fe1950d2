"""Memory of one pipeline rank in bytes: states, and the peak of a step with its cause.

    peak = max over (every pass through a stage + what lives beside it), and over the update

The peak of a pass follows from its stage (``passes.py``); what lives beside it from the schedule (``in_flight.py``):
activations of other micro-batches, allocated gradient sums, messages in flight.
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
    alike_passes,
    in_order,
    live_passes,
)
from fivefold.planner.counts.memory.passes import (
    PassRules,
    late_bytes,
    pass_moments,
    pass_peak,
    pass_rules,
    reduced_by_w,
)
from fivefold.planner.counts.memory.stages import (
    Chunk,
    describe,
    head_bytes,
    held_bytes,
    inputs_bytes,
    scale_index_bytes,
    spare_gradients_bytes,
    stages_key,
    stages_of,
)
from fivefold.planner.counts.memory.states import UnitStates, updates_one
from fivefold.planner.counts.update import scratch_bytes
from fivefold.record import Mistake

ORDER = {"F": 0, "B": 1, "BW": 1, "W": 2}

Value = TypeVar("Value")


class Moment(NamedTuple):
    """Live bytes at one moment of a step. ``live_bytes`` is the sum of all that follow it but ``kept_bytes``."""

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
    """Memory of every pipeline rank, in order; computed once for layouts with equal stages and schedule.

    All passes of all ranks are compared as arrays.
    """
    cache, key = counts.caches.of(RankCache), (*stages_key(counts, layout), layout.schedule, layout.pp, layout.v)
    if (known := cache.get(key)) is not None:
        return known
    stages = stages_of(counts, layout)
    rules, chunks = pass_rules(counts, layout, stages), stages.chunks
    held = _held_by_ranks(rules)
    numbers, rank_of, distinct, places = held.passes
    some, place = alike_passes(*held.schedule, rules.kinds)
    peaks = [pass_peak(rules, distinct[at]) for at in some]
    beside = numbers * held.weights[rank_of]
    live = beside.sum(axis=1) + np.array(_counted([[size for size, _ in peaks]], layout)[0])[place]
    own = np.array([_own_bytes(held, distinct[at].kind, distinct[at].stage) for at in some])
    alive = beside[:, : 2 * len(held.stages[0])].sum(axis=1) + numbers[:, -2] * rules.stream + own[place]
    starts = np.searchsorted(rank_of, np.arange(len(held.stages) + 1))
    kept, tops = (np.maximum.reduceat(each, starts[:-1]).tolist() for each in (alive, live))
    ranks = cache[key] = []
    for rank, (start, end) in enumerate(pairwise(starts.tolist())):
        best = start + int(live[start:end].argmax())
        cause = describe(peaks[place[best]][1], chunks[distinct[places[best]].stage])
        ranks.append(_rank_memory(held, rank, tops[rank], cause, kept=kept[rank]))
    return ranks


def over_time(counts: Counts, layout: Layout, *, rank: int = 0) -> list[Moment]:
    """Live bytes of a rank at every moment that could be its peak, in order.

    Without a pipeline: the first micro-batch, the second, which is like all others, and the last. With one: one pass of
    each kind through each stage, with the most beside it (``planner/time/memory_over_time.py`` has every action).
    """
    held = _held_by_ranks(pass_rules(counts, layout, stages_of(counts, layout)))
    fullest: dict[tuple[int, ...], tuple[int, LivePass]] = {}
    for number, live_pass in enumerate(held.passes.row(rank)):
        key = (live_pass.own.stage, ORDER[live_pass.own.kind]) if layout.pp > 1 else (number,)
        size = pass_peak(held.rules, live_pass.own)[0] + int(np.dot(live_pass.counts, held.weights[rank]))
        fullest[key] = max(fullest.get(key, (-1, live_pass)), (size, live_pass), key=itemgetter(0))
    found = [moment for key in sorted(fullest) for moment in _moments(held, fullest[key][1], rank)]
    base, gradients, update = held.base[rank], _gradients(held.rules, held.totals[rank]), held.updates[rank]
    if held.rules.reductions.lasting:
        base -= gradients
    temporary = update + held.received[rank]
    return [*found, Moment("optimizer", base + gradients + temporary, 0, gradients, base, 0, 0, 0, temporary)]


class PassMoments(NamedTuple):
    """The moments of a pass, and bytes of all micro-batches' activations before and after it."""

    kept_before: int
    kept_after: int
    moments: list[Moment]


def passes(counts: Counts, layout: Layout, *, rank: int = 0, micro_batches: int = 1) -> Iterator[PassMoments]:
    """The moments of each pass of ``over_time``; with a pipeline of every pass of ``micro_batches``, in time order."""
    held = _held_by_ranks(pass_rules(counts, layout, stages_of(counts, layout)))
    row = held.passes.row(0)
    if layout.pp > 1:
        table = schedule(layout.schedule, pp=layout.pp, v=layout.v, micro_batches=micro_batches)
        row = in_order(table, rank, held.schedule[-1])
    return (_pass_moments(held, live_pass, rank) for live_pass in row)


def table_of(layout: Layout, job: Job) -> Table:
    """The schedule of a layout, shortened where that does not change the most live micro-batches."""
    return schedule(layout.schedule, pp=layout.pp, v=layout.v, micro_batches=_enough(layout, job))


def _enough(layout: Layout, job: Job) -> int:
    """Number of micro-batches that is enough to see the peak: after the warm-up, only GPipe and interleaved schedules
    with uneven rounds hold more; as many as ``planner/time/steady_state.py`` plays.
    """
    pp, micro_batches = layout.pp, layout.micro_batches(job)
    if pp == 1:
        return min(3, micro_batches)
    over = micro_batches % pp
    if layout.pipeline.forwards_first or (layout.pipeline.interleaves and over) or micro_batches <= 4 * pp + over:
        return micro_batches
    return 3 * pp + over


class HeldByRanks(NamedTuple):
    """What the pipeline ranks of one layout hold, in bytes; lists have one element for each rank."""

    layout: Layout
    rules: PassRules
    schedule: tuple[ScheduleName, int, int, int, Rules]  # as ``live_passes`` takes it
    passes: LivePasses
    stages: Sequence[tuple[int, ...]]
    totals: list[UnitStates]
    base: list[int]  # what lives all through a step
    received: list[int]  # buffers of messages, which live all through a step too
    updates: list[int]  # copies of gradients and scratch of the update
    weights: Ints  # bytes for each element of ``LivePass.counts``, by rank
    kept: list[int]  # by stage: activations of one micro-batch on the device, until its backward


def _held_by_ranks(rules: PassRules) -> HeldByRanks:
    """Return what lives on the ranks beside each pass and throughout; equal ranks are counted once."""
    counts, layout, job = rules.counts, rules.layout, rules.counts.job
    reductions, chunks = rules.reductions, rules.stages.chunks
    tied = reductions.table.adds and reductions.table.is_output
    heads: Heads = ("tied" if tied else "own") if rules.gathers else ""
    told_apart = Rules(reductions.when, rules.keeps, rules.buffers.received, heads)
    timed = layout.schedule, layout.pp, layout.v, _enough(layout, job), told_apart
    found = live_passes(*timed)
    stages = table_of(layout, job).rank_stages if layout.pp > 1 else ((0,),)
    kinds = [tuple(rules.kinds[stage] for stage in held) for held in stages]
    first = [kinds.index(each) for each in kinds]  # the first rank with equal stages

    def of_each(count: Callable[[tuple[int, ...]], Value]) -> list[Value]:
        known = {rank: count(stages[rank]) for rank in set(first)}
        return [known[rank] for rank in first]

    kept = [
        _on_device(rules, chunks[kind])
        - rules.stream * (rules.buffers.received and kind > 0 and not rules.offloads)
        + rules.buffers.output(kind)
        for kind in rules.kinds
    ]
    totals = of_each(lambda held: _total(rules, held))
    scratch = of_each(lambda held: scratch_bytes(counts, layout, chunks=held))
    inputs = inputs_bytes(counts.model, job, layout=layout)
    index = of_each(lambda held: scale_index_bytes(counts, layout, stages=held))
    spare = of_each(lambda held: spare_gradients_bytes(job, [chunks[stage] for stage in held], layout=layout))
    weights = of_each(lambda held: _weights(rules, held, heads, kept))
    return HeldByRanks(
        layout=layout,
        rules=rules,
        schedule=timed,
        passes=found,
        stages=stages,
        totals=totals,
        base=[
            _parameters(rules, total)
            + total.moments
            + inputs
            + scales
            + unused
            + (_gradients(rules, total) if reductions.lasting else 0)
            for total, scales, unused in zip(totals, index, spare, strict=True)
        ],
        received=[_received(rules, held) for held in stages],
        updates=[_widened(job, total) + size for total, size in zip(totals, scratch, strict=True)],
        weights=np.array(_counted(weights, layout, times=int(found.counts.max(initial=1)))),
        kept=kept,
    )


def _rank_memory(held: HeldByRanks, rank: int, top: int, cause: str, *, kept: int) -> RankMemory:
    """Return the memory of a rank whose fullest pass, with what lives beside it, takes ``top`` bytes."""
    total, base = held.totals[rank], held.base[rank] + held.received[rank]
    gradients, passes_peak = _gradients(held.rules, total), base + top
    update = base + (0 if held.rules.reductions.lasting else gradients) + held.updates[rank]
    if update > passes_peak:
        cause = "optimizer"
    parameters, peak = _parameters(held.rules, total), max(update, passes_peak)
    return RankMemory(parameters, gradients, total.moments, kept, peak, cause, total.updated, passes_peak)


def _pass_moments(held: HeldByRanks, live_pass: LivePass, rank: int) -> PassMoments:
    """The moments of a pass, with activations before and after it."""
    moments, own = list(_moments(held, live_pass, rank)), live_pass.own
    others, kept = moments[0].kept_bytes, held.kept[own.stage]
    late = late_bytes(held.rules, own.stage) if own.kind in ("B", "W") else 0
    before, after = {"F": (0, kept), "B": (kept, late), "BW": (kept, 0), "W": (late, 0)}[own.kind]
    return PassMoments(others + before, others + after, moments)


def _moments(held: HeldByRanks, live_pass: LivePass, rank: int) -> Iterator[Moment]:
    """The moments of a pass, including what lives beside it."""
    stages, beside = len(held.stages[rank]), live_pass.counts * held.weights[rank]
    others, sums = int(beside[: 2 * stages].sum()), int(beside[2 * stages : 5 * stages].sum())
    base, gathered = held.base[rank], int(beside[5 * stages : 6 * stages].sum())
    messages = int(beside[-1]) + held.received[rank]
    if held.rules.reductions.lasting:
        gradients = _gradients(held.rules, held.totals[rank])
        sums, base = sums + gradients, base - gradients
    chunk = held.rules.stages.chunks[live_pass.own.stage]
    for at in pass_moments(held.rules, live_pass.own, all_ends=True):
        logits = min(at.logits, at.rest)
        parts = (
            sums + at.gradients,
            base,
            others + at.activations,
            gathered + at.gathers,
            logits,
            at.rest - logits + messages,
        )
        yield Moment(describe(at.cause, chunk), sum(parts), others, *parts)


def _counted(sizes: list[list[int]], layout: Layout, *, times: int = 1) -> list[list[int]]:
    """``sizes``, if ``times`` the sum of each row fits 64-bit integers; else a ``Mistake``."""
    if (most := times * max(sum(map(abs, row)) for row in sizes)) > COUNTED_BYTES:
        raise Mistake(
            f"layout {str(layout)!r} would hold about {most:.0e} bytes on a rank, and more than "
            f"{COUNTED_BYTES:.0e} are not counted; shorten the sequence, or lower mbs or the model"
        )
    return sizes


# What lives beside a pass


def _weights(rules: PassRules, held: Sequence[int], heads: Heads, kept: Sequence[int]) -> list[int]:
    """Bytes for each element of ``LivePass.counts``, on a rank that holds these stages."""
    reductions, chunks = rules.reductions, [rules.stages.chunks[stage] for stage in held]
    in_flight = [0 if rules.offloads else kept[stage] for stage in held]
    split = rules.layout.pipeline.splits_backward and not rules.offloads
    late = [late_bytes(rules, stage) if split else 0 for stage in held]
    sums = [0 if reductions.lasting else _during(rules, chunk.states) for chunk in chunks]
    if reductions.stays:  # whose bucket lives to the end of the step
        with_head = [chunk.runs[-1].run.name == "head" for chunk in chunks]
        sums = [size + reductions.bucket * head for size, head in zip(sums, with_head, strict=True)]
    made = [0 if reductions.lasting or reductions.bucketed else reductions.experts_by_w(chunk.runs) for chunk in chunks]
    if reductions.each and not reductions.bucketed:
        made = [reduced_by_w(rules, stage) if split else 0 for stage in held]
    elif rules.graph and split and not reductions.lasting:
        made = sums
    sums = [whole - by_w for whole, by_w in zip(sums, made, strict=True)]
    gone = [_gradients(rules, chunk.states) - _during(rules, chunk.states) for chunk in chunks]
    if reductions.table.adds and {0, len(rules.stages.chunks) - 1} <= {*held} and len(held) > 1:
        # the head allocates the table's sums with its first gradient
        table = reductions.table.states
        whole = 0 if reductions.lasting else table.sums
        sums[0] -= _during(rules, table) if whole else 0
        job, model = rules.counts.job, rules.counts.model
        by_w = split and reductions.each and job.stack.loss != "chunked" and not model.predicted
        (made if by_w else sums)[-1] += whole
        gone[0] += _during(rules, table) - whole if whole else 0
    shared = reductions.table.states.whole if reductions.table.here else 0
    of_heads = [head_bytes(chunk.runs, table=shared) if heads else 0 for chunk in chunks]
    gathered = [held_bytes(chunk.runs) for chunk in chunks] if rules.keeps else of_heads
    return [*in_flight, *late, *sums, *made, *gone, *gathered, 0, rules.stream]


def _own_bytes(held: HeldByRanks, kind: str, stage: int) -> int:
    """Bytes that the micro-batch itself keeps after its pass."""
    return held.kept[stage] if kind == "F" else late_bytes(held.rules, stage) if kind == "B" else 0


def _on_device(rules: PassRules, chunk: Chunk) -> int:
    """Activations of a micro-batch on the device; offloaded: those of two units, one running, one in transfer."""
    if rules.offloads:
        each = [unit.later.kept_bytes for unit in chunk.runs for _ in range(min(2, unit.run.times))]
        return sum(nlargest(2, each))
    return chunk.kept


def _received(rules: PassRules, held: Sequence[int]) -> int:
    """Bytes of the buffers of every micro-batch of a step, and of what the backwards leave that are not played."""
    if not rules.buffers.received:
        return 0
    layout, job = rules.layout, rules.counts.job
    micro_batches, last = layout.micro_batches(job), len(rules.stages.chunks) - 1
    unplayed = micro_batches - _enough(layout, job)
    inputs, outputs = (sum(stage != end for stage in held) for end in (0, last))
    left = inputs + outputs * (layout.v > 1)
    return rules.stream * (micro_batches * (inputs + outputs) + unplayed * left)


# States


def _total(rules: PassRules, held: Sequence[int]) -> UnitStates:
    states = [rules.stages.chunks[stage].states for stage in held]
    total = states[0] if len(states) == 1 else sum(states, start=UnitStates())
    return total._replace(moments=total.moments + 4) if updates_one(rules.layout, rules.counts.job) else total


def _parameters(rules: PassRules, total: UnitStates) -> int:
    return (0 if rules.gathers else total.whole) + total.apart


def _gradients(rules: PassRules, total: UnitStates) -> int:
    """Bytes of the gradients that the optimizer reads."""
    return total.sums if rules.reductions.stays else total.reduced


def _during(rules: PassRules, total: UnitStates) -> int:
    """Bytes of gradients between micro-batches."""
    return total.reduced if rules.reductions.each or rules.reductions.bucketed else total.sums


def _widened(job: Job, total: UnitStates) -> int:
    """Bytes of copies of the gradients during the update."""
    recipe, widen = job.precision, 0
    if recipe.summed_bytes != recipe.updated_bytes:  # a copy in the update's dtype
        widen = total.updated * recipe.updated_bytes
    return widen + (total.updated * recipe.summed_bytes if "gradients" in job.stack.joined else 0)

"""Live bytes at the moments of one pass that could be its peak, without what other micro-batches hold.

    F   gather? forward …        BW   gather? backward reduce? …        B   backward …        W   weights reduce? …

The order of events is that of ``trainer/parallel/zero.py``: under overlap the next unit's weights are gathered
ahead; or that of FSDP2. What becomes of gradients is in ``reductions.py``.
In a run of equal units live bytes grow or shrink evenly, so only its first and last can be the peak.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

from fivefold.layout.sharding import gathers_again, joins_ends, policy, regathers
from fivefold.layout.spec import Layout
from fivefold.planner.counts.counts import Counts, Run
from fivefold.planner.counts.memory.in_flight import PassKind
from fivefold.planner.counts.memory.liveness import NO_SUMS, Profile, SplitProfile, Sums
from fivefold.planner.counts.memory.reductions import Change, Reductions, cut, reductions_of
from fivefold.planner.counts.memory.stages import (
    Cause,
    PassKey,
    RunMemory,
    StageBuffers,
    Stages,
    held_bytes,
    stage_buffers,
)
from fivefold.planner.counts.memory.states import UnitStates
from fivefold.planner.counts.operations.local_shapes import part_of
from fivefold.planner.counts.parameter_prefetch import Fetches, fetches


class LiveBytes(NamedTuple):
    """Live bytes at a moment, by part."""

    cause: Cause
    gradients: int  # change since the pass began
    activations: int
    gathers: int
    rest: int  # everything else, with the logits
    logits: int = 0

    @property
    def bytes(self) -> int:
        """The sum of the parts."""
        return self.gradients + self.activations + self.gathers + self.rest


class Coalesced(NamedTuple):
    """What messages hold that join weights of several units; zero and False where messages are of units."""

    bucket: int  # bytes of gradients that are reduced at once
    by_weights: bool  # weights are gathered one by one, in the order in which they are used
    shards_come: bool  # ZeRO-2: this rank's gradients live from the first reduction on
    fetched: dict[int, Fetches | None]  # by stage, filled by ``_fetched_weights``

    @property
    def uneven(self) -> bool:
        """Whether live bytes do not grow evenly over equal units."""
        return self.by_weights or self.bucket > 0


class PassRules(NamedTuple):
    """What of a layout, its model and its job decides the moments of a pass."""

    counts: Counts
    layout: Layout
    stages: Stages
    reductions: Reductions
    buffers: StageBuffers
    coalesced: Coalesced
    gathers: bool  # weights are gathered for each pass
    keeps: bool  # those gathered for an F stay until its B
    ahead: bool  # the next unit's weights are gathered while a unit computes
    holds: bool  # what a gather brought lives beside the weights, or the next unit's weights are gathered
    root: bool  # embedding and head are one unit
    embed: bool  # the embedding is gathered for its backward
    graph: bool  # the autograd graph stays between B and W
    lingers: bool  # the caller of the loss holds the logits until the backward has ended
    offloads: bool  # activations
    stream: int  # bytes of a stage's input
    own_tokens: int  # bytes of ids and targets, which are copied under context parallelism
    kinds: tuple[int, ...]  # of each stage the first that is equal in everything

    @property
    def makes_all(self) -> bool:
        """Whether W makes all gradients of a unit that puts any off."""
        return self.reductions.each or self.graph


def pass_rules(counts: Counts, layout: Layout, stages: Stages) -> PassRules:
    """Return the rules of the passes of a layout, whose ``stages`` these are."""
    job, stack, part = counts.job, counts.job.stack, part_of(layout)
    local, gathers = counts.local(part), not policy(layout, job).weights_stay
    buffers = stage_buffers(layout, job, stages=len(stages.chunks), stream=local.entry_bytes)
    coalesced = _coalesced(counts, layout)
    holds = stack.unit_buffers == "held" and layout.shards > 1 and not coalesced.by_weights
    first: dict[tuple[int, int], int] = {}
    alike = [(chunk.alike, buffers.output(stage)) for stage, chunk in enumerate(stages.chunks)]
    return PassRules(
        counts=counts,
        layout=layout,
        stages=stages,
        reductions=reductions_of(counts, layout),
        buffers=buffers,
        coalesced=coalesced,
        gathers=gathers,
        keeps=gathers and not regathers(layout, job),
        ahead="dp" in stack.overlap and stack.weights == "ahead" and not holds,
        holds=holds,
        root=joins_ends(layout, job),
        embed=holds and gathers_again("embed", layout, job),
        graph=stack.deferred == "graph",
        lingers=stack.loss == "narrow",
        offloads="activations" in layout.offloads(job),
        stream=local.entry_bytes,
        own_tokens=16 * local.rows if layout.cp > 1 else 0,
        kinds=tuple(first.setdefault(each, stage) for stage, each in enumerate(alike)),
    )


def pass_peak(rules: PassRules, own: PassKind) -> tuple[int, Cause]:
    """Return the peak bytes of a pass and their cause; cached, shared by stages with equal units."""
    last, lag = own.last and not rules.reductions.stays, lagging_bytes(rules, own)
    alike, output = rules.stages.chunks[own.stage].alike, rules.buffers.output(own.stage)
    key = PassKey(alike, output, own.kind, own.first, last, lag, own.held, rules.reductions.each)
    found = rules.stages.peaks.get(key)
    if found is None:
        every = pass_moments(rules, own._replace(last=last), all_ends=rules.coalesced.uneven)
        found = rules.stages.peaks[key] = max(((at.bytes, at.cause) for at in every), key=itemgetter(0))
    return found


def pass_moments(rules: PassRules, own: PassKind, *, all_ends: bool = False) -> Iterator[LiveBytes]:
    """Return the moments of a pass in order; ``all_ends``: also of units that cannot be the peak."""
    kind, stage, first = own.kind, own.stage, own.first and not rules.reductions.lasting
    units: Sequence[RunMemory] = rules.stages.chunks[stage].runs
    if all_ends:
        units = [unit._replace(noted=True) for unit in units]
    lag = lagging_bytes(rules, own)
    whole = rules.graph and stage == 0  # whose B computes nothing, as nothing before it needs a gradient: W does all
    if kind == "B" and whole:
        kept, there = rules.stages.chunks[stage].kept, held_bytes(units) if own.held else 0
        cause, rest = (len(units) - 1, 0, "backward", "waits"), rules.stream + rules.buffers.output(stage)
        return iter([LiveBytes(cause, lag, kept, there, rest)])
    if kind == "W" and not whole:
        found = _weights(rules, units, first=first, last=own.last, lagging=lag)
        return _without(found, rules.buffers.of_graph(stage)) if rules.graph else found
    if kind == "F":
        found = _forward(rules, units, first=first, held=own.held, lagging=lag)
    else:
        found = _backward(
            rules, units, stage, first=first, last=own.last, split=kind == "B", held=own.held, lagging=lag
        )
    if kind == "W":  # the gradient of its output is a buffer that W does not count as its own
        found = _without(found, rules.stream * rules.buffers.received)
    return _with_coalesced(rules, found, units, stage=stage, backward=kind != "F")


def _without(found: Iterator[LiveBytes], size: int) -> Iterator[LiveBytes]:
    """The moments less ``size`` bytes of activations, which are counted beside the pass."""
    return (at._replace(activations=max(0, at.activations - size)) for at in found)


def late_bytes(rules: PassRules, stage: int) -> int:
    """Return the bytes that one micro-batch keeps between B and W of a stage."""
    chunk, cache = rules.stages.chunks[stage], rules.stages.late
    key = chunk.alike, rules.reductions.each
    if key not in cache:
        late = sum(each.run.times * _split(rules, each).late_bytes for each in chunk.runs)
        cache[key] = chunk.kept if rules.graph and stage == 0 else late - rules.buffers.of_graph(stage)
    return cache[key]


def lagging_bytes(rules: PassRules, own: PassKind) -> int:
    """Return the bytes of gradient sums whose reduction the pass before has left under way, beside this one."""
    before = own.before
    if before is None:
        return 0
    units = rules.stages.chunks[before.stage].runs
    late = [_split(rules, unit).late_bytes if before.kind != "BW" else 0 for unit in units]
    experts_first = any(_split(rules, unit).experts_peak_bytes for unit in units)
    return rules.reductions.under_way(units, before, late, then=(own.kind, own.stage), experts_first=experts_first)


def reduced_by_w(rules: PassRules, stage: int) -> int:
    """Return the bytes of this rank's reduced gradients that W of a stage makes, not its B."""
    late = [unit for unit in rules.stages.chunks[stage].runs if _split(rules, unit).late_bytes]
    return sum(unit.run.times * (unit.state.reduced - rules.reductions.by_biases(unit)) for unit in late)


def _split(rules: PassRules, unit: RunMemory, born: Sums = NO_SUMS) -> SplitProfile:
    return rules.counts.split(unit.part, unit.run.name, born, waits=rules.reductions.waits(unit))


def _ends(unit: RunMemory, *, second: bool = False, but_one: bool = False) -> tuple[int, ...]:
    """Indices in a run: first, last, on request ``second`` and last ``but_one``; none if none can be the peak."""
    times = unit.run.times
    if not unit.noted or times == 1:
        return (0,) if unit.noted else ()
    between = ([1] if second else []) + ([times - 2] if but_one else [])
    return (0, *sorted({place for place in between if 0 < place < times - 1}), times - 1)


# F


def _forward(
    rules: PassRules, units: Sequence[RunMemory], *, first: bool, held: bool, lagging: int
) -> Iterator[LiveBytes]:
    """``held``: weights are gathered already; of those that are not kept from an F to a B, the head's alone."""
    kept, casts, whole = 0, 0, 0 if units[0].run.name == "embed" else _table_whole(rules, units)
    names = [str(unit.run.name) for unit in units]
    there = [held and (name == "head" or (rules.keeps and name != "embed")) for name in names]
    whole += sum(unit.run.times * unit.state.whole for unit, some in zip(units, there, strict=True) if some)
    for place, unit in enumerate(units):
        run, profile, state = unit.run, unit.later, unit.state
        gathered = 0 if not rules.gathers or there[place] else state.whole
        stale = first or bool(gathered)
        entering = (rules.stream if run.name != "embed" else 0) + rules.own_tokens
        for before in _ends(unit):
            earlier = _earlier(rules, profile.kept_bytes, before, kept) + casts + before * profile.cached_bytes
            former = unit if before else units[place - 1] if place else None
            if stale and not (rules.ahead and place + before):
                fetched = whole + _fetched(rules, unit, former)
                yield LiveBytes((place, before, "gather"), lagging, earlier, fetched, entering)
            coming = 0
            if rules.ahead and (first or rules.gathers):
                following = place + (before == run.times - 1)
                more = following < len(units) and not there[following]
                coming = _coming(rules, units[following].parts[0]) if more else 0
            mine = gathered * (1 + before if rules.keeps and not held else 1)
            if rules.holds and stale:  # what was brought for the head goes before the loss
                coming = state.whole
                if run.name == "head":
                    rest = entering + unit.logits
                    yield LiveBytes((place, before, "forward"), lagging, earlier, whole + mine + coming, rest)
                    coming = 0
            rest = profile.forward_peak_bytes + rules.own_tokens
            yield LiveBytes((place, before, "forward"), lagging, earlier, whole + mine + coming, rest, unit.logits)
        whole += gathered if _stays(rules, run) else 0
        whole += run.times * gathered if rules.keeps and run.name not in ("embed", "head") else 0
        kept = _earlier(rules, profile.kept_bytes, run.times, kept)
        casts += run.times * profile.cached_bytes


def _earlier(rules: PassRules, each: int, units: int, kept: int) -> int:
    """Activations on the device: ``units`` that keep ``each``, and ``kept`` bytes; offloaded: those of one unit."""
    if rules.offloads and units:
        return each
    return kept + units * each


def _coming(rules: PassRules, part: UnitStates) -> int:
    """Bytes of weights that are being gathered ahead."""
    return part.travel + (part.whole if rules.gathers else 0)


def _fetched(rules: PassRules, unit: RunMemory, before: RunMemory | None = None) -> int:
    """Peak bytes while a unit's parts (dense, experts) are gathered one after another; held: beside what was brought
    for the unit ``before``, which goes before they are copied.
    """
    if rules.holds:
        made = unit.state.whole if rules.gathers else 0
        return unit.state.whole + max(made, before.state.whole if before else 0)
    whole = top = 0
    for part in unit.parts:
        whole += part.whole if rules.gathers else 0
        top = max(top, whole + part.travel)
    return top


def _table_whole(rules: PassRules, units: Sequence[RunMemory]) -> int:
    """Bytes of a gathered tied table that stays from the embedding's forward for the head on the same rank."""
    shared = rules.gathers and units[-1].run.name == "head"
    return (units[0].state if rules.root else rules.reductions.table.states).whole if shared else 0


def _stays(rules: PassRules, run: Run) -> bool:
    """Whether gathered weights stay until the backward: of the head, which follows, or a table that it shares."""
    return run.name == "head" or (run.name == "embed" and (rules.root or rules.reductions.table.here))


# B and BW


def _backward(
    rules: PassRules,
    units: Sequence[RunMemory],
    stage: int,
    *,
    first: bool,
    last: bool,
    split: bool,
    held: bool,
    lagging: int,
) -> Iterator[LiveBytes]:
    """``held``: weights are gathered; ``lagging``: bytes of sums that are reduced but not yet freed."""
    sums, kept = rules.reductions, _kept_before(rules, units)
    whole = _table_whole(rules, units)
    whole += units[-1].state.whole if rules.gathers and units[-1].run.name == "head" else 0
    whole += held_bytes(units, but="head") if held else 0
    grown = after = 0  # gradients; kept for W
    logits = rules.buffers.output(stage)  # and outputs, that live until the pass has ended
    for place, unit in reversed([*enumerate(units)]):
        run, state = unit.run, unit.state
        off = _split(rules, unit).late_bytes if split else 0  # kept for W
        stays, regathered = _is_block(rules, run) and held, state.whole if _again(rules, run) and not held else 0
        let_go, reduces = _let_go(rules, unit, stays=stays), sums.reduces(unit, last=last) and not off
        born = sums.born(unit, first=first, deferred=off > 0 and rules.makes_all, reduces=reduces)
        change, lag = _change(rules, unit, first=first, reduces=reduces, off=off), sums.lag_bytes(unit) * reduces
        table = sums.of_table(unit, first=first) if reduces or sums.ends_in_b(unit, last=last) else 0
        if table and rules.counts.job.stack.loss == "chunked":  # allocated after the last chunk, within the unit
            born_with_table, table = born._replace(reduced=table), 0
        else:
            born_with_table = born
        profile: Profile | SplitProfile = (
            _split(rules, unit, born_with_table)
            if split
            else rules.counts.profile(unit.part, run.name, born_with_table)
        )
        for done in _ends(unit, second=bool(lag), but_one=_comes_ahead(rules, place)):
            earlier = _earlier(rules, unit.later.kept_bytes, run.times - done - 1, kept[place]) + after + done * off
            still, at, gone = lag if done and reduces else lagging, run.times - done - 1, 0
            gradients = grown + done * change.lasting + still
            if unit.born.experts and reduces and sums.midway and not split:
                profile, gone = _reducing(rules, unit, born, first=first, lagging=still)
            mine, born_then = profile.backward_kept_bytes, profile.backward_sums_bytes
            before = unit if done < run.times - 1 else units[place - 1] if place else None
            coming = 0 if held else _coming_back(rules, unit, before)
            here = whole - (done * state.whole if stays else 0)
            alone = not (rules.ahead and (done or place + 1 < len(units)))
            for size in _arrivals(rules, unit, whole, here, coming, alone=alone) if regathered else ():
                kept_here, rest = earlier + unit.later.kept_bytes, rules.stream + logits
                yield LiveBytes((place, at, "gather"), gradients, kept_here, size, rest)
            late = rules.holds and isinstance(profile, Profile) and profile.after_loss_bytes
            if late:  # what the head gathers ahead, after its loss
                cause = (place, at, "backward", "head.out")
                yield LiveBytes(cause, gradients, earlier, here + coming, late, unit.logits)
            yield LiveBytes(
                (place, at, "backward", profile.backward_cause),
                gradients + born_then + table,
                earlier + mine,
                here + regathered + (0 if late else coming),
                profile.backward_peak_bytes - mine - born_then + logits,
                unit.logits,
            )
            if reduces:
                gone, still_coming = (still, coming) if sums.release == "next_copy" else (gone, 0)
                beginning, rest = gradients + change.reducing - gone, _made_last(rules, unit) + logits
                yield LiveBytes((place, at, "reduce"), beginning, earlier, here - let_go + still_coming, rest)
        grown += run.times * change.lasting + change.waits
        whole, after = whole - let_go * (run.times if stays else 1), after + run.times * off
        lagging, logits = lag if reduces else lagging, logits + _lingering(rules, unit, split=split)


def _lingering(rules: PassRules, unit: RunMemory, *, split: bool) -> int:
    """Bytes that a unit's backward no longer needs and that live until the pass has ended."""
    return unit.logits * rules.lingers + (_split(rules, unit).released_bytes if split else 0)


def _arrivals(rules: PassRules, unit: RunMemory, whole: int, here: int, coming: int, *, alone: bool) -> Iterator[int]:
    """Bytes of gathered weights while a unit's come for its backward; ``alone``: not ahead."""
    if alone:
        yield whole + _fetched(rules, unit)
    if coming and unit.born.experts and rules.ahead:  # before the dense ones, awaited after
        yield here + unit.state.whole + unit.parts[-1].travel + coming


def _let_go(rules: PassRules, unit: RunMemory, *, stays: bool) -> int:
    """Bytes of weights gathered before a backward that it frees; ``stays``: a block's are gathered."""
    own = unit.state.whole if rules.gathers and (stays or _stays(rules, unit.run)) else 0
    table = rules.reductions.table
    if not table.adds or not rules.gathers:
        return own
    return {"head": own + table.states.whole, "embed": 0}.get(str(unit.run.name), own)


def _is_block(rules: PassRules, run: Run) -> bool:
    """Whether the gathered weights of a unit are let go after its forward, or stay for its backward."""
    return rules.gathers and run.name not in ("embed", "head")


def _again(rules: PassRules, run: Run) -> bool:
    """Whether a unit is gathered for its backward."""
    return _is_block(rules, run) or (rules.embed and run.name == "embed")


def _made_last(rules: PassRules, unit: RunMemory) -> int:
    """Bytes that live when the last gradient of a unit is made: of the stream, or of the table."""
    narrow, wide = rules.reductions.widths
    if rules.reductions.release == "next_copy" and unit.run.name == "embed":
        return 0  # its gradient counts as such
    return unit.state.sums * narrow // wide if unit.run.name == "embed" else rules.stream


def _change(rules: PassRules, unit: RunMemory, *, first: bool, reduces: bool, off: int) -> Change:
    """What a backward does to gradients; ``off``: bytes that it keeps for W, which then makes them all, but for
    ``by_biases``, if they are reduced with every micro-batch.
    """
    sums = rules.reductions
    if off and rules.makes_all:
        born = first * sums.by_biases(unit)
        return Change(born, born, 0)
    made_later = _split(rules, unit).made_bytes if off and sums.destination == "late" else 0
    return sums.change(unit, first=first, reduces=reduces, made_later=made_later)


def _comes_ahead(rules: PassRules, place: int) -> bool:
    """Whether, in the backward, the last unit of this run gathers nothing ahead while the one before it does."""
    return (rules.ahead or rules.holds) and rules.gathers and place <= 1


def _coming_back(rules: PassRules, unit: RunMemory, before: RunMemory | None) -> int:
    """Bytes of weights of the unit ``before`` that are gathered ahead in the backward of ``unit``."""
    if rules.holds:
        return before.state.whole if before and _again(rules, before.run) else 0
    ahead = rules.ahead and rules.gathers and unit.run.name != "embed"
    return _coming(rules, before.parts[-1]) if ahead and before and before.run.name != "embed" else 0


def _reducing(rules: PassRules, unit: RunMemory, born: Sums, *, first: bool, lagging: int) -> tuple[Profile, int]:
    """Profile of a unit whose experts' gradients are reduced midway, and bytes freed then: ``lagging``, or sums."""
    experts, sums = unit.parts[-1], rules.reductions
    shard = min(cut(experts), sums.shards(unit, first=first))
    gone = lagging if sums.release != "at_once" else cut(experts) and experts.sums
    return rules.counts.profile(unit.part, unit.run.name, born._replace(reduced=shard, gone=gone)), gone


def _kept_before(rules: PassRules, units: Sequence[RunMemory]) -> list[int]:
    """For each run, activations kept by the runs before it."""
    found, kept = [], 0
    for unit in units:
        found.append(kept)
        kept = _earlier(rules, unit.later.kept_bytes, unit.run.times, kept)
    return found


# W: the weight gradients that B has put off, from the last unit to the first


def _weights(
    rules: PassRules, units: Sequence[RunMemory], *, first: bool, last: bool, lagging: int
) -> Iterator[LiveBytes]:
    """The moments of W; ``lagging``: bytes of sums that are reduced but not yet freed."""
    left, grown, sums = 0, 0, rules.reductions
    for unit in units:
        late = _split(rules, unit).late_bytes
        left += unit.run.times * late
        if not late and not (rules.makes_all or sums.bucketed) and sums.reduces(unit, last=last):  # reduced in B
            grown += unit.state.reduced - unit.state.sums
    for place in reversed(range(len(units))):
        unit, profile = units[place], _split(rules, units[place], Sums(tied=units[place].born.tied))
        if not profile.late_bytes:
            continue
        reduces, change = sums.reduces(unit, last=last), _change_by_w(rules, unit, first=first, last=last)
        # those of experts are allocated with their first gradient; all are, if they are reduced every time
        born = sums.born(unit, first=first)
        born = born if rules.makes_all and not sums.bucketed else born._replace(dense=0)
        born = born._replace(experts=0) if sums.by_biases(unit) else born
        tables = born.tied and rules.makes_all and not sums.table.adds  # else they live from the first backward on
        allocated = born.dense + born.experts + (born.table if tables else 0)
        lag = sums.lag_bytes(unit) if reduces else 0
        shard = min(cut(unit.parts[-1]), sums.shards(unit, first=first)) if unit.born.experts else 0
        # experts' gradients come first, and the others' sums only once those are being reduced
        apart = profile.experts_peak_bytes > 0 and born.dense > 0 and reduces and cut(unit.parts[-1]) > 0
        early = profile.experts_peak_bytes or profile.table_peak_bytes
        for done in _ends(unit, second=bool(lag)):
            still, at = lag if done and reduces else lagging, unit.run.times - done - 1
            here, gradients = left - done * profile.late_bytes, grown + done * change.lasting + still
            if early:
                yield _moment(place, at, gradients + allocated - born.dense, here, early - profile.late_bytes)
            if reduces and unit.born.experts:
                midway, others = gradients + born.experts + shard, here - profile.late_bytes
                yield LiveBytes((place, at, "reduce"), midway, others, 0, profile.experts_bytes)
            if apart:
                gradients -= still + (0 if sums.release != "at_once" else born.experts)
            rest = profile.weights_peak_bytes - profile.late_bytes
            table = sums.of_table(unit, first=first) if reduces else 0
            yield _moment(place, at, gradients + allocated + shard * apart + table, here, rest)
            if reduces:
                beginning, others = gradients + change.reducing, here - profile.late_bytes
                yield LiveBytes((place, at, "reduce"), beginning, others, 0, profile.closing_bytes)
        left -= unit.run.times * profile.late_bytes
        grown += unit.run.times * change.lasting
        lagging = lag if reduces else lagging


def _change_by_w(rules: PassRules, unit: RunMemory, *, first: bool, last: bool) -> Change:
    """What W does to gradients whose dense sums B has allocated, unless they are reduced every time."""
    sums = rules.reductions
    reduces = sums.reduces(unit, last=last)
    if rules.makes_all or sums.bucketed:
        change, there = sums.change(unit, first=first, reduces=reduces), first * sums.by_biases(unit)
        return Change(change.reducing - there, change.lasting - there, change.waits)
    experts = first * (unit.born.experts - sums.by_biases(unit))
    made_late = _split(rules, unit).made_bytes if sums.destination == "late" else 0
    lasting = unit.state.reduced - unit.state.sums if reduces else made_late
    return Change(experts + sums.shards(unit, first=first), experts + lasting, 0)


def _moment(place: int, index: int, gradients: int, here: int, rest: int) -> LiveBytes:
    """A moment of W with ``here`` bytes kept for it; ``rest``: negative: of the operands of those, which are gone."""
    return LiveBytes((place, index, "weights"), gradients, here + min(0, rest), 0, max(0, rest))


# Messages that join weights of several units (DeepSpeed)
#
#     ZeRO-1, -2   a bucket (two where reductions overlap) from a backward's first gradient to its end; this rank's
#                  gradients from the first reduction on; a copy of the bucket while it is all-reduced
#     ZeRO-3       gathered weights as ``planner/counts/parameter_prefetch.py`` plays them; a copy of the bucket while
#                  it is reduced
#
# Source: deepspeedai/DeepSpeed@0.19.8:deepspeed/runtime/zero/stage_1_and_2.py, setup_buckets, copy_grads_in_partition
# and allreduce_bucket; deepspeed/runtime/comm/coalesced_collectives.py, reduce_scatter_coalesced.


def _coalesced(counts: Counts, layout: Layout) -> Coalesced:
    """Return what the job's software joins under a layout."""
    stack, keeps = counts.job.stack, policy(layout, counts.job)
    bucket = stack.reduce_bucket * counts.job.precision.summed_bytes if layout.shards > 1 else 0
    by_weights = stack.fetch == "weights" and not keeps.weights_stay
    return Coalesced(bucket, by_weights, bucket > 0 and keeps.weights_stay and not keeps.gradients_stay, {})


def _with_coalesced(
    rules: PassRules, found: Iterable[LiveBytes], units: Sequence[RunMemory], *, stage: int, backward: bool
) -> Iterator[LiveBytes]:
    """The moments of a pass, with what joined messages hold."""
    coalesced = rules.coalesced
    if not (coalesced.by_weights or (coalesced.bucket and backward)):
        yield from found
        return
    first = [0, *accumulate(unit.run.times for unit in units)]
    played, wide = _fetched_weights(rules, stage), rules.counts.job.precision.wide_bytes
    for at in found:
        if len(at.cause) > 2:
            place, index, phase, *_ = at.cause
            if played is not None:
                if phase == "gather":
                    continue
                live = (played.backward if backward else played.forward)[first[place] + index]
                at = at._replace(gathers=live * wide)
            if backward:
                at = _with_bucket(coalesced, at, units, place, index, ends=phase == "reduce")
        yield at


def _fetched_weights(rules: PassRules, stage: int) -> Fetches | None:
    """The gathers of a stage's weights one by one; None where they are gathered by units, or stay."""
    coalesced = rules.coalesced
    if not coalesced.by_weights:
        return None
    if stage not in coalesced.fetched:
        coalesced.fetched[stage] = fetches(rules.counts, rules.layout, chunk=stage)
    return coalesced.fetched[stage]


def _with_bucket(
    coalesced: Coalesced, at: LiveBytes, units: Sequence[RunMemory], place: int, index: int, *, ends: bool
) -> LiveBytes:
    """A moment of a backward: the bucket's copy at the end of a unit within which it is full, shards from then."""
    unit, last = units[place], place == 0
    before = sum(each.run.times * each.state.sums for each in units[place + 1 :])
    before += (unit.run.times - index - 1) * unit.state.sums
    full = before + unit.state.sums * ends
    reduced = full > coalesced.bucket or (ends and last)
    held = sum(each.run.times * each.state.reduced for each in units) if coalesced.shards_come and reduced else 0
    copy = min(coalesced.bucket, full) if ends and reduced else 0
    return at._replace(gradients=at.gradients + held + copy)

"""Live bytes at the moments of one pass that could be its peak, without what other micro-batches hold.

    F   gather? forward …        BW   gather? backward reduce? …        B   backward …        W   weights reduce? …

The order of events is that of ``trainer/parallel/zero.py``: with overlap the next unit's weights are gathered ahead; or
that of FSDP2. ``reductions.py`` says what happens to gradients. In a group of equal units live bytes grow or shrink
evenly, so only its first and last unit can be the peak.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

from fivefold.layout.sharding import gathers_for_backward, joins_ends, needs_backward_gather, policy
from fivefold.layout.spec import Layout
from fivefold.planner.counts.counts import Counts, UnitGroup
from fivefold.planner.counts.memory.in_flight import PassKind
from fivefold.planner.counts.memory.liveness import NO_SUMS, GradientSums, Profile, SplitProfile
from fivefold.planner.counts.memory.reductions import GradientChange, Reductions, cut, plan_reductions
from fivefold.planner.counts.memory.stages import (
    Cause,
    PassKey,
    PipelineStages,
    RunMemory,
    StageBuffers,
    held_bytes,
    stage_buffers,
)
from fivefold.planner.counts.memory.states import UnitStates
from fivefold.planner.counts.operations.local_shapes import get_local_degrees
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
        """Return the sum of the parts."""
        return self.gradients + self.activations + self.gathers + self.rest


class Coalesced(NamedTuple):
    """The bytes held by messages that join weights of several units; zero and False if messages are per unit."""

    bucket: int  # bytes of gradients that are reduced at once
    by_weights: bool  # weights are gathered one by one, in the order of their use
    shards_come: bool  # ZeRO-2: this rank's gradients are allocated from the first reduction on
    fetched: dict[int, Fetches | None]  # by stage, filled by ``_list_fetches``

    @property
    def is_uneven(self) -> bool:
        """Return True if live bytes do not grow evenly over equal units."""
        return self.by_weights or self.bucket > 0


class PassRules(NamedTuple):
    """The properties of a layout, its model and its job that decide the moments of a pass."""

    counts: Counts
    layout: Layout
    stages: PipelineStages
    reductions: Reductions
    buffers: StageBuffers
    coalesced: Coalesced
    gathers: bool  # weights are gathered for each pass
    keeps: bool  # weights gathered for an F stay gathered until its B
    ahead: bool  # the next unit's weights are gathered while a unit computes
    holds: bool  # the gather's output is kept next to the weights while the next unit's are gathered
    root: bool  # embedding and head are one unit
    embed: bool  # the embedding is gathered for its backward
    graph: bool  # the autograd graph stays between B and W
    lingers: bool  # the caller of the loss keeps the logits until the backward has ended
    offloads: bool  # activations
    stream: int  # bytes of a stage's input
    own_tokens: int  # bytes of ids and targets, which are copied under context parallelism
    kinds: tuple[int, ...]  # for each stage, the first one that is equal in everything

    @property
    def makes_all(self) -> bool:
        """Return True if W makes all gradients of a unit that defers any."""
        return self.reductions.every_micro_batch or self.graph


def pass_rules(counts: Counts, layout: Layout, stages: PipelineStages) -> PassRules:
    """Return the rules of the passes of a layout with the stages ``stages``."""
    job, stack, part = counts.job, counts.job.stack, get_local_degrees(layout)
    local, gathers = counts.get_local(part), not policy(layout, job).weights_stay
    buffers = stage_buffers(layout, job, stages=len(stages.chunks), stream=local.entry_bytes)
    coalesced = _find_coalesced(counts, layout)
    retains_gather_output = stack.comm_buffers == "retained" and layout.shards > 1 and not coalesced.by_weights
    first_stages: dict[tuple[int, int], int] = {}
    equality_keys = [(chunk.first_equal_stage, buffers.output(stage)) for stage, chunk in enumerate(stages.chunks)]
    return PassRules(
        counts=counts,
        layout=layout,
        stages=stages,
        reductions=plan_reductions(counts, layout),
        buffers=buffers,
        coalesced=coalesced,
        gathers=gathers,
        keeps=gathers and not gathers_for_backward(layout, job),
        ahead="dp" in stack.overlap and stack.param_all_gather == "overlapped" and not retains_gather_output,
        holds=retains_gather_output,
        root=joins_ends(layout, job),
        embed=retains_gather_output and needs_backward_gather("embed", layout, job),
        graph=stack.deferred_wgrad == "graph",
        lingers=stack.loss == "low_precision",
        offloads="activations" in layout.list_offloaded(job),
        stream=local.entry_bytes,
        own_tokens=16 * local.rows if layout.cp > 1 else 0,
        kinds=tuple(first_stages.setdefault(equality_key, stage) for stage, equality_key in enumerate(equality_keys)),
    )


def pass_peak(rules: PassRules, own: PassKind) -> tuple[int, Cause]:
    """Return the peak bytes of a pass and their cause; cached, shared by stages with equal units."""
    last, lag = own.last and not rules.reductions.stays, lagging_bytes(rules, own)
    first_equal, output_bytes = rules.stages.chunks[own.stage].first_equal_stage, rules.buffers.output(own.stage)
    key = PassKey(
        first_equal, output_bytes, own.kind, own.first, last, lag, own.held, rules.reductions.every_micro_batch
    )
    peak = rules.stages.peaks.get(key)
    if peak is None:
        moments = pass_moments(rules, own._replace(last=last), all_ends=rules.coalesced.is_uneven)
        peak = rules.stages.peaks[key] = max(((moment.bytes, moment.cause) for moment in moments), key=itemgetter(0))
    return peak


def pass_moments(rules: PassRules, own: PassKind, *, all_ends: bool = False) -> Iterator[LiveBytes]:
    """Return the moments of a pass in order; ``all_ends``: also of units that cannot be the peak."""
    kind, stage, first = own.kind, own.stage, own.first and not rules.reductions.is_persistent
    units: Sequence[RunMemory] = rules.stages.chunks[stage].runs
    if all_ends:
        units = [unit._replace(noted=True) for unit in units]
    lag = lagging_bytes(rules, own)
    w_does_all = rules.graph and stage == 0  # its B computes nothing, as no earlier stage needs a gradient: W does all
    if kind == "B" and w_does_all:
        kept_size, gathered = rules.stages.chunks[stage].kept, held_bytes(units) if own.held else 0
        cause, rest = (len(units) - 1, 0, "backward", "waits"), rules.stream + rules.buffers.output(stage)
        return iter([LiveBytes(cause, lag, kept_size, gathered, rest)])
    if kind == "W" and not w_does_all:
        moments = _weights(rules, units, first=first, last=own.last, lagging=lag)
        return _subtract_activations(moments, rules.buffers.graph_bytes(stage)) if rules.graph else moments
    if kind == "F":
        moments = _forward(rules, units, first=first, held=own.held, lagging=lag)
    else:
        moments = _backward(
            rules, units, stage, first=first, last=own.last, split=kind == "B", held=own.held, lagging=lag
        )
    if kind == "W":  # the gradient of its output is a buffer that W does not count as its own
        moments = _subtract_activations(moments, rules.stream * rules.buffers.received)
    return _with_coalesced(rules, moments, units, stage=stage, backward=kind != "F")


def _subtract_activations(moments: Iterator[LiveBytes], size: int) -> Iterator[LiveBytes]:
    """Yield the moments less ``size`` bytes of activations, which are counted elsewhere."""
    return (moment._replace(activations=max(0, moment.activations - size)) for moment in moments)


def deferred_bytes(rules: PassRules, stage: int) -> int:
    """Return the bytes that one micro-batch keeps between B and W of a stage."""
    chunk, cache = rules.stages.chunks[stage], rules.stages.late
    key = chunk.first_equal_stage, rules.reductions.every_micro_batch
    if key not in cache:
        deferred = sum(group.run.times * _split(rules, group).late_bytes for group in chunk.runs)
        cache[key] = chunk.kept if rules.graph and stage == 0 else deferred - rules.buffers.graph_bytes(stage)
    return cache[key]


def lagging_bytes(rules: PassRules, own: PassKind) -> int:
    """Return the bytes of gradient sums whose reduction the previous pass has left in flight."""
    before = own.before
    if before is None:
        return 0
    units = rules.stages.chunks[before.stage].runs
    deferred = [_split(rules, unit).late_bytes if before.kind != "BW" else 0 for unit in units]
    experts_first = any(_split(rules, unit).experts_peak_bytes for unit in units)
    return rules.reductions.in_flight_bytes(
        units, before, deferred, then=(own.kind, own.stage), experts_first=experts_first
    )


def reduced_by_w(rules: PassRules, stage: int) -> int:
    """Return the bytes of this rank's reduced gradients that W of a stage makes, not its B."""
    deferred_units = [unit for unit in rules.stages.chunks[stage].runs if _split(rules, unit).late_bytes]
    return sum(unit.run.times * (unit.state.reduced - rules.reductions.bias_sum_bytes(unit)) for unit in deferred_units)


def freed_in_b(rules: PassRules, stage: int) -> int:
    """Return the bytes of sums, less this rank's shards of them, that the last B of a stage reduces, not its W."""
    sums = rules.reductions
    if sums.stays or sums.is_bucketed or rules.makes_all:
        return 0
    reduced_units = [unit for unit in rules.stages.chunks[stage].runs if not _split(rules, unit).late_bytes]
    return sum(unit.run.times * (unit.state.sums - unit.state.reduced) for unit in reduced_units)


def _split(rules: PassRules, unit: RunMemory, born: GradientSums = NO_SUMS) -> SplitProfile:
    return rules.counts.split(unit.part, unit.run.name, born, waits=rules.reductions.get_waits(unit))


def _list_peak_candidates(unit: RunMemory, *, second: bool = False, but_one: bool = False) -> tuple[int, ...]:
    """Return the indices of the units of a group that can be the peak: none, or first and last.

    ``second`` and ``but_one`` add the second and the last but one.
    """
    times = unit.run.times
    if not unit.noted or times == 1:
        return (0,) if unit.noted else ()
    between = ([1] if second else []) + ([times - 2] if but_one else [])
    return (0, *sorted({place for place in between if 0 < place < times - 1}), times - 1)


# F


def _forward(
    rules: PassRules, units: Sequence[RunMemory], *, first: bool, held: bool, lagging: int
) -> Iterator[LiveBytes]:
    """Yield the moments of F.

    ``held``: weights are gathered already; if weights are not kept from an F to a B, only the head's.
    """
    kept_size, casts, gathered_bytes = 0, 0, 0 if units[0].run.name == "embed" else _table_whole(rules, units)
    names = [str(unit.run.name) for unit in units]
    already_gathered = [held and (name == "head" or (rules.keeps and name != "embed")) for name in names]
    gathered_bytes += sum(
        unit.run.times * unit.state.gathered
        for unit, is_gathered in zip(units, already_gathered, strict=True)
        if is_gathered
    )
    for place, unit in enumerate(units):
        run, profile, state = unit.run, unit.later, unit.state
        new_gather = 0 if not rules.gathers or already_gathered[place] else state.gathered
        needs_gather = first or bool(new_gather)
        input_bytes = (rules.stream if run.name != "embed" else 0) + rules.own_tokens
        for index in _list_peak_candidates(unit):
            earlier = _earlier_bytes(rules, profile.kept_bytes, index, kept_size) + casts + index * profile.cached_bytes
            previous_unit = unit if index else units[place - 1] if place else None
            if needs_gather and not (rules.ahead and place + index):
                gather_peak = gathered_bytes + _find_gather_peak(rules, unit, previous_unit)
                yield LiveBytes((place, index, "gather"), lagging, earlier, gather_peak, input_bytes)
            ahead_bytes = 0
            if rules.ahead and (first or rules.gathers):
                following = place + (index == run.times - 1)
                has_next = following < len(units) and not already_gathered[following]
                ahead_bytes = _prefetched_bytes(rules, units[following].parts[0]) if has_next else 0
            own_gathered = new_gather * (1 + index if rules.keeps and not held else 1)
            if rules.holds and needs_gather:  # the output of the head's gather is freed before the loss
                ahead_bytes = state.gathered
                if run.name == "head":
                    rest = input_bytes + unit.logits
                    yield LiveBytes(
                        (place, index, "forward"), lagging, earlier, gathered_bytes + own_gathered + ahead_bytes, rest
                    )
                    ahead_bytes = 0
            rest = profile.forward_peak_bytes + rules.own_tokens
            yield LiveBytes(
                (place, index, "forward"),
                lagging,
                earlier,
                gathered_bytes + own_gathered + ahead_bytes,
                rest,
                unit.logits,
            )
        gathered_bytes += new_gather if _stays_gathered(rules, run) else 0
        gathered_bytes += run.times * new_gather if rules.keeps and run.name not in ("embed", "head") else 0
        kept_size = _earlier_bytes(rules, profile.kept_bytes, run.times, kept_size)
        casts += run.times * profile.cached_bytes


def _earlier_bytes(rules: PassRules, unit_index: int, units: int, kept: int) -> int:
    """Return the activations on the device: ``units`` that keep ``each``, and ``kept`` bytes.

    Offloaded: those of one unit.
    """
    if rules.offloads and units:
        return unit_index
    return kept + units * unit_index


def _prefetched_bytes(rules: PassRules, part: UnitStates) -> int:
    """Return the bytes of weights that are being gathered ahead."""
    return part.travel + (part.gathered if rules.gathers else 0)


def _find_gather_peak(rules: PassRules, unit: RunMemory, before: RunMemory | None = None) -> int:
    """Return the peak bytes while a unit's parts (dense, experts) are gathered one after another.

    With retained gather outputs, that of the unit ``before`` is still allocated, and freed before the weights are
    copied.
    """
    if rules.holds:
        weights_bytes = unit.state.gathered if rules.gathers else 0
        return unit.state.gathered + max(weights_bytes, before.state.gathered if before else 0)
    gathered_bytes = peak_bytes = 0
    for part in unit.parts:
        gathered_bytes += part.gathered if rules.gathers else 0
        peak_bytes = max(peak_bytes, gathered_bytes + part.travel)
    return peak_bytes


def _table_whole(rules: PassRules, units: Sequence[RunMemory]) -> int:
    """Return the bytes of a gathered tied table kept from the embedding's forward for the head on the same rank."""
    shared = rules.gathers and units[-1].run.name == "head"
    return (units[0].state if rules.root else rules.reductions.table.states).gathered if shared else 0


def _stays_gathered(rules: PassRules, run: UnitGroup) -> bool:
    """Return True if gathered weights stay until the backward: the head's, which follows at once, or its tied table."""
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
    """Yield the moments of B or BW.

    ``held``: weights are gathered; ``lagging``: bytes of sums that are reduced but not yet freed.
    """
    sums, kept = rules.reductions, _sum_kept_before(rules, units)
    gathered_bytes = _table_whole(rules, units)
    gathered_bytes += units[-1].state.gathered if rules.gathers and units[-1].run.name == "head" else 0
    gathered_bytes += held_bytes(units, but="head") if held else 0
    gradient_bytes = kept_for_w = 0  # gradients; kept for W
    logits = rules.buffers.output(stage)  # and outputs, kept until the pass has ended
    for place, unit in reversed([*enumerate(units)]):
        run, state = unit.run, unit.state
        deferred = _split(rules, unit).late_bytes if split else 0  # kept for W
        stays_gathered, regathered = (
            _is_block(rules, run) and held,
            state.gathered if _is_regathered(rules, run) and not held else 0,
        )
        freed_weights, reduces = (
            _let_go(rules, unit, stays=stays_gathered),
            sums.is_reduced(unit, last=last) and not deferred,
        )
        allocated_sums = sums.allocated_sums(
            unit, first=first, deferred=deferred > 0 and rules.makes_all, reduces=reduces
        )
        change, lag_size = (
            _change(rules, unit, first=first, reduces=reduces, off=deferred),
            sums.lag_bytes(unit) * reduces,
        )
        table = sums.table_shard_bytes(unit, first=first) if reduces or sums.is_reduced_in_b(unit, last=last) else 0
        if table and rules.counts.job.stack.loss == "chunked":  # allocated after the last chunk, within the unit
            born_with_table, table = allocated_sums._replace(reduced=table), 0
        else:
            born_with_table = allocated_sums
        profile: Profile | SplitProfile = (
            _split(rules, unit, born_with_table)
            if split
            else rules.counts.profile(unit.part, run.name, born_with_table)
        )
        for done_units in _list_peak_candidates(unit, second=bool(lag_size), but_one=_skips_prefetch(rules, place)):
            earlier = (
                _earlier_bytes(rules, unit.later.kept_bytes, run.times - done_units - 1, kept[place])
                + kept_for_w
                + done_units * deferred
            )
            lag_before, unit_index, freed_midway = (
                lag_size if done_units and reduces else lagging,
                run.times - done_units - 1,
                0,
            )
            gradients = gradient_bytes + done_units * change.lasting + lag_before
            if unit.born.experts and reduces and sums.midway and not split:
                profile, freed_midway = _profile_expert_reduction(
                    rules, unit, allocated_sums, first=first, lagging=lag_before
                )
            own_kept, sums_at_peak = profile.backward_kept_bytes, profile.backward_sums_bytes
            next_unit = unit if done_units < run.times - 1 else units[place - 1] if place else None
            ahead_bytes = 0 if held else _backward_prefetch_bytes(rules, unit, next_unit)
            still_gathered = gathered_bytes - (done_units * state.gathered if stays_gathered else 0)
            gathers_here = not (rules.ahead and (done_units or place + 1 < len(units)))
            for arriving in (
                _arrivals(rules, unit, gathered_bytes, still_gathered, ahead_bytes, alone=gathers_here)
                if regathered
                else ()
            ):
                kept_here, rest = earlier + unit.later.kept_bytes, rules.stream + logits
                yield LiveBytes((place, unit_index, "gather"), gradients, kept_here, arriving, rest)
            after_loss = rules.holds and isinstance(profile, Profile) and profile.after_loss_bytes
            if after_loss:  # the weights that the head gathers ahead, after its loss
                cause = (place, unit_index, "backward", "head.out")
                yield LiveBytes(cause, gradients, earlier, still_gathered + ahead_bytes, after_loss, unit.logits)
            yield LiveBytes(
                (place, unit_index, "backward", profile.backward_cause),
                gradients + sums_at_peak + table,
                earlier + own_kept,
                still_gathered + regathered + (0 if after_loss else ahead_bytes),
                profile.backward_peak_bytes - own_kept - sums_at_peak + logits,
                unit.logits,
            )
            if reduces:
                freed_midway, ahead_then = (
                    (lag_before, ahead_bytes) if sums.release == "next_copy" else (freed_midway, 0)
                )
                reducing_bytes, rest = (
                    gradients + change.reducing - freed_midway,
                    _last_gradient_bytes(rules, unit) + logits,
                )
                yield LiveBytes(
                    (place, unit_index, "reduce"),
                    reducing_bytes,
                    earlier,
                    still_gathered - freed_weights + ahead_then,
                    rest,
                )
        gradient_bytes += run.times * change.lasting + change.waits
        gathered_bytes, kept_for_w = (
            gathered_bytes - freed_weights * (run.times if stays_gathered else 1),
            kept_for_w + run.times * deferred,
        )
        lagging, logits = lag_size if reduces else lagging, logits + _lingering_bytes(rules, unit, split=split)


def _lingering_bytes(rules: PassRules, unit: RunMemory, *, split: bool) -> int:
    """Return the bytes that a unit's backward no longer needs and that are kept until the pass has ended."""
    return unit.logits * rules.lingers + (_split(rules, unit).released_bytes if split else 0)


def _arrivals(
    rules: PassRules, unit: RunMemory, earlier_bytes: int, here: int, coming: int, *, alone: bool
) -> Iterator[int]:
    """Yield the bytes of gathered weights while a unit's are gathered for its backward; ``alone``: not ahead."""
    if alone:
        yield earlier_bytes + _find_gather_peak(rules, unit)
    if coming and unit.born.experts and rules.ahead:  # gathered before the dense ones, awaited after them
        yield here + unit.state.gathered + unit.parts[-1].travel + coming


def _let_go(rules: PassRules, unit: RunMemory, *, stays: bool) -> int:
    """Return the bytes of weights gathered before a backward that it frees; ``stays``: a block's are gathered."""
    own_bytes = unit.state.gathered if rules.gathers and (stays or _stays_gathered(rules, unit.run)) else 0
    table = rules.reductions.table
    if not table.adds or not rules.gathers:
        return own_bytes
    return {"head": own_bytes + table.states.gathered, "embed": 0}.get(str(unit.run.name), own_bytes)


def _is_block(rules: PassRules, run: UnitGroup) -> bool:
    """Return True if a unit's gathered weights are freed after its forward, or kept for its backward."""
    return rules.gathers and run.name not in ("embed", "head")


def _is_regathered(rules: PassRules, run: UnitGroup) -> bool:
    """Return True if a unit is gathered for its backward."""
    return _is_block(rules, run) or (rules.embed and run.name == "embed")


def _last_gradient_bytes(rules: PassRules, unit: RunMemory) -> int:
    """Return the bytes allocated when the last gradient of a unit is made: of the stream, or of the table."""
    narrow, wide = rules.reductions.widths
    if rules.reductions.release == "next_copy" and unit.run.name == "embed":
        return 0  # its gradient counts as such
    return unit.state.sums * narrow // wide if unit.run.name == "embed" else rules.stream


def _change(rules: PassRules, unit: RunMemory, *, first: bool, reduces: bool, off: int) -> GradientChange:
    """Return the change of gradient bytes by a backward.

    ``off``: bytes that it keeps for W, which then makes all gradients, except ``bias_sum_bytes``, if reduced with
    every micro-batch.
    """
    sums = rules.reductions
    if off and rules.makes_all:
        bias_sums = first * sums.bias_sum_bytes(unit)
        return GradientChange(bias_sums, bias_sums, 0)
    made_later = _split(rules, unit).made_bytes if off and sums.destination == "late" else 0
    return sums.change(unit, first=first, reduces=reduces, made_later=made_later)


def _skips_prefetch(rules: PassRules, place: int) -> bool:
    """Return True if, in the backward, a group's last unit gathers nothing ahead while the one before it does."""
    return (rules.ahead or rules.holds) and rules.gathers and place <= 1


def _backward_prefetch_bytes(rules: PassRules, unit: RunMemory, before: RunMemory | None) -> int:
    """Return the bytes of weights of the unit ``before`` that are gathered ahead in the backward of ``unit``."""
    if rules.holds:
        return before.state.gathered if before and _is_regathered(rules, before.run) else 0
    ahead = rules.ahead and rules.gathers and unit.run.name != "embed"
    return _prefetched_bytes(rules, before.parts[-1]) if ahead and before and before.run.name != "embed" else 0


def _profile_expert_reduction(
    rules: PassRules, unit: RunMemory, born: GradientSums, *, first: bool, lagging: int
) -> tuple[Profile, int]:
    """Return the profile of a unit whose experts are reduced midway, and the bytes freed then: ``lagging``, or sums."""
    experts, sums = unit.parts[-1], rules.reductions
    shard = min(cut(experts), sums.shards(unit, first=first))
    freed = lagging if sums.release != "at_once" else cut(experts) and experts.sums
    return rules.counts.profile(unit.part, unit.run.name, born._replace(reduced=shard, gone=freed)), freed


def _sum_kept_before(rules: PassRules, units: Sequence[RunMemory]) -> list[int]:
    """Return, for each group, the activations kept by the groups before it."""
    kept_by_earlier, kept_size = [], 0
    for unit in units:
        kept_by_earlier.append(kept_size)
        kept_size = _earlier_bytes(rules, unit.later.kept_bytes, unit.run.times, kept_size)
    return kept_by_earlier


# W: the weight gradients deferred by B, from the last unit to the first


def _weights(
    rules: PassRules, units: Sequence[RunMemory], *, first: bool, last: bool, lagging: int
) -> Iterator[LiveBytes]:
    """Yield the moments of W; ``lagging``: bytes of sums that are reduced but not yet freed."""
    gradient_bytes, sums = 0, rules.reductions
    remaining = sum(unit.run.times * _split(rules, unit).late_bytes for unit in units)
    for place in reversed(range(len(units))):
        unit, profile = units[place], _split(rules, units[place], GradientSums(tied=units[place].born.tied))
        if not profile.late_bytes:
            continue
        reduces, change = sums.is_reduced(unit, last=last), _change_by_w(rules, unit, first=first, last=last)
        # sums of experts are allocated with their first gradient; all are, if they are reduced every time
        allocated_sums = sums.allocated_sums(unit, first=first)
        allocated_sums = (
            allocated_sums if rules.makes_all and not sums.is_bucketed else allocated_sums._replace(dense=0)
        )
        allocated_sums = allocated_sums._replace(experts=0) if sums.bias_sum_bytes(unit) else allocated_sums
        tables = (
            allocated_sums.tied and rules.makes_all and not sums.table.adds
        )  # else they are allocated from the first backward on
        allocated = allocated_sums.dense + allocated_sums.experts + (allocated_sums.table if tables else 0)
        lag_size = sums.lag_bytes(unit) if reduces else 0
        shard = min(cut(unit.parts[-1]), sums.shards(unit, first=first)) if unit.born.experts else 0
        # experts' gradients come first; the other sums are allocated while those are reduced
        experts_come_first = (
            profile.experts_peak_bytes > 0 and allocated_sums.dense > 0 and reduces and cut(unit.parts[-1]) > 0
        )
        early_peak = profile.experts_peak_bytes or profile.table_peak_bytes
        for done_units in _list_peak_candidates(unit, second=bool(lag_size)):
            lag_before, unit_index = lag_size if done_units and reduces else lagging, unit.run.times - done_units - 1
            kept_here, gradients = (
                remaining - done_units * profile.late_bytes,
                gradient_bytes + done_units * change.lasting + lag_before,
            )
            if early_peak:
                yield _moment(
                    place,
                    unit_index,
                    gradients + allocated - allocated_sums.dense,
                    kept_here,
                    early_peak - profile.late_bytes,
                )
            if reduces and unit.born.experts:
                gradients_midway, kept_by_others = (
                    gradients + allocated_sums.experts + shard,
                    kept_here - profile.late_bytes,
                )
                yield LiveBytes(
                    (place, unit_index, "reduce"), gradients_midway, kept_by_others, 0, profile.experts_bytes
                )
            if experts_come_first:
                gradients -= lag_before + (0 if sums.release != "at_once" else allocated_sums.experts)
            rest = profile.weights_peak_bytes - profile.late_bytes
            table = sums.table_shard_bytes(unit, first=first) if reduces else 0
            yield _moment(
                place, unit_index, gradients + allocated + shard * experts_come_first + table, kept_here, rest
            )
            if reduces:
                reducing_bytes, kept_by_others = gradients + change.reducing, kept_here - profile.late_bytes
                yield LiveBytes((place, unit_index, "reduce"), reducing_bytes, kept_by_others, 0, profile.closing_bytes)
        remaining -= unit.run.times * profile.late_bytes
        gradient_bytes += unit.run.times * change.lasting
        lagging = lag_size if reduces else lagging


def _change_by_w(rules: PassRules, unit: RunMemory, *, first: bool, last: bool) -> GradientChange:
    """Return the change by W of gradients whose dense sums B has allocated, unless they are reduced every time."""
    sums = rules.reductions
    reduces = sums.is_reduced(unit, last=last)
    if rules.makes_all or sums.is_bucketed:
        change, bias_sums = sums.change(unit, first=first, reduces=reduces), first * sums.bias_sum_bytes(unit)
        return GradientChange(change.reducing - bias_sums, change.lasting - bias_sums, change.waits)
    experts = first * (unit.born.experts - sums.bias_sum_bytes(unit))
    made_late = _split(rules, unit).made_bytes if sums.destination == "late" else 0
    lasting = unit.state.reduced - unit.state.sums if reduces else made_late
    return GradientChange(experts + sums.shards(unit, first=first), experts + lasting, 0)


def _moment(place: int, index: int, gradients: int, here: int, rest: int) -> LiveBytes:
    """Return a moment of W with ``here`` bytes kept for it; a negative ``rest`` is of freed operands."""
    return LiveBytes((place, index, "weights"), gradients, here + min(0, rest), 0, max(0, rest))


# Messages that join weights of several units (DeepSpeed)
#
#     ZeRO-1, -2   a bucket (two if reductions overlap) from a backward's first gradient to its end; this rank's
#                  gradients from the first reduction on; a copy of the bucket while it is all-reduced
#     ZeRO-3       gathered weights as ``planner/counts/parameter_prefetch.py`` simulates; a copy of the bucket
#                  while it is reduced
#
# Source: deepspeedai/DeepSpeed@0.19.8:deepspeed/runtime/zero/stage_1_and_2.py, setup_buckets, copy_grads_in_partition
# and allreduce_bucket; deepspeed/runtime/comm/coalesced_collectives.py, reduce_scatter_coalesced.


def _find_coalesced(counts: Counts, layout: Layout) -> Coalesced:
    """Return the messages that the job's software joins under a layout."""
    stack, keeps = counts.job.stack, policy(layout, counts.job)
    bucket = stack.reduce_bucket * counts.job.precision.summed_bytes if layout.shards > 1 else 0
    by_weights = stack.zero3_gather == "weights" and not keeps.weights_stay
    return Coalesced(bucket, by_weights, bucket > 0 and keeps.weights_stay and not keeps.gradients_stay, {})


def _with_coalesced(
    rules: PassRules, moments: Iterable[LiveBytes], units: Sequence[RunMemory], *, stage: int, backward: bool
) -> Iterator[LiveBytes]:
    """Yield the moments of a pass, with what joined messages hold."""
    coalesced = rules.coalesced
    if not (coalesced.by_weights or (coalesced.bucket and backward)):
        yield from moments
        return
    first_units = [0, *accumulate(unit.run.times for unit in units)]
    gathers, wide_bytes = _list_fetches(rules, stage), rules.counts.job.precision.high_precision_bytes
    for moment in moments:
        if len(moment.cause) > 2:
            place, index, phase, *_ = moment.cause
            if gathers is not None:
                if phase == "gather":
                    continue
                gathered_elements = (gathers.backward if backward else gathers.forward)[first_units[place] + index]
                moment = moment._replace(gathers=gathered_elements * wide_bytes)
            if backward:
                moment = _with_bucket(coalesced, moment, units, place, index, ends=phase == "reduce")
        yield moment


def _list_fetches(rules: PassRules, stage: int) -> Fetches | None:
    """Return the gathers of a stage's weights one by one; None if they are gathered by units, or stay gathered."""
    coalesced = rules.coalesced
    if not coalesced.by_weights:
        return None
    if stage not in coalesced.fetched:
        coalesced.fetched[stage] = fetches(rules.counts, rules.layout, chunk=stage)
    return coalesced.fetched[stage]


def _with_bucket(
    coalesced: Coalesced, at: LiveBytes, units: Sequence[RunMemory], place: int, index: int, *, ends: bool
) -> LiveBytes:
    """Return a moment of a backward with the bucket's copy.

    It is at the end of a unit that fills the bucket, and has shards from then on.
    """
    unit, last = units[place], place == 0
    earlier_bytes = sum(group.run.times * group.state.sums for group in units[place + 1 :])
    earlier_bytes += (unit.run.times - index - 1) * unit.state.sums
    filled_bytes = earlier_bytes + unit.state.sums * ends
    is_reduced = filled_bytes > coalesced.bucket or (ends and last)
    shard_bytes = (
        sum(group.run.times * group.state.reduced for group in units) if coalesced.shards_come and is_reduced else 0
    )
    copy_bytes = min(coalesced.bucket, filled_bytes) if ends and is_reduced else 0
    return at._replace(gradients=at.gradients + shard_bytes + copy_bytes)

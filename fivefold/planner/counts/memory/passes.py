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

from fivefold.bounded_types import COUNTED_BYTES
from fivefold.layout.local_weight import pad_vocab
from fivefold.layout.sharding import (
    gathers_for_backward,
    get_policy,
    holds_embedding,
    is_trained,
    joins_ends,
    needs_backward_gather,
    regathers_vision,
    shard_weight,
)
from fivefold.layout.spec import Layout
from fivefold.layout.stages import find_first_backward_stage
from fivefold.planner.counts.counts import Counts, Name, UnitGroup
from fivefold.planner.counts.memory.in_flight import PassKind
from fivefold.planner.counts.memory.liveness import NO_SUMS, GradientSums, SplitUnitProfile, UnitProfile
from fivefold.planner.counts.memory.reductions import GradientChange, Reductions, plan_reductions
from fivefold.planner.counts.memory.stages import (
    Cause,
    PassKey,
    PipelineStages,
    StageBuffers,
    UnitGroupMemory,
    count_gathered_stage_bytes,
    count_stage_buffers,
)
from fivefold.planner.counts.memory.states import count_reduced_width
from fivefold.planner.counts.operations.local_shapes import get_local_degrees
from fivefold.planner.counts.parameter_prefetch import PrefetchedGathers, simulate_prefetch
from fivefold.units import ceil_div


class LiveBytes(NamedTuple):
    """Live bytes at a moment, by part."""

    cause: Cause
    gradients: int  # change since the pass began
    activations: int
    gathered: int
    other: int  # everything else, with the logits
    logits: int = 0

    @property
    def bytes(self) -> int:
        """Return the sum of the parts."""
        return self.gradients + self.activations + self.gathered + self.other


class CoalescedMessages(NamedTuple):
    """The bytes held by messages that join weights of several units; zero and False if messages are per unit."""

    bucket_bytes: int  # bytes of gradients that are reduced at once, as they are accumulated
    copy_width: tuple[int, int]  # bytes of an element in copies of the bucket while it is reduced, and as accumulated
    gathers_by_weight: bool  # weights are gathered one by one, in the order of their use
    allocates_shards: bool  # ZeRO-2: this rank's gradients are allocated from the first reduction on
    gathers_by_stage: dict[int, PrefetchedGathers | None]  # by stage, filled by ``_find_prefetched_gathers``
    returned_bytes: dict[Name, int]  # by unit: a gradient that comes back from host memory, if gradients are there

    @property
    def is_uneven(self) -> bool:
        """Return True if live bytes do not grow evenly over equal units."""
        return self.gathers_by_weight or self.bucket_bytes > 0


class PassRules(NamedTuple):
    """The properties of a layout, its model and its job that decide the moments of a pass."""

    counts: Counts
    layout: Layout
    stages: PipelineStages
    reductions: Reductions
    buffers: StageBuffers
    coalesced: CoalescedMessages
    gathers_weights: bool  # weights are gathered for each pass
    keeps_gathered: bool  # weights gathered for an F stay gathered until its B
    keeps_embedding: bool  # so do those of the embedding, whose backward does not need them
    prefetches: bool  # the next unit's weights are gathered while a unit computes
    retains_gather_output: bool  # the gather's output is kept next to the weights while the next unit's are gathered
    joins_ends: bool  # embedding and head are one unit
    regathers_embedding: bool  # the embedding is gathered for its backward
    regathers_vision: bool  # the vision tower, part of the embedding's unit, is gathered for its backward
    retains_graph: bool  # the autograd graph stays between B and W
    keeps_logits: bool  # the caller of the loss keeps the logits until the backward has ended
    offloads_activations: bool  # activations
    stream_bytes: int  # bytes of a stage's input
    token_bytes: int  # bytes of ids and targets, which are copied under context parallelism
    first_equal_stages: tuple[int, ...]  # for each stage, the first one that is equal in everything
    first_backward: int  # the first stage with a trained weight

    @property
    def makes_all(self) -> bool:
        """Return True if W makes all gradients of a unit that defers any."""
        return self.reductions.every_micro_batch or self.retains_graph


def pass_rules(counts: Counts, layout: Layout, stages: PipelineStages) -> PassRules:
    """Return the rules of the passes of a layout with the stages ``stages``."""
    job = counts.job
    stack = counts.job.stack
    degrees = get_local_degrees(layout)
    local = counts.get_local(degrees)
    zero_policy = get_policy(layout, job)
    gathers_weights = not zero_policy.weights_stay
    keeps_gathered = gathers_weights and not gathers_for_backward(layout, job)
    reductions = plan_reductions(counts, layout)
    buffers = count_stage_buffers(layout, job, stages=len(stages.chunks), stream_bytes=local.entry_bytes)
    coalesced = _find_coalesced(counts, layout)
    retains_gather_output = stack.comm_buffers == "retained" and layout.shards > 1 and not coalesced.gathers_by_weight
    first_stages: dict[tuple[int, int], int] = {}
    equality_keys = [
        (chunk.first_equal_stage, buffers.output_bytes(stage)) for stage, chunk in enumerate(stages.chunks)
    ]
    return PassRules(
        counts=counts,
        layout=layout,
        stages=stages,
        reductions=reductions,
        buffers=buffers,
        coalesced=coalesced,
        gathers_weights=gathers_weights,
        keeps_gathered=keeps_gathered,
        keeps_embedding=keeps_gathered
        and holds_embedding(job)
        and not joins_ends(layout, job)
        and not reductions.table.is_local,
        prefetches="dp" in stack.overlap
        and stack.param_all_gather == "overlapped"
        and not (retains_gather_output or zero_policy.runs_alone),
        retains_gather_output=retains_gather_output,
        joins_ends=joins_ends(layout, job),
        regathers_embedding=needs_backward_gather("embed", layout, job)
        and (retains_gather_output or stack.backward_all_gather == "needed"),
        regathers_vision=regathers_vision(layout, job),
        retains_graph=stack.deferred_wgrad == "graph",
        keeps_logits=stack.loss_facts.retains_logits,
        offloads_activations="activations" in layout.list_offloaded(job),
        stream_bytes=local.entry_bytes,
        token_bytes=16 * local.rows if layout.cp > 1 else 0,
        first_equal_stages=tuple(first_stages.setdefault(key, stage) for stage, key in enumerate(equality_keys)),
        first_backward=find_first_backward_stage(counts.model, layout, job),
    )


def pass_peak(rules: PassRules, pass_kind: PassKind) -> tuple[int, Cause]:
    """Return the peak bytes of a pass and their cause; cached, shared by stages with equal units."""
    last = pass_kind.last and not rules.reductions.keeps_unsharded
    pending = count_pending_bytes(rules, pass_kind)
    first_equal = rules.stages.chunks[pass_kind.stage].first_equal_stage
    output_bytes = rules.buffers.output_bytes(pass_kind.stage)
    key = PassKey(
        first_equal,
        output_bytes,
        pass_kind.kind,
        pass_kind.first,
        last,
        pending,
        pass_kind.is_gathered,
        rules.reductions.every_micro_batch,
    )
    peak = rules.stages.peaks.get(key)
    if peak is None:
        moments = _list_pass_moments(
            rules, pass_kind, last=last, pending=pending, include_non_peak_units=rules.coalesced.is_uneven
        )
        peak = rules.stages.peaks[key] = max(((moment.bytes, moment.cause) for moment in moments), key=itemgetter(0))
    return peak


def list_pass_moments(
    rules: PassRules, pass_kind: PassKind, *, include_non_peak_units: bool = False
) -> Iterator[LiveBytes]:
    """Return the moments of a pass in order: the live bytes at each allocation that may be the peak.

    ``include_non_peak_units``: also those of units that cannot be the peak.
    """
    pending = count_pending_bytes(rules, pass_kind)
    return _list_pass_moments(
        rules, pass_kind, last=pass_kind.last, pending=pending, include_non_peak_units=include_non_peak_units
    )


def _list_pass_moments(
    rules: PassRules, pass_kind: PassKind, *, last: bool, pending: int, include_non_peak_units: bool
) -> Iterator[LiveBytes]:
    """Return the moments of a pass whose predecessor left ``pending`` bytes of sums in flight."""
    kind = pass_kind.kind
    stage = pass_kind.stage
    first = pass_kind.first and not rules.reductions.is_persistent
    units: Sequence[UnitGroupMemory] = rules.stages.chunks[stage].groups
    if include_non_peak_units:
        units = [unit._replace(can_be_peak=True) for unit in units]
    # stage 0: its B computes nothing, as no earlier stage needs a gradient: W does all
    w_computes_all = rules.retains_graph and stage == 0
    if kind == "B" and w_computes_all:
        kept_size = rules.stages.chunks[stage].kept_bytes
        gathered_bytes = (
            count_gathered_stage_bytes(units, embedding=rules.keeps_embedding) if pass_kind.is_gathered else 0
        )
        cause = (len(units) - 1, 0, "backward", "waits")
        other = rules.stream_bytes + rules.buffers.output_bytes(stage)
        return iter([LiveBytes(cause, pending, kept_size, gathered_bytes, other)])
    if kind == "W" and not w_computes_all and not any(_split_profile(rules, unit).deferred_bytes for unit in units):
        return iter([LiveBytes((len(units) - 1, 0, "weights"), pending, 0, 0, 0)])  # of an end alone: nothing to do
    if kind == "BW" and stage < rules.first_backward:
        return iter([LiveBytes((0, 0, "backward"), pending, 0, 0, 0)])
    if kind == "W" and not w_computes_all:
        moments = _list_w_moments(rules, units, first=first, last=last, pending=pending)
        return _subtract_activations(moments, rules.buffers.graph_bytes(stage)) if rules.retains_graph else moments
    if kind == "F":
        moments = _list_forward_moments(
            rules,
            units,
            first=first,
            weights_gathered=pass_kind.is_gathered,
            pending=pending,
            held=rules.stages.chunks[stage].held_input_bytes,
        )
    else:
        moments = _list_backward_moments(
            rules,
            units,
            stage,
            first=first,
            last=last,
            split=kind == "B",
            weights_gathered=pass_kind.is_gathered,
            pending=pending,
        )
    if kind == "W":  # the gradient of its output is a buffer that W does not count as its own
        moments = _subtract_activations(moments, rules.stream_bytes * rules.buffers.has_recv_buffers)
    if not (rules.coalesced.gathers_by_weight or (rules.coalesced.bucket_bytes and kind != "F")):
        return moments
    return _with_coalesced(rules, moments, units, stage=stage, backward=kind != "F")


def _subtract_activations(moments: Iterator[LiveBytes], size: int) -> Iterator[LiveBytes]:
    """Yield the moments less ``size`` bytes of activations, which are counted elsewhere."""
    return (moment._replace(activations=max(0, moment.activations - size)) for moment in moments)


def count_deferred_bytes(rules: PassRules, stage: int) -> int:
    """Return the bytes that one micro-batch keeps between B and W of a stage."""
    chunk, cache = rules.stages.chunks[stage], rules.stages.deferred_bytes
    key = chunk.first_equal_stage, rules.reductions.every_micro_batch
    if key not in cache:
        deferred = sum(group.group.times * _split_profile(rules, group).deferred_bytes for group in chunk.groups)
        cache[key] = (
            chunk.kept_bytes if rules.retains_graph and stage == 0 else deferred - rules.buffers.graph_bytes(stage)
        )
    return cache[key]


def count_pending_bytes(rules: PassRules, pass_kind: PassKind) -> int:
    """Return the bytes of gradient sums whose reduction the previous pass has left in flight."""
    previous = pass_kind.previous
    if previous is None:
        return 0
    units = rules.stages.chunks[previous.stage].groups
    deferred = [_split_profile(rules, unit).deferred_bytes if previous.kind != "BW" else 0 for unit in units]
    experts_first = any(_split_profile(rules, unit).experts_peak_bytes for unit in units)
    return rules.reductions.in_flight_bytes(
        units, previous, deferred, next_pass=(pass_kind.kind, pass_kind.stage), experts_first=experts_first
    )


def count_w_reduced_bytes(rules: PassRules, stage: int) -> int:
    """Return the bytes of this rank's reduced gradients that W of a stage makes, not its B."""
    deferred_units = [unit for unit in rules.stages.chunks[stage].groups if _split_profile(rules, unit).deferred_bytes]
    return sum(
        unit.group.times * (unit.states.reduced - rules.reductions.count_bias_sum_bytes(unit))
        for unit in deferred_units
    )


def count_b_freed_bytes(rules: PassRules, stage: int) -> int:
    """Return the bytes of sums, less this rank's shards of them, that the last B of a stage reduces, not its W."""
    sums = rules.reductions
    if sums.keeps_unsharded or sums.is_bucketed or rules.makes_all:
        return 0
    reduced_units = [
        unit for unit in rules.stages.chunks[stage].groups if not _split_profile(rules, unit).deferred_bytes
    ]
    return sum(unit.group.times * (unit.states.sums - unit.states.reduced) for unit in reduced_units)


def _split_profile(rules: PassRules, unit: UnitGroupMemory, sums: GradientSums = NO_SUMS) -> SplitUnitProfile:
    return rules.counts.profile_deferred_wgrad(
        unit.degrees, unit.group.name, sums, waiting=rules.reductions.get_waiting(unit)
    )


def _list_peak_candidates(unit: UnitGroupMemory, *, second: bool = False, second_last: bool = False) -> tuple[int, ...]:
    """Return the indices of the units of a group that can be the peak: none, or first and last.

    ``second`` and ``second_last`` add the second and the last but one.
    """
    times = unit.group.times
    if not unit.can_be_peak or times == 1:
        return (0,) if unit.can_be_peak else ()
    inner = ([1] if second else []) + ([times - 2] if second_last else [])
    return (0, *sorted({index for index in inner if 0 < index < times - 1}), times - 1)


# F


def _list_forward_moments(
    rules: PassRules,
    units: Sequence[UnitGroupMemory],
    *,
    first: bool,
    weights_gathered: bool,
    pending: int,
    held: int,
) -> Iterator[LiveBytes]:
    """Yield the moments of F.

    ``weights_gathered``: weights are gathered already; if weights are not kept from an F to a B, only the head's.
    ``held``: bytes of the stage's input that stay allocated after its first unit, which does not keep them.
    """
    kept_size = 0
    casts = 0
    gathered_bytes = 0 if units[0].group.name == "embed" else _count_gathered_table_bytes(rules, units)
    names = [str(unit.group.name) for unit in units]
    already_gathered = [
        weights_gathered and (name == "head" or (rules.keeps_gathered and (name != "embed" or rules.keeps_embedding)))
        for name in names
    ]
    gathered_bytes += sum(
        unit.group.times * unit.states.gathered
        for unit, is_gathered in zip(units, already_gathered, strict=True)
        if is_gathered
    )
    for group_index, unit in enumerate(units):
        group, profile, states = unit.group, unit.later_profile, unit.states
        new_gather = 0 if not rules.gathers_weights or already_gathered[group_index] else states.gathered
        needs_gather = first or bool(new_gather)
        input_bytes = (rules.stream_bytes if group.name != "embed" else 0) + rules.token_bytes
        for unit_index in _list_peak_candidates(unit):
            earlier = (
                _count_kept_so_far(rules, profile.kept_bytes, unit_index, kept_size)
                + casts
                + unit_index * profile.cached_bytes
                + held * (group_index + unit_index > 0)
            )
            previous_unit = unit if unit_index else units[group_index - 1] if group_index else None
            if needs_gather and not (rules.prefetches and group_index + unit_index):
                gather_peak = gathered_bytes + _find_gather_peak(rules, unit, previous_unit)
                yield LiveBytes((group_index, unit_index, "gather"), pending, earlier, gather_peak, input_bytes)
            ahead_bytes = 0
            if rules.prefetches and (first or rules.gathers_weights):
                following = group_index + (unit_index == group.times - 1)
                has_next = following < len(units) and not already_gathered[following]
                ahead_bytes = _count_prefetched_bytes(rules, units[following]) if has_next else 0
            own_gathered = new_gather * (1 + unit_index if rules.keeps_gathered and not weights_gathered else 1)
            if rules.retains_gather_output and needs_gather:  # the output of the head's gather is freed before the loss
                ahead_bytes = states.gathered
                if group.name == "head":
                    other = input_bytes + unit.logits_bytes
                    yield LiveBytes(
                        (group_index, unit_index, "forward"),
                        pending,
                        earlier,
                        gathered_bytes + own_gathered + ahead_bytes,
                        other,
                    )
                    ahead_bytes = 0
            other = profile.forward_peak_bytes + rules.token_bytes
            yield LiveBytes(
                (group_index, unit_index, "forward"),
                pending,
                earlier,
                gathered_bytes + own_gathered + ahead_bytes,
                other,
                unit.logits_bytes,
            )
        gathered_bytes += min(new_gather, _find_lasting_bytes(rules, unit)) if _stays_gathered(rules, group) else 0
        gathered_bytes += group.times * new_gather if rules.keeps_gathered and _is_kept_unit(rules, group) else 0
        kept_size = _count_kept_so_far(rules, profile.kept_bytes, group.times, kept_size)
        casts += group.times * profile.cached_bytes


def _count_kept_so_far(rules: PassRules, unit_bytes: int, n_units: int, kept_before: int) -> int:
    """Return the activations on the device: ``n_units`` that keep ``unit_bytes`` each, and ``kept_before``.

    Offloaded: those of one unit.
    """
    if rules.offloads_activations and n_units:
        return unit_bytes
    return kept_before + n_units * unit_bytes


def _count_prefetched_bytes(rules: PassRules, unit: UnitGroupMemory) -> int:
    """Return the bytes of weights that are being gathered ahead: of a block its dense and its expert weights."""
    parts = unit.parts[:1] if isinstance(unit.group.name, str) else unit.parts
    return sum(part.gather_buffers + (part.gathered if rules.gathers_weights else 0) for part in parts)


def _find_gather_peak(rules: PassRules, unit: UnitGroupMemory, previous: UnitGroupMemory | None = None) -> int:
    """Return the peak bytes while a unit's parts (dense, experts) are gathered one after another.

    With retained gather outputs, that of the unit ``previous`` is still allocated, and freed before the weights are
    copied.
    """
    if rules.retains_gather_output:
        weights_bytes = unit.states.gathered if rules.gathers_weights else 0
        return unit.states.gathered + max(weights_bytes, previous.states.gathered if previous else 0)
    gathered_bytes = peak_bytes = 0
    for part in unit.parts:
        gathered_bytes += part.gathered if rules.gathers_weights else 0
        peak_bytes = max(peak_bytes, gathered_bytes + part.gather_buffers)
    return peak_bytes


def _count_gathered_table_bytes(rules: PassRules, units: Sequence[UnitGroupMemory]) -> int:
    """Return the bytes of a gathered tied table kept from the embedding's forward for the head on the same rank."""
    shared = rules.gathers_weights and units[-1].group.name == "head"
    return (units[0].states if rules.joins_ends else rules.reductions.table.states).gathered if shared else 0


def _stays_gathered(rules: PassRules, group: UnitGroup) -> bool:
    """Return True if gathered weights stay until the backward: the head's, which follows at once, or its tied table."""
    return group.name == "head" or (group.name == "embed" and (rules.joins_ends or rules.reductions.table.is_local))


def _find_lasting_bytes(rules: PassRules, unit: UnitGroupMemory) -> int:
    """Return the bytes of a unit's gathered weights that may stay until the backward: of the embedding, its tables."""
    only_table = unit.group.name == "embed" and not rules.joins_ends
    return unit.parts[-1].gathered if only_table else unit.states.gathered


# B and BW


class _GroupBackward(NamedTuple):
    """The backward of any unit of a group: what it holds, and by how much it changes the live bytes."""

    deferred: int  # kept for W
    reduces: bool  # its gradient sums are reduced
    sums: GradientSums  # allocated by it
    change: GradientChange
    own_pending: int  # its sums, freed only when the next unit's have been reduced
    table_shards: int  # this rank's gradients of a tied table, allocated ahead of the unit's peak
    profile: UnitProfile | SplitUnitProfile
    stays_gathered: bool  # its weights are gathered since the forward and freed one unit after another
    regathered: int  # weights gathered for it
    freed_weights: int  # weights freed by it


def _plan_group_backward(
    rules: PassRules, unit: UnitGroupMemory, *, first: bool, last: bool, split: bool, weights_gathered: bool
) -> _GroupBackward:
    """Return the backward of a unit: of B (``split``) or BW, the first or last one that adds to the gradient sums."""
    group, sums = unit.group, rules.reductions
    deferred = _split_profile(rules, unit).deferred_bytes if split else 0
    reduces = sums.is_reduced(unit, last=last) and not deferred
    allocated_sums = sums.allocated_sums(unit, first=first, deferred=deferred > 0 and rules.makes_all, reduces=reduces)
    table = sums.table_shard_bytes(unit, first=first) if reduces or sums.is_reduced_in_b(unit, last=last) else 0
    if table and rules.counts.job.stack.loss_facts.chunked:  # allocated after the last chunk, within the unit
        sums_with_table = allocated_sums._replace(shard_bytes=table)
        table = 0
    else:
        sums_with_table = allocated_sums if split else _split_table_sums(rules, unit, allocated_sums)
    stays_gathered = weights_gathered and rules.gathers_weights and _is_kept_unit(rules, group)
    return _GroupBackward(
        deferred=deferred,
        reduces=reduces,
        sums=allocated_sums,
        change=_count_change(rules, unit, first=first, reduces=reduces, deferred=deferred),
        own_pending=sums.count_pending_sum_bytes(unit) if reduces else 0,
        table_shards=table,
        profile=(
            _split_profile(rules, unit, sums_with_table)
            if split
            else rules.counts.profile(unit.degrees, group.name, sums_with_table)
        ),
        stays_gathered=stays_gathered,
        regathered=0 if weights_gathered else _count_regathered(rules, unit),
        freed_weights=_count_freed_gathers(rules, unit, is_regathered=stays_gathered),
    )


def _count_regathered(rules: PassRules, unit: UnitGroupMemory) -> int:
    """Return the bytes of weights that are gathered for a unit's backward; of the embedding, perhaps the tower's."""
    if _is_regathered(rules, unit.group):
        return unit.states.gathered
    regathers_tower = unit.group.name == "embed" and rules.regathers_vision
    return sum(part.gathered for part in unit.parts[:-1]) if regathers_tower else 0


def _list_backward_moments(
    rules: PassRules,
    units: Sequence[UnitGroupMemory],
    stage: int,
    *,
    first: bool,
    last: bool,
    split: bool,
    weights_gathered: bool,
    pending: int,
) -> Iterator[LiveBytes]:
    """Yield the moments of B or BW.

    ``weights_gathered``: weights are gathered; ``pending``: bytes of sums that are reduced but not yet freed.
    """
    held = rules.stages.chunks[stage].held_input_bytes if stage > rules.first_backward else 0
    kept_by_earlier = [held + kept_bytes for kept_bytes in _sum_kept_before(rules, units)]
    gathered_bytes = _count_gathered_before_backward(rules, units, weights_gathered=weights_gathered)
    gradient_bytes = kept_for_w = 0  # gradients; kept for W
    logits = rules.buffers.output_bytes(stage)  # and outputs, kept until the pass has ended
    for group_index, unit in reversed([*enumerate(units)]):
        times = unit.group.times
        if not rules.counts.has_backward(unit.group.name):
            continue
        plan = _plan_group_backward(rules, unit, first=first, last=last, split=split, weights_gathered=weights_gathered)
        gathers_ahead = rules.prefetches or rules.retains_gather_output
        for done_units in _list_peak_candidates(
            unit,
            second=bool(plan.own_pending),
            # the last unit of a pass gathers nothing ahead, the one before it does
            second_last=gathers_ahead and rules.gathers_weights and group_index <= 1,
        ):
            later_units = times - done_units - 1
            kept_bytes = _count_kept_so_far(
                rules, unit.later_profile.kept_bytes, later_units, kept_by_earlier[group_index]
            )
            next_unit = unit if later_units else units[group_index - 1] if group_index else None
            follows_another = done_units > 0 or group_index + 1 < len(units)
            yield from _list_unit_backward_moments(
                rules,
                unit,
                plan,
                _UnitBackward(
                    place=(group_index, later_units),
                    gradients=gradient_bytes + done_units * plan.change.after_backward,
                    pending=plan.own_pending if done_units and plan.reduces else pending,
                    kept=kept_bytes + kept_for_w + done_units * plan.deferred,
                    gathered=gathered_bytes - (done_units * unit.states.gathered if plan.stays_gathered else 0),
                    prefetched=0 if weights_gathered else _backward_prefetch_bytes(rules, unit, next_unit),
                    was_prefetched=rules.prefetches and unit.group.name != "embed" and follows_another,
                    outputs=logits,
                ),
                first=first,
                split=split,
            )
        gradient_bytes += times * plan.change.after_backward + plan.change.tied_table
        gathered_bytes -= plan.freed_weights * (times if plan.stays_gathered else 1)
        kept_for_w += times * plan.deferred
        pending = plan.own_pending if plan.reduces else pending
        logits += _count_kept_to_end_bytes(rules, unit, split=split)


def _count_gathered_before_backward(
    rules: PassRules, units: Sequence[UnitGroupMemory], *, weights_gathered: bool
) -> int:
    """Return the bytes of gathered weights when a backward begins: of the table, the head, and with all the blocks."""
    gathered_bytes = _count_gathered_table_bytes(rules, units)
    if rules.gathers_weights and units[-1].group.name == "head":
        gathered_bytes += units[-1].states.gathered
    if weights_gathered:
        gathered_bytes += sum(
            unit.group.times * unit.states.gathered for unit in units if _is_kept_unit(rules, unit.group)
        )
    return gathered_bytes


class _UnitBackward(NamedTuple):
    """The live bytes when the backward of one unit of a group begins."""

    place: tuple[int, int]  # index of its group, and of it within the group
    gradients: int  # change since the pass began
    pending: int  # sums that are reduced but not yet freed
    kept: int  # activations, without those of this unit
    gathered: int  # weights
    prefetched: int  # weights of the next unit, gathered ahead meanwhile
    was_prefetched: bool  # its own weights were gathered ahead
    outputs: int  # logits and outputs, kept until the pass has ended


def _list_unit_backward_moments(
    rules: PassRules, unit: UnitGroupMemory, plan: _GroupBackward, now: _UnitBackward, *, first: bool, split: bool
) -> Iterator[LiveBytes]:
    """Yield the moments of the backward of one unit: its gather, its operations, its reduction."""
    profile, freed_midway, prefetched = plan.profile, 0, now.prefetched
    gradients = now.gradients + now.pending
    if unit.first_sums.experts and plan.reduces and rules.reductions.reduces_experts_midway and not split:
        profile, freed_midway = _profile_expert_reduction(rules, unit, plan.sums, first=first, pending=now.pending)
    if plan.regathered and not now.was_prefetched:
        kept_bytes = now.kept + unit.later_profile.kept_bytes
        gather_peak = now.gathered + _find_gather_peak(rules, unit)
        yield LiveBytes((*now.place, "gather"), gradients, kept_bytes, gather_peak, rules.stream_bytes + now.outputs)
    gathers_after_loss = rules.retains_gather_output or rules.coalesced.gathers_by_weight
    after_loss = gathers_after_loss and isinstance(profile, UnitProfile) and profile.after_loss_bytes
    if after_loss:  # with what the head gathers after its loss: weights ahead, or its own one by one
        cause = (*now.place, "backward", "head.out")
        yield LiveBytes(cause, gradients, now.kept, now.gathered + prefetched, after_loss, unit.logits_bytes)
    own_kept, sums_at_peak = profile.backward_kept_bytes, profile.backward_sums_bytes
    if rules.coalesced.gathers_by_weight and isinstance(profile, UnitProfile) and profile.recompute_bytes:
        cause = (*now.place, "backward", RECOMPUTATION)
        yield LiveBytes(cause, gradients, now.kept, now.gathered, profile.recompute_bytes + now.outputs)
        peak_bytes = profile.after_recompute_bytes
        own_kept, sums_at_peak = min(own_kept, peak_bytes), 0
    else:
        peak_bytes = profile.backward_peak_bytes
    yield LiveBytes(
        (*now.place, "backward", profile.backward_cause),
        gradients + sums_at_peak + plan.table_shards,
        now.kept + own_kept,
        now.gathered + plan.regathered + (0 if after_loss else prefetched),
        peak_bytes - own_kept - sums_at_peak + now.outputs,
        unit.logits_bytes,
    )
    if plan.reduces:
        if rules.reductions.release == "next_copy":
            freed_midway = now.pending
        else:
            prefetched = 0
        yield LiveBytes(
            (*now.place, "reduce"),
            gradients + plan.change.during_reduction - freed_midway,
            now.kept,
            now.gathered - plan.freed_weights + prefetched,
            _count_last_gradient_bytes(rules, unit) + now.outputs,
        )


def _split_table_sums(rules: PassRules, unit: UnitGroupMemory, allocated_sums: GradientSums) -> GradientSums:
    """Return the sums that a backward of the head allocates, those of a tied table separate from its own.

    The table belongs to the embedding, so that its gradient does not allocate the sums of the head's norm.
    """
    table = rules.reductions.table
    is_separate = unit.group.name == "head" and table.head_accumulates and table.is_output and not rules.joins_ends
    if not is_separate or allocated_sums.table or allocated_sums.dense <= table.states.sums:
        return allocated_sums
    dense = allocated_sums.dense - table.states.sums
    return allocated_sums._replace(dense=dense, table=table.states.sums, tied=True)


def _count_kept_to_end_bytes(rules: PassRules, unit: UnitGroupMemory, *, split: bool) -> int:
    """Return the bytes that a unit's backward no longer needs and that are kept until the pass has ended."""
    return unit.logits_bytes * rules.keeps_logits + (_split_profile(rules, unit).released_bytes if split else 0)


def _count_freed_gathers(rules: PassRules, unit: UnitGroupMemory, *, is_regathered: bool) -> int:
    """Return the bytes of gathered weights that a backward frees.

    ``is_regathered``: the weights of a block are gathered again for the backward. Where the head shares the embedding
    table, its backward frees the table too.
    """
    own_bytes = unit.states.gathered if rules.gathers_weights and is_regathered else 0
    if rules.gathers_weights and not is_regathered and _stays_gathered(rules, unit.group):
        own_bytes = _find_lasting_bytes(rules, unit)
    table = rules.reductions.table
    if not table.head_accumulates or not rules.gathers_weights:
        return own_bytes
    own_bytes_by_end = {"head": own_bytes + table.states.gathered, "embed": max(0, own_bytes - table.states.gathered)}
    return own_bytes_by_end.get(str(unit.group.name), own_bytes)


def _is_kept_unit(rules: PassRules, group: UnitGroup) -> bool:
    """Return True if ``keeps_gathered`` keeps a unit's weights: of blocks, and of the embedding if it has hooks.

    FSDP2 frees them in its post-backward hook. That of the embedding, whose input has no gradient, runs when the
    backward has ended.

    Source: pytorch/pytorch@v2.13.0:torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, reshard and post_backward.
    """
    return group.name not in ("embed", "head") or (group.name == "embed" and rules.keeps_embedding)


def _is_block(rules: PassRules, group: UnitGroup) -> bool:
    """Return True if a unit's gathered weights are freed after its forward, or kept for its backward if it has one."""
    return rules.gathers_weights and group.name not in ("embed", "head") and rules.counts.has_backward(group.name)


def _is_regathered(rules: PassRules, group: UnitGroup) -> bool:
    """Return True if a unit is gathered for its backward."""
    return _is_block(rules, group) or (rules.regathers_embedding and group.name == "embed")


def _count_last_gradient_bytes(rules: PassRules, unit: UnitGroupMemory) -> int:
    """Return the bytes allocated when the last gradient of a unit is made: of the stream, or of the table.

    The gradients of learned positions and of a norm after them are made, and freed, before that of the table.
    """
    if unit.group.name != "embed":
        return rules.stream_bytes
    if rules.reductions.release == "next_copy":
        return 0  # its gradient counts as such
    gradient_bytes, _ = rules.reductions.element_bytes
    trained = (op.wgrad_numels for op in rules.counts.list_ops(unit.degrees, "embed") if op.wgrad_numels)
    return sum(next(trained, ())) * gradient_bytes


def _count_change(
    rules: PassRules, unit: UnitGroupMemory, *, first: bool, reduces: bool, deferred: int
) -> GradientChange:
    """Return how many bytes of gradients a backward allocates and keeps.

    ``deferred``: bytes that the backward keeps for W. If gradients are reduced with every micro-batch, W then computes
    all of them, except those in ``count_bias_sum_bytes``.
    """
    sums = rules.reductions
    if deferred and rules.makes_all:
        bias_sums = first * sums.count_bias_sum_bytes(unit)
        return GradientChange(bias_sums, bias_sums, 0)
    made_later = _split_profile(rules, unit).wgrad_bytes if deferred and sums.destination == "late" else 0
    change = sums.count_gradient_change(unit, first=first, reduces=reduces, made_later=made_later)
    by_w = first * sums.count_expert_sums_by_w(unit) if deferred else 0
    return GradientChange(change.during_reduction - by_w, change.after_backward - by_w, change.tied_table)


def _backward_prefetch_bytes(rules: PassRules, unit: UnitGroupMemory, next_unit: UnitGroupMemory | None) -> int:
    """Return the bytes of weights of the unit ``next_unit`` that are gathered ahead in the backward of ``unit``."""
    if rules.retains_gather_output:
        return next_unit.states.gathered if next_unit and _is_regathered(rules, next_unit.group) else 0
    ahead = rules.prefetches and rules.gathers_weights and unit.group.name != "embed"
    has_next = next_unit is not None and next_unit.group.name != "embed"
    if not ahead or next_unit is None or not has_next or not rules.counts.has_backward(next_unit.group.name):
        return 0
    return _count_prefetched_bytes(rules, next_unit)


def _profile_expert_reduction(
    rules: PassRules, unit: UnitGroupMemory, unit_sums: GradientSums, *, first: bool, pending: int
) -> tuple[UnitProfile, int]:
    """Return the profile of a unit whose experts are reduced midway, and the bytes freed then: ``pending``, or sums."""
    experts, sums = unit.parts[-1], rules.reductions
    shard = min(experts.new_shard, sums.count_new_shards(unit, first=first))
    freed = pending if sums.release != "at_once" else experts.new_shard and experts.sums
    return rules.counts.profile(
        unit.degrees, unit.group.name, unit_sums._replace(shard_bytes=shard, freed_bytes=freed)
    ), freed


def _sum_kept_before(rules: PassRules, units: Sequence[UnitGroupMemory]) -> list[int]:
    """Return, for each group, the activations kept by the groups before it."""
    kept_by_earlier, kept_size = [], 0
    for unit in units:
        kept_by_earlier.append(kept_size)
        kept_size = _count_kept_so_far(rules, unit.later_profile.kept_bytes, unit.group.times, kept_size)
    return kept_by_earlier


# W: the weight gradients deferred by B, from the last unit to the first


def _list_w_moments(
    rules: PassRules, units: Sequence[UnitGroupMemory], *, first: bool, last: bool, pending: int
) -> Iterator[LiveBytes]:
    """Yield the moments of W; ``pending``: bytes of sums that are reduced but not yet freed."""
    gradient_bytes, sums = 0, rules.reductions
    remaining = sum(unit.group.times * _split_profile(rules, unit).deferred_bytes for unit in units)
    for group_index in reversed(range(len(units))):
        unit = units[group_index]
        profile = _split_profile(rules, units[group_index], GradientSums(tied=units[group_index].first_sums.tied))
        if not profile.deferred_bytes:
            continue
        reduces = sums.is_reduced(unit, last=last)
        change = _count_change_by_w(rules, unit, first=first, last=last)
        # sums of experts are allocated with their first gradient; all are, if they are reduced every time
        allocated_sums = sums.allocated_sums(unit, first=first)
        allocated_sums = (
            allocated_sums if rules.makes_all and not sums.is_bucketed else allocated_sums._replace(dense=0)
        )
        allocated_sums = allocated_sums._replace(experts=0) if sums.count_bias_sum_bytes(unit) else allocated_sums
        allocates_table = (
            allocated_sums.tied and rules.makes_all and not sums.table.head_accumulates
        )  # else they are allocated from the first backward on
        allocated = allocated_sums.dense + allocated_sums.experts + (allocated_sums.table if allocates_table else 0)
        own_pending = sums.count_pending_sum_bytes(unit) if reduces else 0
        shard = (
            min(unit.parts[-1].new_shard, sums.count_new_shards(unit, first=first)) if unit.first_sums.experts else 0
        )
        # experts' gradients come first; the other sums are allocated while those are reduced
        experts_come_first = (
            profile.experts_peak_bytes > 0 and allocated_sums.dense > 0 and reduces and unit.parts[-1].new_shard > 0
        )
        early_peak = profile.experts_peak_bytes or profile.table_peak_bytes
        for done_units in _list_peak_candidates(unit, second=bool(own_pending)):
            pending_now = own_pending if done_units and reduces else pending
            unit_index = unit.group.times - done_units - 1
            kept_here = remaining - done_units * profile.deferred_bytes
            gradients = gradient_bytes + done_units * change.after_backward + pending_now
            if early_peak:
                yield _make_w_moment(
                    group_index,
                    unit_index,
                    gradients + allocated - allocated_sums.dense,
                    kept_here,
                    early_peak - profile.deferred_bytes,
                )
            if reduces and unit.first_sums.experts:
                gradients_midway = gradients + allocated_sums.experts + shard
                kept_by_others = kept_here - profile.deferred_bytes
                yield LiveBytes(
                    (group_index, unit_index, "reduce"),
                    gradients_midway,
                    kept_by_others,
                    0,
                    profile.last_expert_wgrad_bytes,
                )
            if experts_come_first:
                gradients -= pending_now + (0 if sums.release != "at_once" else allocated_sums.experts)
            other = profile.weights_peak_bytes - profile.deferred_bytes
            table = sums.table_shard_bytes(unit, first=first) if reduces else 0
            yield _make_w_moment(
                group_index, unit_index, gradients + allocated + shard * experts_come_first + table, kept_here, other
            )
            if reduces:
                reducing_bytes = gradients + change.during_reduction
                kept_by_others = kept_here - profile.deferred_bytes
                yield LiveBytes(
                    (group_index, unit_index, "reduce"), reducing_bytes, kept_by_others, 0, profile.last_wgrad_bytes
                )
        remaining -= unit.group.times * profile.deferred_bytes
        gradient_bytes += unit.group.times * change.after_backward
        pending = own_pending if reduces else pending


def _count_change_by_w(rules: PassRules, unit: UnitGroupMemory, *, first: bool, last: bool) -> GradientChange:
    """Return the change by W of gradients whose dense sums B has allocated, unless they are reduced every time."""
    sums = rules.reductions
    reduces = sums.is_reduced(unit, last=last)
    if rules.makes_all or sums.is_bucketed:
        change = sums.count_gradient_change(unit, first=first, reduces=reduces)
        bias_sums = first * sums.count_bias_sum_bytes(unit)
        return GradientChange(change.during_reduction - bias_sums, change.after_backward - bias_sums, change.tied_table)
    experts = first * sums.count_expert_sums_by_w(unit)
    made_by_w = _split_profile(rules, unit).wgrad_bytes if sums.destination == "late" else 0
    after_backward = unit.states.reduced - unit.states.sums if reduces else made_by_w
    return GradientChange(experts + sums.count_new_shards(unit, first=first), experts + after_backward, 0)


def _make_w_moment(group_index: int, unit_index: int, gradients: int, kept_bytes: int, other: int) -> LiveBytes:
    """Return a moment of W with ``kept_bytes`` bytes kept for it; a negative ``other`` is of freed operands."""
    return LiveBytes((group_index, unit_index, "weights"), gradients, kept_bytes + min(0, other), 0, max(0, other))


# Messages that join weights of several units (DeepSpeed)
#
#     ZeRO-1, -2   a bucket (two if reductions overlap) from a backward's first gradient to its end; this rank's
#                  gradients from the first reduction on; a copy of the bucket while it is all-reduced
#     ZeRO-3       gathered weights as ``planner/counts/parameter_prefetch.py`` simulates; a copy of the bucket
#                  while it is reduced
#
# Source: deepspeedai/DeepSpeed@0.19.8:deepspeed/runtime/zero/stage_1_and_2.py, setup_buckets, copy_grads_in_partition
# and allreduce_bucket; deepspeed/runtime/comm/coalesced_collectives.py, reduce_scatter_coalesced.


FP64_BYTES = 8
NORM_ELEMENTS = 250_000_000  # of a gradient whose norm ZeRO-3 computes at once
RECOMPUTATION = "recomputation"  # the cause of a peak in a backward while its unit is recomputed, with ZeRO-3's gathers


def _find_coalesced(counts: Counts, layout: Layout) -> CoalescedMessages:
    """Return the messages that the job's software joins under a layout."""
    stack, keeps = counts.job.stack, get_policy(layout, counts.job)
    has_buckets = layout.shards > 1 or keeps.runs_alone
    summed, width = counts.job.precision.summed_bytes, counts.job.count_reduce_bytes(counts.job.precision)
    bucket = stack.reduce_bucket * summed if has_buckets else 0
    flat = counts.job.bucket_bytes  # a flat copy, and another in the dtype of the message
    copy_width = flat + width * (width != flat), summed
    by_weights = stack.zero3_gather == "weights" and not keeps.weights_stay
    allocates_shards = bucket > 0 and keeps.weights_stay and not keeps.gradients_stay
    returned_bytes = _count_returned_bytes(counts, layout) if keeps.host_gradients else {}
    allocates_shards &= not keeps.host_gradients
    return CoalescedMessages(bucket, copy_width, by_weights, allocates_shards, {}, returned_bytes)


def _count_returned_bytes(counts: Counts, layout: Layout) -> dict[Name, int]:
    """Return for each unit the bytes on the device while the norm of its largest gradient's shard is computed.

    It is that of a copy in fp64, larger than the copy in fp32 that leaves then. ZeRO-3 has the shard once more, as it
    came back from host memory, and copies part after part (deepspeed/runtime/zero/stage3.py, partition_grads and
    _constant_buffered_norm2; stage_1_and_2.py, set_norm_for_param_grad_in_gpu).
    """
    returns = get_policy(layout, counts.job).host_gradients == "shards"
    width = count_reduced_width(layout, counts.job) if returns else 0
    most = NORM_ELEMENTS if returns else COUNTED_BYTES
    vocab = pad_vocab(counts.model, counts.job, tp=layout.tp)
    names = dict.fromkeys(run.name for stage in counts.list_stage_groups(layout) for run in stage)
    shard_numels = {
        name: [
            ceil_div(shard_weight(weight, model=counts.model, layout=layout, vocab=vocab).numel, layout.shards)
            for weight in counts.weights(layout, name)
            if is_trained(weight, counts.job)
        ]
        for name in names
    }
    return {
        name: max((width * numel + FP64_BYTES * min(numel, most) for numel in numels), default=0)
        for name, numels in shard_numels.items()
    }


def _with_coalesced(
    rules: PassRules, moments: Iterable[LiveBytes], units: Sequence[UnitGroupMemory], *, stage: int, backward: bool
) -> Iterator[LiveBytes]:
    """Yield the moments of a pass, with what joined messages hold."""
    coalesced = rules.coalesced
    first_units = [0, *accumulate(unit.group.times for unit in units)]
    gathers = _find_prefetched_gathers(rules, stage)
    job = rules.counts.job
    has_shards = get_policy(rules.layout, job).computes_with_shard
    element_bytes = 0 if has_shards else job.precision.high_precision_bytes
    for moment in moments:
        if len(moment.cause) > 2:
            group_index, unit_index, phase, *_ = moment.cause
            if gathers is not None:
                if phase == "gather":
                    continue
                gathered_elements = (gathers.backward if backward else gathers.forward)[
                    first_units[group_index] + unit_index
                ]
                if backward and phase == "backward" and units[group_index].later_profile.after_loss_bytes:
                    is_loss = moment.cause[-1] != "head.out"
                    gathered_elements = gathers.loss if is_loss else gathered_elements
                elif moment.cause[-1] == RECOMPUTATION:
                    gathered_elements = gathers.recomputed[first_units[group_index] + unit_index]
                moment = moment._replace(gathered=gathered_elements * element_bytes)
            if backward:
                moment = _with_bucket(coalesced, moment, units, group_index, unit_index, ends=phase == "reduce")
        yield moment


def _find_prefetched_gathers(rules: PassRules, stage: int) -> PrefetchedGathers | None:
    """Return the gathers of a stage's weights one by one; None if they are gathered by units, or stay gathered."""
    coalesced = rules.coalesced
    if not coalesced.gathers_by_weight:
        return None
    if stage not in coalesced.gathers_by_stage:
        coalesced.gathers_by_stage[stage] = simulate_prefetch(rules.counts, rules.layout, chunk=stage)
    return coalesced.gathers_by_stage[stage]


def _with_bucket(
    coalesced: CoalescedMessages,
    moment: LiveBytes,
    units: Sequence[UnitGroupMemory],
    group_index: int,
    unit_index: int,
    *,
    ends: bool,
) -> LiveBytes:
    """Add to a moment of a backward the bucket's flat copy of gradients, and the shards since the first reduction.

    ``ends``: the moment is the end of the unit, which may fill the bucket.
    """
    unit, last = units[group_index], group_index == 0
    earlier_bytes = sum(group.group.times * group.states.sums for group in units[group_index + 1 :])
    earlier_bytes += (unit.group.times - unit_index - 1) * unit.states.sums
    filled_bytes = earlier_bytes + unit.states.sums * ends
    is_reduced = filled_bytes > coalesced.bucket_bytes or (ends and last)
    shard_bytes = (
        sum(group.group.times * group.states.reduced for group in units)
        if coalesced.allocates_shards and is_reduced
        else 0
    )
    copy_bytes = min(coalesced.bucket_bytes, filled_bytes) if ends and is_reduced else 0
    copied, accumulated = coalesced.copy_width
    copy_bytes = copy_bytes * copied // accumulated
    if copy_bytes and coalesced.returned_bytes:
        in_bucket = units[group_index:] if earlier_bytes <= coalesced.bucket_bytes else [unit]
        copy_bytes += max(coalesced.returned_bytes[group.group.name] for group in in_bucket)
    return moment._replace(gradients=moment.gradients + shard_bytes + copy_bytes)

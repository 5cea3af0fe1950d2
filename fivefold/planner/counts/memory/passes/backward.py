"""Moments of a backward pass, with the gradients of weights or without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fivefold.planner.counts.memory.liveness import GradientSums, SplitUnitProfile, UnitProfile
from fivefold.planner.counts.memory.passes.forward import count_kept_so_far
from fivefold.planner.counts.memory.passes.gathered import (
    backward_prefetch_bytes,
    count_freed_gathers,
    count_gathered_before_backward,
    count_regathered,
    find_gather_peak,
)
from fivefold.planner.counts.memory.passes.moments import RECOMPUTATION, LiveBytes, list_peak_candidates
from fivefold.planner.counts.memory.passes.rules import PassRules, is_kept_unit, split_profile
from fivefold.planner.counts.memory.reductions import GradientChange
from fivefold.planner.counts.memory.stages import UnitGroupMemory


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
    deferred = split_profile(rules, unit).deferred_bytes if split else 0
    reduces = sums.is_reduced(unit, last=last) and not deferred
    allocated_sums = sums.allocated_sums(unit, first=first, deferred=deferred > 0 and rules.makes_all, reduces=reduces)
    table = sums.table_shard_bytes(unit, first=first) if reduces or sums.is_reduced_in_b(unit, last=last) else 0
    if table and rules.counts.job.stack.loss_facts.chunked:  # allocated after the last chunk, within the unit
        sums_with_table = allocated_sums._replace(shard_bytes=table)
        table = 0
    else:
        sums_with_table = allocated_sums if split else _split_table_sums(rules, unit, allocated_sums)
    stays_gathered = weights_gathered and rules.gathers_weights and is_kept_unit(rules, group)
    return _GroupBackward(
        deferred=deferred,
        reduces=reduces,
        sums=allocated_sums,
        change=_count_change(rules, unit, first=first, reduces=reduces, deferred=deferred),
        own_pending=sums.count_pending_sum_bytes(unit) if reduces else 0,
        table_shards=table,
        profile=(
            split_profile(rules, unit, sums_with_table)
            if split
            else rules.counts.profile(unit.degrees, group.name, sums_with_table)
        ),
        stays_gathered=stays_gathered,
        regathered=0 if weights_gathered else count_regathered(rules, unit),
        freed_weights=count_freed_gathers(rules, unit, is_regathered=stays_gathered),
    )


def list_backward_moments(
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
    gathered_bytes = count_gathered_before_backward(rules, units, weights_gathered=weights_gathered)
    gradient_bytes = kept_for_w = 0  # gradients; kept for W
    logits = rules.buffers.output_bytes(stage)  # and outputs, kept until the pass has ended
    for group_index, unit in reversed([*enumerate(units)]):
        times = unit.group.times
        if not rules.counts.has_backward(unit.group.name):
            continue
        plan = _plan_group_backward(rules, unit, first=first, last=last, split=split, weights_gathered=weights_gathered)
        gathers_ahead = rules.prefetches or rules.retains_gather_output
        for done_units in list_peak_candidates(
            unit,
            second=bool(plan.own_pending),
            # the last unit of a pass gathers nothing ahead, the one before it does
            second_last=gathers_ahead and rules.gathers_weights and group_index <= 1,
        ):
            later_units = times - done_units - 1
            kept_bytes = count_kept_so_far(
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
                    prefetched=0 if weights_gathered else backward_prefetch_bytes(rules, unit, next_unit),
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
        gather_peak = now.gathered + find_gather_peak(rules, unit)
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
    return unit.logits_bytes * rules.keeps_logits + (split_profile(rules, unit).released_bytes if split else 0)


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
    made_later = split_profile(rules, unit).wgrad_bytes if deferred and sums.destination == "late" else 0
    change = sums.count_gradient_change(unit, first=first, reduces=reduces, made_later=made_later)
    by_w = first * sums.count_expert_sums_by_w(unit) if deferred else 0
    return GradientChange(change.during_reduction - by_w, change.after_backward - by_w, change.tied_table)


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
        kept_size = count_kept_so_far(rules, unit.later_profile.kept_bytes, unit.group.times, kept_size)
    return kept_by_earlier

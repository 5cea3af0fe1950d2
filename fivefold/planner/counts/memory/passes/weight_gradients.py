"""Moments of a W: the gradients of weights, which a split backward left for later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fivefold.planner.counts.memory.liveness import GradientSums
from fivefold.planner.counts.memory.passes.moments import LiveBytes, list_peak_candidates, make_w_moment
from fivefold.planner.counts.memory.passes.rules import PassRules, split_profile
from fivefold.planner.counts.memory.reductions import GradientChange
from fivefold.planner.counts.memory.stages import UnitGroupMemory


def list_w_moments(
    rules: PassRules, units: Sequence[UnitGroupMemory], *, first: bool, last: bool, pending: int
) -> Iterator[LiveBytes]:
    """Yield the moments of W; ``pending``: bytes of sums that are reduced but not yet freed."""
    gradient_bytes, sums = 0, rules.reductions
    remaining = sum(unit.group.times * split_profile(rules, unit).deferred_bytes for unit in units)
    for group_index in reversed(range(len(units))):
        unit = units[group_index]
        profile = split_profile(rules, units[group_index], GradientSums(tied=units[group_index].first_sums.tied))
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
        for done_units in list_peak_candidates(unit, second=bool(own_pending)):
            pending_now = own_pending if done_units and reduces else pending
            unit_index = unit.group.times - done_units - 1
            kept_here = remaining - done_units * profile.deferred_bytes
            gradients = gradient_bytes + done_units * change.after_backward + pending_now
            if early_peak:
                yield make_w_moment(
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
            yield make_w_moment(
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
    made_by_w = split_profile(rules, unit).wgrad_bytes if sums.destination == "late" else 0
    after_backward = unit.states.reduced - unit.states.sums if reduces else made_by_w
    return GradientChange(experts + sums.count_new_shards(unit, first=first), experts + after_backward, 0)

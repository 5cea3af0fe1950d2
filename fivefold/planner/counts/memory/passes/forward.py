"""Moments of a forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fivefold.planner.counts.memory.passes.gathered import (
    count_gathered_table_bytes,
    count_prefetched_bytes,
    find_gather_peak,
    find_lasting_bytes,
    stays_gathered,
)
from fivefold.planner.counts.memory.passes.moments import LiveBytes, list_peak_candidates
from fivefold.planner.counts.memory.passes.rules import PassRules, is_kept_unit
from fivefold.planner.counts.memory.stages import UnitGroupMemory


def list_forward_moments(
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
    gathered_bytes = 0 if units[0].group.name == "embed" else count_gathered_table_bytes(rules, units)
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
        for unit_index in list_peak_candidates(unit):
            earlier = (
                count_kept_so_far(rules, profile.kept_bytes, unit_index, kept_size)
                + casts
                + unit_index * profile.cached_bytes
                + held * (group_index + unit_index > 0)
            )
            previous_unit = unit if unit_index else units[group_index - 1] if group_index else None
            if needs_gather and not (rules.prefetches and group_index + unit_index):
                gather_peak = gathered_bytes + find_gather_peak(rules, unit, previous_unit)
                yield LiveBytes((group_index, unit_index, "gather"), pending, earlier, gather_peak, input_bytes)
            ahead_bytes = 0
            if rules.prefetches and (first or rules.gathers_weights):
                following = group_index + (unit_index == group.times - 1)
                has_next = following < len(units) and not already_gathered[following]
                ahead_bytes = count_prefetched_bytes(rules, units[following]) if has_next else 0
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
        gathered_bytes += min(new_gather, find_lasting_bytes(rules, unit)) if stays_gathered(rules, group) else 0
        gathered_bytes += group.times * new_gather if rules.keeps_gathered and is_kept_unit(rules, group) else 0
        kept_size = count_kept_so_far(rules, profile.kept_bytes, group.times, kept_size)
        casts += group.times * profile.cached_bytes


def count_kept_so_far(rules: PassRules, unit_bytes: int, n_units: int, kept_before: int) -> int:
    """Return the activations on the device: ``n_units`` that keep ``unit_bytes`` each, and ``kept_before``.

    Offloaded: those of one unit.
    """
    if rules.offloads_activations and n_units:
        return unit_bytes
    return kept_before + n_units * unit_bytes

"""Bytes of weights that are gathered, and when they are freed."""

from __future__ import annotations

from collections.abc import Sequence

from fivefold.planner.counts.counts import UnitGroup
from fivefold.planner.counts.memory.passes.rules import PassRules, is_kept_unit, is_regathered
from fivefold.planner.counts.memory.stages import UnitGroupMemory


def count_prefetched_bytes(rules: PassRules, unit: UnitGroupMemory) -> int:
    """Return the bytes of weights that are being gathered ahead: of a block its dense and its expert weights."""
    parts = unit.parts[:1] if isinstance(unit.group.name, str) else unit.parts
    return sum(part.gather_buffers + (part.gathered if rules.gathers_weights else 0) for part in parts)


def find_gather_peak(rules: PassRules, unit: UnitGroupMemory, previous: UnitGroupMemory | None = None) -> int:
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


def count_gathered_table_bytes(rules: PassRules, units: Sequence[UnitGroupMemory]) -> int:
    """Return the bytes of a gathered tied table kept from the embedding's forward for the head on the same rank."""
    shared = rules.gathers_weights and units[-1].group.name == "head"
    return (units[0].states if rules.joins_ends else rules.reductions.table.states).gathered if shared else 0


def stays_gathered(rules: PassRules, group: UnitGroup) -> bool:
    """Return True if gathered weights stay until the backward: the head's, which follows at once, or its tied table."""
    return group.name == "head" or (group.name == "embed" and (rules.joins_ends or rules.reductions.table.is_local))


def find_lasting_bytes(rules: PassRules, unit: UnitGroupMemory) -> int:
    """Return the bytes of a unit's gathered weights that may stay until the backward: of the embedding, its tables."""
    only_table = unit.group.name == "embed" and not rules.joins_ends
    return unit.parts[-1].gathered if only_table else unit.states.gathered


def count_regathered(rules: PassRules, unit: UnitGroupMemory) -> int:
    """Return the bytes of weights that are gathered for a unit's backward; of the embedding, perhaps the tower's."""
    if is_regathered(rules, unit.group):
        return unit.states.gathered
    regathers_tower = unit.group.name == "embed" and rules.regathers_vision
    return sum(part.gathered for part in unit.parts[:-1]) if regathers_tower else 0


def count_gathered_before_backward(
    rules: PassRules, units: Sequence[UnitGroupMemory], *, weights_gathered: bool
) -> int:
    """Return the bytes of gathered weights when a backward begins: of the table, the head, and with all the blocks."""
    gathered_bytes = count_gathered_table_bytes(rules, units)
    if rules.gathers_weights and units[-1].group.name == "head":
        gathered_bytes += units[-1].states.gathered
    if weights_gathered:
        gathered_bytes += sum(
            unit.group.times * unit.states.gathered for unit in units if is_kept_unit(rules, unit.group)
        )
    return gathered_bytes


def count_freed_gathers(rules: PassRules, unit: UnitGroupMemory, *, is_regathered: bool) -> int:
    """Return the bytes of gathered weights that a backward frees.

    ``is_regathered``: the weights of a block are gathered again for the backward. Where the head shares the embedding
    table, its backward frees the table too.
    """
    own_bytes = unit.states.gathered if rules.gathers_weights and is_regathered else 0
    if rules.gathers_weights and not is_regathered and stays_gathered(rules, unit.group):
        own_bytes = find_lasting_bytes(rules, unit)
    table = rules.reductions.table
    if not table.head_accumulates or not rules.gathers_weights:
        return own_bytes
    own_bytes_by_end = {"head": own_bytes + table.states.gathered, "embed": max(0, own_bytes - table.states.gathered)}
    return own_bytes_by_end.get(str(unit.group.name), own_bytes)


def backward_prefetch_bytes(rules: PassRules, unit: UnitGroupMemory, next_unit: UnitGroupMemory | None) -> int:
    """Return the bytes of weights of the unit ``next_unit`` that are gathered ahead in the backward of ``unit``."""
    if rules.retains_gather_output:
        return next_unit.states.gathered if next_unit and is_regathered(rules, next_unit.group) else 0
    ahead = rules.prefetches and rules.gathers_weights and unit.group.name != "embed"
    has_next = next_unit is not None and next_unit.group.name != "embed"
    if not ahead or next_unit is None or not has_next or not rules.counts.has_backward(next_unit.group.name):
        return 0
    return count_prefetched_bytes(rules, next_unit)

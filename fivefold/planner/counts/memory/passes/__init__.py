"""Live bytes at the moments of one pass that could be its peak, without what other micro-batches hold.

    F   gather? forward …        BW   gather? backward reduce? …        B   backward …        W   weights reduce? …

moments    what is live at a moment, by part      backward           moments of a B or BW
rules      what decides them, of a layout and job weight_gradients   moments of a W
forward    moments of an F                        gathered           weights that are gathered, and for how long
coalesced  messages that join weights of several units

The order of events is that of ``trainer/parallel/zero.py``: with overlap the next unit's weights are gathered ahead; or
that of FSDP2. ``reductions.py`` says what happens to gradients. In a group of equal units live bytes grow or shrink
evenly, so only its first and last unit can be the peak.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter

from fivefold.planner.counts.memory.in_flight import PassKind
from fivefold.planner.counts.memory.passes.backward import list_backward_moments
from fivefold.planner.counts.memory.passes.coalesced import with_coalesced
from fivefold.planner.counts.memory.passes.forward import list_forward_moments
from fivefold.planner.counts.memory.passes.moments import LiveBytes
from fivefold.planner.counts.memory.passes.rules import PassRules, split_profile
from fivefold.planner.counts.memory.passes.weight_gradients import list_w_moments
from fivefold.planner.counts.memory.stages import Cause, PassKey, UnitGroupMemory, count_gathered_stage_bytes


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
    if kind == "W" and not w_computes_all and not any(split_profile(rules, unit).deferred_bytes for unit in units):
        return iter([LiveBytes((len(units) - 1, 0, "weights"), pending, 0, 0, 0)])  # of an end alone: nothing to do
    if kind == "BW" and stage < rules.first_backward:
        return iter([LiveBytes((0, 0, "backward"), pending, 0, 0, 0)])
    if kind == "W" and not w_computes_all:
        moments = list_w_moments(rules, units, first=first, last=last, pending=pending)
        return _subtract_activations(moments, rules.buffers.graph_bytes(stage)) if rules.retains_graph else moments
    if kind == "F":
        moments = list_forward_moments(
            rules,
            units,
            first=first,
            weights_gathered=pass_kind.is_gathered,
            pending=pending,
            held=rules.stages.chunks[stage].held_input_bytes,
        )
    else:
        moments = list_backward_moments(
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
    return with_coalesced(rules, moments, units, stage=stage, backward=kind != "F")


def _subtract_activations(moments: Iterator[LiveBytes], size: int) -> Iterator[LiveBytes]:
    """Yield the moments less ``size`` bytes of activations, which are counted elsewhere."""
    return (moment._replace(activations=max(0, moment.activations - size)) for moment in moments)


def count_deferred_bytes(rules: PassRules, stage: int) -> int:
    """Return the bytes that one micro-batch keeps between B and W of a stage."""
    chunk, cache = rules.stages.chunks[stage], rules.stages.deferred_bytes
    key = chunk.first_equal_stage, rules.reductions.every_micro_batch
    if key not in cache:
        deferred = sum(group.group.times * split_profile(rules, group).deferred_bytes for group in chunk.groups)
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
    deferred = [split_profile(rules, unit).deferred_bytes if previous.kind != "BW" else 0 for unit in units]
    experts_first = any(split_profile(rules, unit).experts_peak_bytes for unit in units)
    return rules.reductions.in_flight_bytes(
        units, previous, deferred, next_pass=(pass_kind.kind, pass_kind.stage), experts_first=experts_first
    )


def count_w_reduced_bytes(rules: PassRules, stage: int) -> int:
    """Return the bytes of this rank's reduced gradients that W of a stage makes, not its B."""
    deferred_units = [unit for unit in rules.stages.chunks[stage].groups if split_profile(rules, unit).deferred_bytes]
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
        unit for unit in rules.stages.chunks[stage].groups if not split_profile(rules, unit).deferred_bytes
    ]
    return sum(unit.group.times * (unit.states.sums - unit.states.reduced) for unit in reduced_units)

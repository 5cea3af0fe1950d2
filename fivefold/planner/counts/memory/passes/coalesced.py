"""Messages that join weights of several units: buckets of gradients, and gathers ahead of their use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from fivefold.layout.sharding import get_policy
from fivefold.planner.counts.memory.passes.moments import RECOMPUTATION, LiveBytes
from fivefold.planner.counts.memory.passes.rules import CoalescedMessages, PassRules
from fivefold.planner.counts.memory.stages import UnitGroupMemory
from fivefold.planner.counts.parameter_prefetch import PrefetchedGathers, simulate_prefetch


def with_coalesced(
    rules: PassRules, moments: Iterable[LiveBytes], units: Sequence[UnitGroupMemory], *, stage: int, backward: bool
) -> Iterator[LiveBytes]:
    """Yield the moments of a pass, with what joined messages hold."""
    coalesced = rules.coalesced
    first_units = [0, *accumulate(unit.group.times for unit in units)]
    gathers = find_prefetched_gathers(rules, stage)
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


def find_prefetched_gathers(rules: PassRules, stage: int) -> PrefetchedGathers | None:
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

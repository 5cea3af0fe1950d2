"""Bytes of gradients that a unit's backward allocates, reduces and frees, as ``trainer/parallel/gradients.py`` does.

    once a step   sums live from the first backward of a stage to its last, in which they become this rank's shard
    each          sums live within a unit's backward (its W), and are added to the shard that the first one allocates

Where reductions overlap compute, a unit's sums live until the next one's reduction has begun, or the next pass ended.
FSDP2 copies a unit's gradients when all are made, and its copy lives until the next one's is made.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from fivefold.layout.sharding import policy
from fivefold.layout.spec import Layout
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.memory.in_flight import Before, Kind, Reduced
from fivefold.planner.counts.memory.liveness import NO_SUMS, Sums, Waits
from fivefold.planner.counts.memory.stages import RunMemory
from fivefold.planner.counts.memory.states import UnitStates

# Where the gradients of a unit go:
#     allocated      to sums that the first backward allocates
#     first          to the first gradients, which become the sums (PyTorch's AccumulateGrad)
#     lasting        to sums that live throughout the step
#     late           to those too, when the backward has ended: all its gradients live until then
#     bucket         to a bucket at once, which ZeRO-2 allocates with the first gradient of a backward, ZeRO-1 of a step
#     lasting_bucket to ZeRO-3's bucket, whose shards live throughout the step
Destination = Literal["allocated", "first", "lasting", "late", "bucket", "lasting_bucket"]
# When sums are freed that were reduced: at once, when the next unit's reduction has begun, or as its copy is made.
Release = Literal["at_once", "next_reduction", "next_copy"]


class Change(NamedTuple):
    """Bytes by which a unit's backward changes those of gradients."""

    reducing: int  # while its reduction begins
    lasting: int  # when it has ended
    waits: int  # of a tied table: allocated by the head, freed by the embedding


class SharedTable(NamedTuple):
    """The embedding's table where the head on the same rank uses it too. The head's gradient is added to the sums at
    once and the head frees the table (``adds``), or it waits for the embedding's gradient (``waiting_bytes``).
    """

    here: bool
    adds: bool
    is_output: bool  # the head multiplies by it
    states: UnitStates  # zero if it is not ``here``
    waits: bool  # in the sums, until the last pass
    waiting_bytes: int


class Reductions(NamedTuple):
    """When the gradients of one layout's units are reduced, and what lives until then."""

    stays: bool  # whole gradients stay until the update
    each: bool  # reduced with every micro-batch
    destination: Destination
    release: Release
    bucket: int  # bytes that a backward or a step allocates at its start
    midway: bool  # experts are reduced within their block's backward
    biased: bool  # an operation of its own adds experts' biases, and its backward makes their gradients
    table: SharedTable
    widths: tuple[int, int]  # bytes per element of a gradient, of its sum

    @property
    def bucketed(self) -> bool:
        """Whether each gradient is copied at once into a bucket that is reduced when it is full."""
        return self.destination in ("bucket", "lasting_bucket")

    @property
    def lasting(self) -> bool:
        """Whether what the optimizer reads lives throughout the step."""
        return self.destination in ("lasting", "late", "lasting_bucket")

    @property
    def when(self) -> Reduced:
        """After which passes a reduction may be under way."""
        return "never" if self.release != "next_reduction" else "each" if self.each else "last"

    def reduces_each(self, unit: RunMemory) -> bool:
        """Whether the gradients of ``unit`` are reduced with every micro-batch."""
        return self.each and not (self.table.waits and unit.run.name == "embed")

    def reduces(self, unit: RunMemory, *, last: bool) -> bool:
        """Whether the gradients of ``unit`` are reduced in a pass in which all of them have come."""
        return not self.stays and (last or self.bucketed or self.reduces_each(unit))

    def copies(self, *, first: bool) -> bool:
        """Whether gradients that are reduced are copied from where they were made, as no sums live yet."""
        return self.release == "next_copy" and (first or self.each)

    def born(self, unit: RunMemory, *, first: bool, deferred: bool = False, reduces: bool = False) -> Sums:
        """Sums that a backward of ``unit`` allocates; ``deferred``: its B, whose W makes all that it puts off, so that
        B allocates only those of a table that it looks up, and ``by_biases``; ``reduces``: gradients are reduced then.
        """
        if (reduces and self.copies(first=first)) or (first and self.destination == "first" and not deferred):
            return NO_SUMS._replace(held=True)
        if deferred:
            born = self.born(unit, first=first)
            return Sums(experts=first * self.by_biases(unit), table=born.table, tied=born.tied)
        bucket = self.bucket if unit.run.name == "head" and (first or not self.stays) else 0
        if self.bucketed:
            return NO_SUMS._replace(dense=bucket)
        if first or not self.each:
            return unit.born._replace(dense=unit.born.dense + bucket) if first else NO_SUMS._replace(dense=bucket)
        table = self.table
        kept = table.states.sums if table.waits and table.is_output and unit.run.name == "head" else 0
        kept -= unit.born.table if kept else 0
        dense = unit.born.dense - kept if self.reduces_each(unit) else 0
        looked_up = 0 if table.waits else unit.born.table
        experts = unit.born.experts if cut(unit.parts[-1]) else 0
        return Sums(dense, experts, table=looked_up, tied=unit.born.tied)

    def waits(self, unit: RunMemory) -> Waits:
        """Which gradients that B of a unit makes wait for W: those of experts only where experts are sharded."""
        return Waits(self.each, self.each and unit.born.experts > 0 and cut(unit.parts[-1]) > 0)

    def by_biases(self, unit: RunMemory) -> int:
        """Bytes of sums of a unit's experts that B allocates, not W, as gradients of biases do not wait there."""
        return unit.born.experts if self.biased and not self.waits(unit).biases else 0

    def experts_by_w(self, units: Iterable[RunMemory]) -> int:
        """Bytes of sums of experts that W of a stage allocates."""
        return sum(unit.run.times * (unit.born.experts - self.by_biases(unit)) for unit in units)

    def ends_in_b(self, unit: RunMemory, *, last: bool) -> bool:
        """Whether a table of ``unit`` is reduced before W: it looks up in it and does not multiply by it."""
        return unit.born.table > 0 and not unit.born.tied and not self.table.adds and self.reduces(unit, last=last)

    def shards(self, unit: RunMemory, *, first: bool) -> int:
        """Bytes of this rank's reduced gradients that a reduction of ``unit`` allocates."""
        return 0 if self.bucketed or (self.reduces_each(unit) and not first) else sum(map(cut, unit.parts))

    def of_table(self, unit: RunMemory, *, first: bool) -> int:
        """Of ``shards``, bytes of a table of the head's own, which is reduced as soon as its gradient is made."""
        if unit.run.name != "head":
            return 0
        copies = unit.parts[1:-1] if unit.born.experts else unit.parts[1:]  # the table lies before the experts
        return min(sum(map(cut, copies)), self.shards(unit, first=first))

    def change(self, unit: RunMemory, *, first: bool, reduces: bool, made_later: int = 0) -> Change:
        """The change by a backward; ``made_later``: bytes of weight gradients that W makes."""
        state, table, late = unit.state, self.table, self.destination == "late"
        made_bytes, sum_bytes = self.widths
        bucket = self.bucket if unit.run.name == "head" and (first or not self.stays) else 0
        if self.bucketed:
            waits = {"head": table.waiting_bytes, "embed": -table.waiting_bytes}.get(str(unit.run.name), 0)
            return Change(bucket + waits, bucket, waits)
        if late:  # separate gradients, not their sums
            born = max(0, state.sums * made_bytes // sum_bytes - made_later)
        elif first or not self.reduces_each(unit):
            born = state.sums if first else 0
        else:
            born = sum(part.sums for part in unit.parts if cut(part))
        fresh = first or (self.each and not table.waits)
        waiting = table.states.sums if table.adds and fresh and not late else table.waiting_bytes
        waits = {"head": waiting, "embed": -waiting}.get(str(unit.run.name), 0)
        shards = self.shards(unit, first=first)
        gone = sum(part.sums for part in unit.parts if cut(part)) if reduces else 0
        if reduces and self.release == "next_copy":  # the copy is made, gradients are let go, the shard is made
            copied = self.copies(first=first)
            made, whole = (gone * made_bytes // sum_bytes, born - gone) if copied else (0, born)
            lasting = shards if copied else shards - gone
            return Change(whole + waits + gone + max(made, lasting), whole + lasting, waits)
        born += bucket
        return Change(born + waits + shards, born + (shards - gone if reduces else 0), waits)

    def lag_bytes(self, unit: RunMemory) -> int:
        """Bytes of a unit's sums that live until the next reduction has begun: not experts', which come first."""
        return 0 if self.release == "at_once" else unit.parts[0].sums

    def under_way(
        self,
        units: tuple[RunMemory, ...],
        before: Before,
        late: list[int],
        *,
        then: tuple[Kind, int],
        experts_first: bool,
    ) -> int:
        """Bytes of sums under way after a backward pass: of the unit of its stage that was reduced last. ``late``:
        bytes that each unit of the stage puts off from B to W; ``then``: the next pass. Of two alike in a row that make
        the gradients of one unit alone, the second ends the reduction before it allocates the unit's sums anew; not if
        those of experts come first (``experts_first``: in W).
        """
        if self.each and then == (before.kind, before.stage) and before.kind != "B":
            made = [unit for unit, put_off in zip(units, late, strict=True) if put_off or before.kind == "BW"]
            experts_first = experts_first if before.kind == "W" else made[0].born.experts > 0
            if [unit.run.times for unit in made] == [1] and not experts_first:
                return 0
        found = (
            unit
            for unit, put_off in zip(units, late, strict=True)
            if {"B": not put_off, "W": bool(put_off)}.get(before.kind, True) and self.reduces(unit, last=before.last)
        )
        unit = next(found, None)
        return self.lag_bytes(unit) if unit is not None else 0


def reductions_of(counts: Counts, layout: Layout) -> Reductions:
    """Return how the gradients of a layout are reduced by the job's software."""
    job, stack, keeps = counts.job, counts.job.stack, policy(layout, counts.job)
    stays, each, facts = keeps.gradients_stay, counts.reduces_each(layout), stack.kernel_facts
    destination = _destination(counts, stays=stays, weights_stay=keeps.weights_stay)
    bucketed = destination in ("bucket", "lasting_bucket")
    release: Release = "at_once"
    if not stays and not bucketed:
        if stack.unit_buffers == "held":
            release = "next_copy"
        elif "dp" in stack.overlap and (facts.overlaps_each_reduction or not each):
            release = "next_reduction"
    buckets = (2 if "dp" in stack.overlap else 1) if layout.shards > 1 and keeps.weights_stay else 0
    return Reductions(
        stays=stays,
        each=each,
        destination=destination,
        release=release,
        bucket=buckets * stack.reduce_bucket * job.precision.summed_bytes,
        midway=facts.reduces_experts_midway and not bucketed,
        biased=facts.separate_biases and counts.model.moe is not None and counts.model.moe.expert_bias,
        table=_shared_table(counts, layout),
        widths=(job.precision.table_gradients_bytes, job.precision.summed_bytes),
    )


def _destination(counts: Counts, *, stays: bool, weights_stay: bool) -> Destination:
    recipe, stack = counts.job.precision, counts.job.stack
    if stack.reduce_bucket > 0 and not stays:
        return "bucket" if weights_stay else "lasting_bucket"
    if stack.weight_gradients not in ("apart", "bucketed"):
        late = stack.weight_gradients in ("late", "buckets")
        return ("late" if late else "lasting") if stays else "allocated"
    return (
        "first"
        if recipe.gradients_bytes == recipe.summed_bytes and not stack.kernel_facts.allocates_sums
        else "allocated"
    )


def _shared_table(counts: Counts, layout: Layout) -> SharedTable:
    model, adds = counts.model, counts.adds(layout)
    here = adds or (model.shares_table and layout.pp == 1)
    waiting = model.vocab * model.width * counts.job.precision.table_gradients_bytes // layout.tp
    return SharedTable(
        here=here,
        adds=adds,
        is_output=model.tied_embeddings,
        states=counts.states(layout, "embed") if here else UnitStates(),
        waits=adds and not counts.reduces_each(layout, "embed"),
        waiting_bytes=waiting if here and not adds else 0,
    )


def cut(part: UnitStates) -> int:
    """Bytes of a rank's shard of reduced gradients; 0 if there is one shard, which is the buffer of the sums."""
    return part.reduced if part.reduced < part.sums else 0

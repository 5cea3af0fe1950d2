"""Bytes of gradients that a unit's backward allocates, reduces and frees, as ``trainer/parallel/gradients.py`` does.

    once a step   sums live from the first backward of a stage to its last, in which they become this rank's shard
    each          sums live within a unit's backward (its W), and are added to the shard that the first one allocates

Where reductions overlap compute, a unit's sums live until the next one's reduction has begun, or the next pass ended.
FSDP2 copies a unit's gradients when all are made, and its copy lives until the next one's is made (``held``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from fivefold.layout.sharding import policy
from fivefold.layout.spec import Layout
from fivefold.planner.counts.counts import NO_SUMS, Counts
from fivefold.planner.counts.memory.backward import Sums, Waits
from fivefold.planner.counts.memory.in_flight import Before, Kind, Reduced
from fivefold.planner.counts.memory.stage import RunMemory
from fivefold.planner.counts.memory.states import UnitStates


class Change(NamedTuple):
    """Bytes by which a unit's backward changes those of gradients."""

    reducing: int  # while its reduction begins
    lasting: int  # when it has ended
    waits: int  # of a tied table: allocated by the head, freed by the embedding


class Reductions:
    """When the gradients of one layout's units are reduced, and what lives until then."""

    def __init__(self, counts: Counts, layout: Layout) -> None:
        job, model, ours = counts.job, counts.model, counts.job.stack.linears == "fanned"
        keeps = policy(layout, job)
        self.stays = keeps.gradients_stay
        self.each = counts.reduces_each(layout)
        # Each gradient is copied at once into a bucket, which ZeRO-2 allocates with the first of a backward and ZeRO-1
        # with the first of a step.
        self.bucketed = job.stack.reduce_bucket > 0 and not self.stays
        self.midway = ours and not self.bucketed  # experts are reduced within their block's backward
        buckets = (2 if "dp" in job.stack.overlap else 1) if layout.shards > 1 and keeps.weights_stay else 0
        self.bucket = buckets * job.stack.reduce_bucket * job.precision.summed_bytes
        # A unit's sums, or the copy of its gradients, live until the next unit's are reduced.
        self.holds = job.stack.unit_buffers == "held" and not self.stays and not self.bucketed
        overlaps = "dp" in job.stack.overlap and not self.stays and (ours or not self.each) and not self.bucketed
        self.lags = self.holds or overlaps
        # Gradients that matmuls accumulate are one buffer, allocated from the start; and shards of ZeRO-3's buckets.
        summed = job.stack.weight_gradients not in ("apart", "bucketed") and self.stays
        self.lasting = summed or (self.bucketed and not keeps.weights_stay)
        # All weight gradients of a backward live until its end, and only then are added to the sums.
        self.late = job.stack.weight_gradients in ("late", "buckets") and self.stays
        # Biases of experts are added by an operation of their own, whose backward makes their gradients.
        self.biased = ours and model.moe is not None and model.moe.expert_bias
        # If embedding and head of a tied table are on one rank, the head's gradient is added to the sums at once and
        # the head frees the table (``adds``), or it waits for the embedding's gradient (``waiting`` bytes).
        self.adds = counts.adds(layout)
        self.tied = self.adds or (model.shares_table and layout.pp == 1)
        self.is_tied = model.tied_embeddings
        self.table = counts.states(layout, "embed") if self.tied else UnitStates()
        self.table_waits = self.adds and not counts.reduces_each(layout, "embed")  # in the sums, until the last pass
        recipe = job.precision
        self.of_sums = recipe.table_gradients_bytes, recipe.summed_bytes  # per element of a gradient, of its sum
        # The first gradients become the sums (PyTorch's AccumulateGrad), where they have their format.
        alike = recipe.gradients_bytes == recipe.summed_bytes and job.stack.weight_gradients in ("apart", "bucketed")
        self.become = alike and not ours and not self.bucketed
        waiting = model.vocab * model.width * recipe.table_gradients_bytes // layout.tp
        self.waiting = waiting if self.tied and not self.adds else 0

    @property
    def when(self) -> Reduced:
        """After which passes a reduction may be under way."""
        return "never" if not self.lags or self.holds else "each" if self.each else "last"

    def reduces(self, unit: RunMemory, *, last: bool) -> bool:
        """Whether the gradients of ``unit`` are reduced in a pass in which all of them have come."""
        return not self.stays and (last or self.bucketed or self._each(unit))

    def born(self, unit: RunMemory, *, first: bool, deferred: bool = False, reduces: bool = False) -> Sums:
        """Sums that a backward of ``unit`` allocates; ``deferred``: its B, whose W makes all that it puts off, so that
        B allocates only those of a table that it looks up, and ``by_biases``; ``reduces``: gradients are reduced then.
        """
        if (reduces and self._copied(first=first)) or (first and self.become and not deferred):
            return NO_SUMS._replace(held=True)
        if deferred:
            born = self.born(unit, first=first)
            return Sums(experts=first * self.by_biases(unit), table=born.table, tied=born.tied)
        bucket = self.bucket if unit.run.name == "head" and (first or not self.stays) else 0
        if self.bucketed:
            return NO_SUMS._replace(dense=bucket)
        if first or not self.each:
            return unit.born._replace(dense=unit.born.dense + bucket) if first else NO_SUMS._replace(dense=bucket)
        kept = self.table.sums if self.table_waits and self.is_tied and unit.run.name == "head" else 0
        kept -= unit.born.table if kept else 0
        dense = unit.born.dense - kept if self._each(unit) else 0
        table = 0 if self.table_waits else unit.born.table
        experts = unit.born.experts if cut(unit.parts[-1]) else 0
        return Sums(dense, experts, table=table, tied=unit.born.tied)

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
        return unit.born.table > 0 and not unit.born.tied and not self.adds and self.reduces(unit, last=last)

    def shards(self, unit: RunMemory, *, first: bool) -> int:
        """Bytes of this rank's reduced gradients that a reduction of ``unit`` allocates."""
        return 0 if self.bucketed or (self._each(unit) and not first) else sum(map(cut, unit.parts))

    def of_table(self, unit: RunMemory, *, first: bool) -> int:
        """Of ``shards``, bytes of a table of the head's own, which is reduced as soon as its gradient is made."""
        if unit.run.name != "head":
            return 0
        copies = unit.parts[1:-1] if unit.born.experts else unit.parts[1:]  # the table lies before the experts
        return min(sum(map(cut, copies)), self.shards(unit, first=first))

    def change(self, unit: RunMemory, *, first: bool, reduces: bool, made_later: int = 0) -> Change:
        """The change by a backward; ``made_later``: bytes of weight gradients that W makes."""
        state = unit.state
        bucket = self.bucket if unit.run.name == "head" and (first or not self.stays) else 0
        if self.bucketed:
            waits = {"head": self.waiting, "embed": -self.waiting}.get(str(unit.run.name), 0)
            return Change(bucket + waits, bucket, waits)
        if self.late:  # separate gradients, not their sums
            born = max(0, state.sums * self.of_sums[0] // self.of_sums[1] - made_later)
        elif first or not self._each(unit):
            born = state.sums if first else 0
        else:
            born = sum(part.sums for part in unit.parts if cut(part))
        fresh = first or (self.each and not self.table_waits)
        waiting = self.table.sums if self.adds and fresh and not self.late else self.waiting
        waits = {"head": waiting, "embed": -waiting}.get(str(unit.run.name), 0)
        shards = self.shards(unit, first=first)
        gone = sum(part.sums for part in unit.parts if cut(part)) if reduces else 0
        if reduces and self.holds:  # the copy is made, then the gradients are let go, then the shard is made
            copied = self._copied(first=first)
            made, whole = (gone * self.of_sums[0] // self.of_sums[1], born - gone) if copied else (0, born)
            lasting = shards if copied else shards - gone
            return Change(whole + waits + gone + max(made, lasting), whole + lasting, waits)
        born += bucket
        return Change(born + waits + shards, born + (shards - gone if reduces else 0), waits)

    def lag_bytes(self, unit: RunMemory) -> int:
        """Bytes of a unit's sums that live until the next reduction has begun: not experts', which come first."""
        return unit.parts[0].sums if self.lags else 0

    def under_way(
        self, units: tuple[RunMemory, ...], before: Before, late: list[int], *, then: tuple[Kind, int],
        experts_first: bool,
    ) -> int:  # fmt: skip
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

    def _copied(self, *, first: bool) -> bool:
        """Whether gradients that are reduced are copied from where they were made, as no sums live yet."""
        return self.holds and (first or self.each)

    def _each(self, unit: RunMemory) -> bool:
        return self.each and not (self.table_waits and unit.run.name == "embed")


def cut(part: UnitStates) -> int:
    """Bytes of a rank's shard of reduced gradients; 0 if there is one shard, which is the buffer of the sums."""
    return part.reduced if part.reduced < part.sums else 0

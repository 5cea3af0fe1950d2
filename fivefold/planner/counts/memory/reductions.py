"""Bytes of gradients that a unit's backward allocates, reduces and frees, as ``trainer/parallel/gradients.py`` does.

    once a step   sums are kept from a stage's first backward to its last, in which they become this rank's shard
    each          sums are kept within a unit's backward (its W), and added to the shard that the first one allocates

If reductions overlap compute, a unit's sums are freed when the next unit's reduction has begun, or the next pass ended.
FSDP2 copies a unit's gradients when all are made, and frees the copy when the next unit's is made.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from fivefold.layout.sharding import get_policy
from fivefold.layout.spec import Layout
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.memory.in_flight import Kind, PendingReductions, PreviousPass
from fivefold.planner.counts.memory.liveness import NO_SUMS, GradientSums, WaitingGradients
from fivefold.planner.counts.memory.stages import UnitGroupMemory
from fivefold.planner.counts.memory.states import UnitStates, count_reduced_width

# Destination of a unit's gradients:
#     allocated      to sums that the first backward allocates
#     first          to the first gradients, which become the sums (PyTorch's AccumulateGrad)
#     lasting        to sums that are allocated throughout the step
#     late           to those too, when the backward has ended: all its gradients are kept until then
#     bucket         to a bucket at once, which ZeRO-2 allocates with the first gradient of a backward, ZeRO-1 of a step
#     lasting_bucket to ZeRO-3's bucket, whose shards are allocated throughout the step
Destination = Literal["allocated", "first", "lasting", "late", "bucket", "lasting_bucket"]
# When reduced sums are freed: at once, when the next unit's reduction has begun, or as its copy is made.
Release = Literal["at_once", "next_reduction", "next_copy"]


class GradientChange(NamedTuple):
    """The change of gradient bytes by a unit's backward."""

    during_reduction: int  # while its reduction begins
    after_backward: int  # when it has ended
    tied_table: int  # gradient of a tied table: allocated by the head, freed by the embedding


class SharedTable(NamedTuple):
    """The embedding's table, if the head on the same rank uses it too.

    The head's gradient is added to the sums at once and the head frees the table (``head_accumulates``), or it waits
    for the embedding's gradient (``head_gradient_bytes``).
    """

    is_local: bool
    head_accumulates: bool
    is_output: bool  # the head multiplies by it
    states: UnitStates  # zero if it is not ``is_local``
    waits_for_last_pass: bool  # the gradient waits in the sums until the last pass
    head_gradient_bytes: int


class Reductions(NamedTuple):
    """The time at which the gradients of one layout's units are reduced, and the bytes allocated until then."""

    keeps_unsharded: bool  # unsharded gradients are kept until the update
    every_micro_batch: bool  # reduced with every micro-batch
    destination: Destination
    release: Release
    bucket_bytes: int  # bytes that a backward or a step allocates at its start
    reduces_experts_midway: bool  # experts are reduced within their block's backward
    has_separate_biases: bool  # a separate operation adds the experts' biases, and its backward makes their gradients
    table: SharedTable
    element_bytes: tuple[int, int]  # bytes per element of a gradient, of its sum
    result_bytes: int  # bytes per element of a reduction's result, with what it is cast from

    @property
    def is_bucketed(self) -> bool:
        """Return True if each gradient is copied at once into a bucket that is reduced when it is full."""
        return self.destination in ("bucket", "lasting_bucket")

    @property
    def is_persistent(self) -> bool:
        """Return True if the gradients that the optimizer reads are allocated throughout the step."""
        return self.destination in ("lasting", "late", "lasting_bucket")

    @property
    def pending_after(self) -> PendingReductions:
        """Return the passes after which a reduction may be in flight."""
        return "never" if self.release != "next_reduction" else "each" if self.every_micro_batch else "last"

    def reduces_every_micro_batch(self, unit: UnitGroupMemory) -> bool:
        """Return True if the gradients of ``unit`` are reduced with every micro-batch."""
        return self.every_micro_batch and not (self.table.waits_for_last_pass and unit.group.name == "embed")

    def is_reduced(self, unit: UnitGroupMemory, *, last: bool) -> bool:
        """Return True if the gradients of ``unit`` are reduced in a pass that completes them."""
        return not self.keeps_unsharded and (last or self.is_bucketed or self.reduces_every_micro_batch(unit))

    def copies_gradients(self, *, first: bool) -> bool:
        """Return True if reduced gradients are copied from where they were made, because no sums are allocated yet."""
        return self.release == "next_copy" and (first or self.every_micro_batch)

    def allocated_sums(
        self, unit: UnitGroupMemory, *, first: bool, deferred: bool = False, reduces: bool = False
    ) -> GradientSums:
        """Return the sums that a backward of ``unit`` allocates.

        ``deferred``: it is a B, whose W makes all deferred gradients, so B allocates only those of a lookup table and
        ``count_bias_sum_bytes``. ``reduces``: gradients are reduced in this pass.
        """
        if (reduces and self.copies_gradients(first=first)) or (first and self.destination == "first" and not deferred):
            return NO_SUMS._replace(keeps_gradients=True, tied=unit.first_sums.tied)
        if deferred:
            unit_sums = self.allocated_sums(unit, first=first)
            return GradientSums(
                experts=first * self.count_bias_sum_bytes(unit), table=unit_sums.table, tied=unit_sums.tied
            )
        bucket_bytes = self.bucket_bytes if unit.group.name == "head" and (first or not self.keeps_unsharded) else 0
        if self.is_bucketed:
            return NO_SUMS._replace(dense=bucket_bytes)
        if first or not self.every_micro_batch:
            return (
                unit.first_sums._replace(dense=unit.first_sums.dense + bucket_bytes)
                if first
                else NO_SUMS._replace(dense=bucket_bytes)
            )
        table = self.table
        table_sums = (
            table.states.sums if table.waits_for_last_pass and table.is_output and unit.group.name == "head" else 0
        )
        table_sums -= unit.first_sums.table if table_sums else 0
        dense = unit.first_sums.dense - table_sums if self.reduces_every_micro_batch(unit) else 0
        looked_up = 0 if table.waits_for_last_pass else unit.first_sums.table
        experts = unit.first_sums.experts if frees_sums(unit.parts[-1]) else 0
        return GradientSums(dense, experts, table=looked_up, tied=unit.first_sums.tied)

    def get_waiting(self, unit: UnitGroupMemory) -> WaitingGradients:
        """Return which gradients made in B wait for W: those of experts only if experts are sharded."""
        return WaitingGradients(
            self.every_micro_batch,
            self.every_micro_batch and unit.first_sums.experts > 0 and frees_sums(unit.parts[-1]),
        )

    def count_bias_sum_bytes(self, unit: UnitGroupMemory) -> int:
        """Return the bytes of experts' sums that B allocates, not W, because bias gradients do not wait for W."""
        return (
            unit.first_sums.experts if self.has_separate_biases and not self.get_waiting(unit).expert_biases_wait else 0
        )

    def count_expert_sums_by_w(self, unit: UnitGroupMemory) -> int:
        """Return the bytes of experts' sums that W of ``unit`` allocates."""
        return 0 if self.is_bucketed else unit.first_sums.experts - self.count_bias_sum_bytes(unit)

    def is_reduced_in_b(self, unit: UnitGroupMemory, *, last: bool) -> bool:
        """Return True if a table of ``unit`` is reduced before W: it is used for lookups and not in a matmul."""
        return (
            unit.first_sums.table > 0
            and not unit.first_sums.tied
            and not self.table.head_accumulates
            and self.is_reduced(unit, last=last)
        )

    def count_new_shards(self, unit: UnitGroupMemory, *, first: bool) -> int:
        """Return the bytes of this rank's reduced gradients that a reduction of ``unit`` allocates."""
        return (
            0
            if self.is_bucketed or (self.reduces_every_micro_batch(unit) and not first)
            else sum(part.new_shard for part in unit.parts)
        )

    def table_shard_bytes(self, unit: UnitGroupMemory, *, first: bool) -> int:
        """Return the bytes of ``count_new_shards`` that belong to the weight of the output layer.

        It is reduced as soon as its gradient is made; 0 for units other than the head.
        """
        if unit.group.name != "head":
            return 0
        table_parts = (
            unit.parts[1:-1] if unit.first_sums.experts else unit.parts[1:]
        )  # the table lies before the experts
        return min(sum(part.new_shard for part in table_parts), self.count_new_shards(unit, first=first))

    def count_gradient_change(
        self, unit: UnitGroupMemory, *, first: bool, reduces: bool, made_later: int = 0
    ) -> GradientChange:
        """Return the change by a backward; ``made_later``: bytes of weight gradients that W makes."""
        state = unit.states
        table = self.table
        is_late = self.destination == "late"
        made_bytes, sum_bytes = self.element_bytes
        bucket_bytes = self.bucket_bytes if unit.group.name == "head" and (first or not self.keeps_unsharded) else 0
        if self.is_bucketed:
            wait_bytes = {"head": table.head_gradient_bytes, "embed": -table.head_gradient_bytes}.get(
                str(unit.group.name), 0
            )
            return GradientChange(bucket_bytes + wait_bytes, bucket_bytes, wait_bytes)
        if is_late:  # separate gradients, not their sums
            sums_bytes = max(0, state.sums * made_bytes // sum_bytes - made_later)
        elif first or not self.reduces_every_micro_batch(unit):
            sums_bytes = state.sums if first else 0
        else:
            sums_bytes = sum(part.sums for part in unit.parts if frees_sums(part))
        is_first_gradient = first or (self.every_micro_batch and not table.waits_for_last_pass)
        waiting_bytes = (
            table.states.sums
            if table.head_accumulates and is_first_gradient and not is_late
            else table.head_gradient_bytes
        )
        wait_bytes = {"head": waiting_bytes, "embed": -waiting_bytes}.get(str(unit.group.name), 0)
        shard_bytes = self.count_new_shards(unit, first=first)
        freed = sum(part.sums for part in unit.parts if frees_sums(part)) if reduces else 0
        if reduces and self.release == "next_copy":  # the copy is made, gradients are freed, the shard is made
            copies_made = self.copies_gradients(first=first)
            made_bytes_freed, sums_before = (
                (freed * made_bytes // sum_bytes, sums_bytes - freed) if copies_made else (0, sums_bytes)
            )
            shard_after = shard_bytes if copies_made else shard_bytes - freed
            leaving = sum(part.updated_numel for part in unit.parts if part.offloaded) * self.result_bytes
            return GradientChange(
                sums_before + wait_bytes + freed + max(made_bytes_freed, shard_after, leaving),
                sums_before + shard_after,
                wait_bytes,
            )
        sums_bytes += bucket_bytes
        return GradientChange(
            sums_bytes + wait_bytes + shard_bytes, sums_bytes + (shard_bytes - freed if reduces else 0), wait_bytes
        )

    def count_pending_sum_bytes(self, unit: UnitGroupMemory) -> int:
        """Return the bytes of a unit's accumulated gradients that are kept until the next reduction has begun.

        Only its dense weights count: its experts are reduced before them.
        """
        return 0 if self.release == "at_once" else unit.parts[0].sums

    def in_flight_bytes(
        self,
        units: tuple[UnitGroupMemory, ...],
        previous: PreviousPass,
        deferred: list[int],
        *,
        next_pass: tuple[Kind, int],
        experts_first: bool,
    ) -> int:
        """Return the bytes of sums in flight after a backward pass.

        They belong to the unit of its stage that was reduced last.

        ``deferred``: bytes that each unit of the stage defers from B to W; ``next_pass``: the next pass. Of two equal
        passes in a row that make the gradients of only one unit, the second ends the reduction before it allocates the
        unit's sums again, unless the sums of experts come first (``experts_first``: in W).
        """
        if self.every_micro_batch and next_pass == (previous.kind, previous.stage) and previous.kind != "B":
            made_units = [
                last_reduced
                for last_reduced, deferred_bytes in zip(units, deferred, strict=True)
                if deferred_bytes or previous.kind == "BW"
            ]
            experts_first = experts_first if previous.kind == "W" else made_units[0].first_sums.experts > 0
            if [last_reduced.group.times for last_reduced in made_units] == [1] and not experts_first:
                return 0
        reduced_units = (
            last_reduced
            for last_reduced, deferred_bytes in zip(units, deferred, strict=True)
            if {"B": not deferred_bytes, "W": bool(deferred_bytes)}.get(previous.kind, True)
            and self.is_reduced(last_reduced, last=previous.last)
        )
        last_reduced = next(reduced_units, None)
        return self.count_pending_sum_bytes(last_reduced) if last_reduced is not None else 0


def plan_reductions(counts: Counts, layout: Layout) -> Reductions:
    """Return how the gradients of a layout are reduced by the job's software."""
    job = counts.job
    stack = counts.job.stack
    zero_policy = get_policy(layout, counts.job)
    gradients_stay = zero_policy.gradients_stay
    reduces_every_backward = counts.reduces_every_micro_batch(layout)
    kernel_facts = stack.kernel_facts
    destination = _choose_destination(counts, stays=gradients_stay, weights_stay=zero_policy.weights_stay)
    bucketed = destination in ("bucket", "lasting_bucket")
    release: Release = "at_once"
    if not gradients_stay and not bucketed:
        if stack.comm_buffers == "retained":
            release = "next_copy"
        elif "dp" in stack.overlap and (kernel_facts.overlaps_each_reduction or not reduces_every_backward):
            release = "next_reduction"
    has_buckets = zero_policy.weights_stay and (layout.shards > 1 or zero_policy.runs_alone)
    n_buckets = (2 if "dp" in stack.overlap else 1) if has_buckets else 0
    reduced_width = count_reduced_width(layout, job)
    summed_width = job.precision.summed_bytes
    return Reductions(
        keeps_unsharded=gradients_stay,
        every_micro_batch=reduces_every_backward,
        destination=destination,
        release=release,
        bucket_bytes=n_buckets * stack.reduce_bucket * job.bucket_bytes,
        reduces_experts_midway=kernel_facts.reduces_experts_midway and not bucketed,
        has_separate_biases=kernel_facts.separate_biases
        and counts.model.moe is not None
        and counts.model.moe.expert_bias,
        table=_find_shared_table(counts, layout),
        element_bytes=(job.precision.table_gradients_bytes, summed_width),
        result_bytes=reduced_width + (summed_width if reduced_width != summed_width else 0),
    )


def _choose_destination(counts: Counts, *, stays: bool, weights_stay: bool) -> Destination:
    """Return where a unit's gradients are accumulated, and whether that buffer outlives the unit's backward."""
    recipe, stack = counts.job.precision, counts.job.stack
    if stack.reduce_bucket > 0 and not stays:
        return "bucket" if weights_stay else "lasting_bucket"
    if stack.wgrad_accumulation not in ("separate", "ddp_buckets"):
        is_late = stack.wgrad_accumulation in ("deferred", "deferred_buckets")
        return ("late" if is_late else "lasting") if stays else "allocated"
    return (
        "first"
        if recipe.gradients_bytes == recipe.summed_bytes and not stack.kernel_facts.allocates_sums
        else "allocated"
    )


def _find_shared_table(counts: Counts, layout: Layout) -> SharedTable:
    """Return how embedding and head share their table on this layout, and who holds its gradient."""
    model, adds = counts.model, counts.adds_table_gradient(layout)
    is_local = adds or (model.shares_table and layout.pp == 1)
    gradient_bytes = model.vocab * model.width * counts.job.precision.table_gradients_bytes // layout.tp
    gradient_bytes = gradient_bytes if counts.trains_table else 0
    return SharedTable(
        is_local=is_local,
        head_accumulates=adds,
        is_output=model.tied_embeddings,
        states=counts.count_table_states(layout) if is_local else UnitStates(),
        waits_for_last_pass=adds and not counts.reduces_every_micro_batch(layout, "embed"),
        head_gradient_bytes=gradient_bytes if is_local and not adds else 0,
    )


def frees_sums(part: UnitStates) -> bool:
    """Tell whether a reduction frees the sums: its result is a shard of them, on the device or in host memory."""
    return part.new_shard > 0 or (part.offloaded > 0 and part.sums > 0)

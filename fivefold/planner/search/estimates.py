"""Computes the planner's figures for many layouts at once, once for each distinct way to shard a unit.

    columns of integers → distinct keys → ``Counts``, ``Units`` → a vector over units → gathered by row

The units are embedding, head, and each kind of block with and without recomputation, in the order of ``runs``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from fivefold.layout.sharding import Policy, gathers_for_backward, get_policy
from fivefold.layout.spec import Layout
from fivefold.planner.counts.counts import Name, UnitGroup, ends_on_different_ranks, get_group_degrees
from fivefold.planner.counts.memory.liveness import GradientSums
from fivefold.planner.counts.memory.states import UnitStates
from fivefold.planner.counts.operations.local_shapes import LocalDegrees, get_local_degrees
from fivefold.planner.predict import Planner
from fivefold.planner.search.columns import CandidateLayouts, Floats, Ints, PartialLayouts, encode_rows
from fivefold.planner.search.optimistic_times import bound_adjacent_figures, bound_kernels, list_figures
from fivefold.planner.search.placements import count_expert_shards
from fivefold.planner.search.space import Space, list_zeros_alone
from fivefold.planner.search.tables import LARGE_MICRO_BATCH, ROUNDED, Tables
from fivefold.planner.search.work import UNITS_PER_PASS, UNITS_PER_PLACE, UNITS_PER_STATE, SearchWork
from fivefold.planner.time.stage_time import estimate_stage_message
from fivefold.planner.time.unit_time import AXES

FIRST_BLOCK = 2  # index of the first kind of block among the units, without and with recomputation
UNITS_PER_MTP_MODULE = 6  # units of a model that take as long as a module of multi-token prediction in its head
FEW_RANKS = 2  # ranks of cp and ep from whose figures those of more are scaled


class AllocatedGradients(IntEnum):
    """The gradients that a backward pass allocates: none, dense accumulators, all accumulators, or all to its end."""

    NONE = 0
    DENSE = 1
    ALL = 2
    HELD = 3


class StateFigure(IntEnum):
    """The figures of a unit's states: bytes, but for the elements that the optimizer updates."""

    RESIDENT = 0  # at rest
    BETWEEN = 1  # gradients between micro-batches
    AT_UPDATE = 2  # gradients at the update
    GATHERED = 3  # gathered weights at the peak of a unit, at least
    UPDATED = 4  # updated elements
    PREFETCHED = 5  # weights gathered ahead of the backward
    REDUCED = 6  # gradients that are reduced in each backward
    FIRST_BACKWARD = 7  # gradients at the end of the first backward


class Estimates(Tables):
    """Figures for the layouts of one space under one planner: arrays [n candidates, figures, units]."""

    def __init__(
        self,
        planner: Planner,
        space: Space,
        partials: PartialLayouts,
        *,
        like: Estimates | None = None,
        work: SearchWork | None = None,
    ) -> None:
        """Initialize the tables of ``partials``.

        ``like``: estimates to reuse, of a job that differs only in how often gradients are reduced. ``work``: counts
        what is computed.
        """
        super().__init__(planner, space, partials, like=like, work=work or SearchWork())
        example = self.counts.example
        self.runs = [UnitGroup("embed", 0, 1), self.counts.head(Layout(ac="full"))]
        self.runs += [
            UnitGroup(kind, first, 1, recomputed) for kind, first in example.items() for recomputed in (False, True)
        ]
        kinds = list(self.counts.kinds)
        unit_counts = [kinds.count(kind) * (not recomputed) for kind in example for recomputed in (False, True)]
        self.unit_counts = np.array([1.0, 1.0, *unit_counts])  # of each unit in the model, without recomputation
        # A module of multi-token prediction is a block in the head whose tensors are renamed twice.
        units_per_pass = len(self.runs) + UNITS_PER_MTP_MODULE * self.counts.model.mtp_depth
        self._pass_cost, self._state_cost = UNITS_PER_PASS * units_per_pass, UNITS_PER_STATE * len(self.runs)
        shapes = [Layout(pp=shape.pp, v=shape.v, schedule=shape.schedule) for shape in space.shapes]
        self._ends_on_different_ranks = np.array([ends_on_different_ranks(shape) for shape in shapes]).astype(np.int64)
        by_pp = np.lexsort([self._ends_on_different_ranks, space.shape_pp])
        # of each shape, one with as many ranks, whose ends are on the same rank if a schedule has them there
        self._shape_with_near_ends = by_pp[np.searchsorted(space.shape_pp, space.shape_pp)]
        self._zero_alone = max((0, *list_zeros_alone(self.counts.job)))
        self._overlaps_p2p = np.array(
            [self.counts.job.stack.overlaps_p2p(shape.schedule) for shape in space.shapes], np.int64
        )
        self._enters_both_ends = np.array([shape.pipeline.enters_both_ends for shape in shapes], np.int64)

    def reduces_often(self, candidates: CandidateLayouts) -> NDArray[np.bool_]:
        """Return whether gradients are reduced after every backward pass, [n]."""
        job, (dp, mbs, pp) = (
            self.planner.job,
            (column[candidates.partial] for column in self.partials.select("dp mbs pp")),
        )
        several = job.global_batch // (dp * mbs) > 1
        every_micro_batch = {"step": False, "micro_batch": True}.get(job.stack.reduce, pp == 1)
        return np.asarray((candidates.zero >= 2) & several & every_micro_batch)

    def profiles(
        self, candidates: CandidateLayouts, *, scaled: bool = False, any_recomputation: bool = False
    ) -> Floats:
        """Return bytes [n, (kept, backward peak above it), units].

        ``scaled``: lower bounds, as in ``_bytes``; ``any_recomputation``: for every recomputation.
        """

        def compute(part: LocalDegrees, name: Name) -> tuple[int, int]:
            profile = self.counts.profile(part, name)
            return profile.kept_bytes, profile.backward_peak_bytes - profile.kept_bytes

        return self._look_up_bytes("profiles", candidates, compute, scaled=scaled, any_recomputation=any_recomputation)

    def splits(self, candidates: CandidateLayouts, *, scaled: bool = False, any_recomputation: bool = False) -> Floats:
        """Return bytes [n, (backward peak above what is kept, kept for W), units].

        Weight gradients of the backward are deferred. ``scaled``: for the second lower bounds, as in ``_bytes``;
        ``any_recomputation``: for every recomputation.
        """

        def compute(part: LocalDegrees, name: Name) -> tuple[int, int]:
            kept = self.counts.profile(part, name).kept_bytes
            split = self.counts.profile_deferred_wgrad(part, name)
            return split.backward_peak_bytes - kept, split.deferred_bytes

        return self._look_up_bytes("splits", candidates, compute, scaled=scaled, any_recomputation=any_recomputation)

    def backward_with_gradients(self, candidates: CandidateLayouts, allocation: AllocatedGradients) -> Floats:
        """Return a lower bound in bytes [n, units] of a backward that allocates gradients.

        Gradients of experts that are already reduced are not counted.
        """
        has_mtp = self.counts.model.mtp_depth > 0
        stack = self.counts.job.stack
        reduces_experts_midway = stack.kernel_facts.reduces_experts_midway and "dp" not in stack.overlap

        def compute(layout: Layout, _sequences: int) -> Floats:
            """Return the backward peak of each unit, with the gradients that ``allocation`` holds."""
            part, columns = get_local_degrees(layout), []
            for run in self.runs:
                name = self._pick_representative_unit(run.name)
                parts = self.counts.parts(layout.replace(zero=0, shard_group=None), name)
                experts = parts[-1].sums if self.counts.count_moe_layers(name) else 0
                dense_bytes = sum(entry.sums for entry in parts) - experts
                if allocation == AllocatedGradients.HELD:
                    sums = GradientSums(
                        keeps_gradients=True, tied=name == "head" and has_mtp and self.counts.model.tied_embeddings
                    )
                elif name == "embed" or (name == "head" and (self.counts.model.shares_table or experts or has_mtp)):
                    sums = GradientSums()  # a table's gradients have rules of their own
                else:
                    expert_bytes = experts if allocation == AllocatedGradients.ALL else 0
                    sums = GradientSums(
                        dense_bytes, expert_bytes, freed_bytes=expert_bytes if reduces_experts_midway else 0
                    )
                columns.append(self.counts.profile(get_group_degrees(part, run), name, sums).backward_peak_bytes)
            return np.array([columns], float)

        name = f"births {allocation}"
        keys = self._make_partial_keys(name, self._list_operation_columns)
        return self._look_up(name, candidates, keys, compute, cost=self._pass_cost)[:, 0]

    def _look_up_bytes(
        self,
        name: str,
        candidates: CandidateLayouts,
        count: Callable[[LocalDegrees, Name], Sequence[int]],
        *,
        scaled: bool,
        any_recomputation: bool,
    ) -> Floats:
        """Return figures of every unit; ``any_recomputation``: the minimum of each over all recomputations.

        With ``scaled`` they are lower bounds, scaled from the figures of few parts: ``LARGE_MICRO_BATCH`` sequences
        unless mbs is 1 (halves of one sequence are views, those of several are copies); at most two ranks of cp; and,
        with that many sequences (weights are then negligible), at most two ranks of ep, except for one expert per
        rank, whose rows are in order.
        """

        def list_columns() -> list[Ints]:
            mbs, retains_outputs, cp, cp_kind, tp, tp_inner, sp, ep, etp, recomputed = self._list_operation_columns()
            sequences = mbs
            if scaled:
                sequences = np.where(mbs > 1, LARGE_MICRO_BATCH, 1)
                cp = np.minimum(cp, FEW_RANKS)
                is_single_expert = ep == (self.counts.model.moe.experts if self.counts.model.moe else 1)
                ep = np.where((sequences == LARGE_MICRO_BATCH) & ~is_single_expert, np.minimum(ep, FEW_RANKS), ep)
            columns = [sequences, cp, retains_outputs, cp_kind, tp, tp_inner, sp, ep, etp]
            return columns if any_recomputation else [*columns, recomputed]

        def compute(layout: Layout, sequences: int) -> Floats:
            part = get_local_degrees(layout)._replace(sequences=sequences)
            if scaled:
                is_single_expert = self.counts.model.moe is not None and part.ep == self.counts.model.moe.experts
                expert_ranks = (
                    min(part.ep, FEW_RANKS) if sequences == LARGE_MICRO_BATCH and not is_single_expert else part.ep
                )
                part = part._replace(cp=min(part.cp, FEW_RANKS), ep=expert_ranks)
            parts = (
                [part._replace(recomputed=groups) for groups in self._recomputed_groups]
                if any_recomputation
                else [part]
            )
            rows = [
                [count(get_group_degrees(part, run), self._pick_representative_unit(run.name)) for run in self.runs]
                for part in parts
            ]
            smallest: Floats = np.array(rows, float).min(axis=0).T
            if any_recomputation:
                for cp_kind in range(FIRST_BLOCK, len(self.runs), 2):  # whether it is recomputed or not
                    smallest[:, cp_kind : cp_kind + 2] = smallest[:, cp_kind : cp_kind + 2].min(axis=1, keepdims=True)
            return smallest

        name = f"bare {name}" if any_recomputation else name
        keys = self._make_partial_keys(name, list_columns, variant=int(scaled))
        cost = self._pass_cost * (len(self._recomputed_groups) if any_recomputation else 1)
        totals = self._look_up(name, candidates, keys, compute, cost=cost)
        if not scaled:
            return totals
        sequences, cp = (column[candidates.partial] for column in keys.columns[:2])
        own_sequences, own_cp = (column[candidates.partial] for column in (self.partials.mbs, self.partials.cp))
        scale = own_sequences / sequences * cp / own_cp
        return np.asarray(
            totals * np.where((sequences == own_sequences) & (cp == own_cp), 1.0, scale * ROUNDED)[:, None, None]
        )

    def bound_states(self, candidates: CandidateLayouts) -> Floats:
        """Return the minimum of ``states`` over ZeRO stages and shard groups."""
        partials = self.partials.take(candidates.partial)
        replicas = partials.dp * partials.cp
        unsharded = self.states(candidates._replace(zero=np.zeros_like(replicas), shards=np.ones_like(replicas)))
        zero = np.where(replicas > 1, 3, self._zero_alone)
        fully_sharded = self.states(candidates._replace(zero=zero, shards=replicas))
        smallest = np.minimum(unsharded, fully_sharded)
        for figure in (
            StateFigure.GATHERED,
            StateFigure.PREFETCHED,
            StateFigure.REDUCED,
            StateFigure.FIRST_BACKWARD,
        ):
            smallest[:, figure] = 0
        return smallest

    def resting_bytes(self, candidates: CandidateLayouts) -> Floats:
        """Return the bytes [n] of states and gradients of the full model at the end of a step.

        They are divided by tp, ep and ZeRO, not by pp: the minimum over ZeRO stages and schedules, of which some have
        both ends on one rank, where tied embeddings are one table. Without a pipeline some gradients are freed before
        the last ones are made.
        """
        partials = self.partials.take(candidates.partial)
        replicas = partials.dp * partials.cp
        shapes = self._shape_with_near_ends[candidates.shape]
        unsharded = candidates._replace(shape=shapes, zero=np.zeros_like(replicas), shards=np.ones_like(replicas))
        fully_sharded = unsharded._replace(zero=np.where(replicas > 1, 3, self._zero_alone), shards=replicas)
        smallest = np.minimum(self._count_resting_bytes(unsharded), self._count_resting_bytes(fully_sharded))
        resident_bytes, gradient_bytes = smallest[:, 0], smallest[:, 1]
        freed = gradient_bytes[:, 0] + gradient_bytes[:, 2:].max(axis=1)
        return np.asarray((resident_bytes + gradient_bytes) @ self.unit_counts - np.where(partials.pp == 1, freed, 0.0))

    def _count_resting_bytes(self, candidates: CandidateLayouts) -> Floats:
        """Return the bytes [n, (at rest, gradients at the update), units] of states, under ZeRO-0 or ZeRO-3.

        Experts are counted once for all degrees of dense weights, and dense weights once for all expert degrees.
        """
        partials = self.partials

        def list_dense_columns() -> list[Ints]:
            return partials.select("tp inner")

        def list_expert_columns() -> list[Ints]:
            inner = np.where(partials.inner > 1, partials.inner, 0)  # under 2D tensor parallelism experts are cut by tp
            return [partials.ep, partials.etp, inner, inner * partials.tp]

        expert_shards = count_expert_shards(partials.take(candidates.partial), candidates.shards)

        def count(list_columns: Callable[[], list[Ints]], columns: list[Ints], *, experts: bool) -> Floats:
            def compute(layout: Layout, _sequences: int) -> Floats:
                return self._count_resting_states(layout, experts=experts).T

            name, columns = f"resting, experts {experts}", [candidates.zero, *columns]
            keys = self._make_partial_keys(name, list_columns)
            return self._look_up(name, candidates, keys, compute, columns=columns, cost=self._state_cost // 8)

        ends = self._ends_on_different_ranks[candidates.shape]
        figures = count(list_dense_columns, [candidates.shards, ends], experts=False)
        return figures + count(list_expert_columns, [expert_shards], experts=True) if self.counts.model.moe else figures

    def states(self, candidates: CandidateLayouts) -> Floats:
        """Return the bytes of states and the elements updated, [n, ``StateFigure``, units]."""

        def list_columns() -> list[Ints]:
            is_unpipelined = (self.partials.pp == 1).astype(np.int64)
            return [*self.partials.select("tp inner ep etp"), self.partials.dp * self.partials.cp, is_unpipelined]

        def compute(layout: Layout, _sequences: int) -> Floats:
            return self._count_states(layout).T

        keys = self._make_partial_keys("states", list_columns)
        columns = [*self._list_sharding_columns(candidates), candidates.zero]
        return self._look_up("states", candidates, keys, compute, columns=columns, cost=self._state_cost)

    def _list_sharding_columns(self, candidates: CandidateLayouts) -> list[Ints]:
        """Return the columns that, with dp·cp, say how states are sharded and how often gradients are reduced."""
        ends = self._ends_on_different_ranks[candidates.shape]
        columns = [candidates.shards, ends, self.reduces_often(candidates).astype(np.int64)]
        if self.counts.job.offload:  # ZeRO-1 may keep no gradients of a single micro-batch
            dp, mbs = (column[candidates.partial] for column in self.partials.select("dp mbs"))
            columns.append(np.equal(dp * mbs, self.counts.job.global_batch).astype(np.int64))
        return columns

    def _count_resting_states(self, layout: Layout, *, experts: bool) -> Floats:
        """Return the bytes [units, 2] at rest and of gradients at the update, of experts or of dense weights."""
        keeps = get_policy(layout, self.counts.job)
        names = [self._pick_representative_unit(run.name) for run in self.runs]
        rows = {}
        for name in dict.fromkeys(names):
            rows[name] = list_resting_bytes(self.counts.count_kind_states(layout, name, experts=experts), keeps)
        return np.array([rows[name] for name in names], float)

    def _count_states(self, layout: Layout) -> Floats:
        """Compute the figures of ``states``, [units, ``StateFigure``]."""
        job, stack = self.counts.job, self.counts.job.stack
        keeps, rows = get_policy(layout, job), dict[Name, dict[StateFigure, int]]()
        reduces_often = self.counts.reduces_every_micro_batch(layout)
        is_reduced_at_once = reduces_often or stack.reduce_bucket > 0  # at once into a bucket
        gathers_by_weight = stack.zero3_gather == "weights"  # not all are gathered at the peak of a unit
        prefetches = not (gathers_by_weight or keeps.runs_alone) and gathers_for_backward(layout, job)
        names = [self._pick_representative_unit(run.name) for run in self.runs]
        for name in dict.fromkeys(names):
            state, parts = self.counts.states_with_parts(layout, name)
            resident_bytes, bytes_at_update = list_resting_bytes(state, keeps)
            bytes_between = bytes_at_update if is_reduced_at_once or keeps.gradients_stay else state.sums
            gathered = 0 if keeps.weights_stay or gathers_by_weight else state.gathered
            is_block = not isinstance(name, str)
            is_prefetched = prefetches and is_block and self.counts.has_backward(name)
            reduces_block = reduces_often and is_block and not stack.reduce_bucket
            rows[name] = {
                StateFigure.RESIDENT: resident_bytes,
                StateFigure.BETWEEN: bytes_between,
                StateFigure.AT_UPDATE: bytes_at_update,
                StateFigure.GATHERED: gathered,
                StateFigure.UPDATED: state.updated_numel,
                StateFigure.PREFETCHED: self._count_prefetched_bytes(parts) if is_prefetched else 0,
                StateFigure.REDUCED: _bound_reduced_bytes(parts) if reduces_block else 0,
                StateFigure.FIRST_BACKWARD: self._bound_gradient_bytes(name, parts, reduces=not keeps.gradients_stay),
            }
        return np.array([[rows[name][figure] for figure in StateFigure] for name in names], float)

    def _count_prefetched_bytes(self, parts: Sequence[UnitStates]) -> int:
        """Return bytes of a block that are gathered during the backward before its own, at least (``passes/``)."""
        stack = self.counts.job.stack
        if stack.comm_buffers == "retained":
            return sum(part.gathered for part in parts)
        overlaps = "dp" in stack.overlap and stack.param_all_gather == "overlapped"
        return sum(part.gather_buffers + part.gathered for part in parts) if overlaps else 0

    def _bound_gradient_bytes(self, name: Name, parts: Sequence[UnitStates], *, reduces: bool) -> int:
        """Return a lower bound of the bytes of full gradients at the end of a block's first backward."""
        stack, sums = self.counts.job.stack, [part.sums for part in parts]
        if name == "embed" and not self.counts.model.shares_table:  # with the gradient that is added to the sums
            recipe = self.counts.job.precision
            return sum(sums) + reduces * (sum(sums) * recipe.table_gradients_bytes // recipe.summed_bytes)
        if isinstance(name, str):
            return 0
        reduces_experts_midway = stack.kernel_facts.reduces_experts_midway and "dp" not in stack.overlap
        return max(sums) if reduces_experts_midway else sum(sums)

    def bound_adjacent_units(
        self, candidates: CandidateLayouts, *, max_sequences: int = 1, any_recomputation: bool = False
    ) -> Floats:
        """Return a bound like ``units`` for groups of adjacent ranks.

        Then, as halves of an FB, follow kernels with exposed messages of forward and backward, and the concurrent
        work without tp. ``max_sequences`` as in ``_choose_larger_sizes``; with ``any_recomputation`` no unit is
        recomputed.

        Messages are not counted on a calibrated machine, nor if two micro-batches overlap each other's messages.
        """
        if any_recomputation and not self.measured:

            def compute_bare(layout: Layout, sequences: int) -> Floats:
                return self._bound_units(
                    get_local_degrees(layout)._replace(sequences=sequences, recomputed=frozenset()), layout
                )

            return self._look_up_scaled(
                "bare",
                candidates,
                slice(1, -1),
                compute_bare,
                max_sequences=max_sequences,
                cost=self._pass_cost // 2,
            )
        if self.measured:

            def compute_measured(layout: Layout, _sequences: int) -> Floats:
                part = get_local_degrees(layout)
                return self._bound_units(part._replace(recomputed=frozenset()) if any_recomputation else part, layout)

            name = "bare" if any_recomputation else "nearest"
            keys = self._make_partial_keys(name, self._list_operation_columns)
            return self._look_up(name, candidates, keys, compute_measured, cost=self._pass_cost)

        def compute(layout: Layout, sequences: int) -> Floats:
            return self._bound_units(get_local_degrees(layout)._replace(sequences=sequences), layout)

        return self._look_up_scaled(
            "nearest", candidates, slice(1, None), compute, max_sequences=max_sequences, cost=self._pass_cost
        )

    def model_seconds(self, candidates: CandidateLayouts, *, max_sequences: int, complete: bool = True) -> Floats:
        """Return seconds [n, (passes one after another, passes in pairs), 1] of all units of the model on one rank.

        They are for adjacent ranks as above, without recomputation, which only adds to them; 0 on a calibrated machine.
        Not ``gathered``: one figure for any etp, for all layouts that differ in nothing else.
        """
        if self.measured:
            return np.zeros((len(candidates.partial), 2, 1))

        complete |= self.counts.model.moe is None or self.counts.job.stack.pairs  # whose messages have no bound

        def compute(layout: Layout, sequences: int) -> Floats:
            part = get_local_degrees(layout)._replace(sequences=sequences, recomputed=frozenset())
            figures = self._bound_units(part, layout, complete=complete) @ self.unit_counts
            unpaired = figures[:3].sum()
            paired = max(unpaired / 2, figures[7:9].sum(), figures[9:].sum())  # as in Bounds._paired
            return np.array([[unpaired], [paired]])

        name, n_columns = ("whole", 9) if complete else ("any etp", 8)
        return self._look_up_scaled(
            name, candidates, slice(1, n_columns), compute, max_sequences=max_sequences, cost=self._pass_cost
        )

    def _bound_units(self, part: LocalDegrees, layout: Layout, *, complete: bool = True) -> Floats:
        if self.measured or self.planner.job.stack.pairs:
            return bound_kernels(self.planner.units, part, self.runs, ranks=layout.world if self.measured else 1)
        return bound_adjacent_figures(self.planner.units, part, self.runs, pairs=self.space.pairs, complete=complete)

    def units(self, candidates: CandidateLayouts) -> Floats:
        """Return seconds [n, (forward, backward, weight, exposed tp, cp, ep, all exposed of the forward), units].

        Forward and backward include exposed messages.
        """

        def compute(layout: Layout, _sequences: int) -> Floats:
            return np.array([list_figures(self.planner.units.unit(layout, run)) for run in self.runs]).T

        keys = self._make_partial_keys("operations", self._list_operation_columns)
        columns = [self._number_placements(candidates, AXES)]
        return self._look_up("units", candidates, keys, compute, columns=columns, cost=self._pass_cost)

    def pairs(self, candidates: CandidateLayouts) -> Floats:
        """Return the seconds of the messages of each unit [n, 6, units], for schedules that pair forward and backward.

        The six figures are exposed, concurrent and overlapped seconds of the forward, then of the backward. Exposed are
        those of axes that do not overlap; concurrent are all others, overlapped or not.
        """

        def compute(layout: Layout, _sequences: int) -> Floats:
            rows, units = [], self.planner.units
            overlapping_axes = [axis in self.planner.job.stack.overlap for axis in AXES]
            for run in self.runs:
                row: list[float] = []
                unit = units.unit(layout, run)
                forward = (unit.forward_exposed, unit.forward_unoverlapped)
                backward = (unit.backward_exposed, unit.backward_unoverlapped)
                for exposed_by_axis, unoverlapped_by_axis in (forward, backward):
                    by_axis = list(zip(exposed_by_axis, unoverlapped_by_axis, overlapping_axes, strict=True))
                    row.append(sum(exposed for exposed, _, can_overlap in by_axis if not can_overlap))
                    row.append(sum(total for _, total, can_overlap in by_axis if can_overlap))
                    row.append(sum(max(0.0, total - exposed) for exposed, total, can_overlap in by_axis if can_overlap))
                rows.append(row)
            return np.array(rows).T

        keys = self._make_partial_keys("operations", self._list_operation_columns)
        columns = [self._number_placements(candidates, AXES)]
        return self._look_up("pairs", candidates, keys, compute, columns=columns, cost=self._state_cost)

    def stage_message_seconds(self, candidates: CandidateLayouts) -> Floats:
        """Return seconds [n, (lateness, sending)] of a message between stages, as in ``StageSeconds``."""
        columns = [self._overlaps_p2p[candidates.shape]]
        columns += [self._number_placements(candidates, ("tp",)), self._number_placements(candidates, ("pp",))]

        def compute(layout: Layout, _sequences: int) -> Floats:
            return np.array(estimate_stage_message(self.planner.units, layout))

        keys = self._make_partial_keys("between stages", lambda: self.partials.select("mbs cp tp inner sp"))
        return self._look_up("between stages", candidates, keys, compute, columns=columns, cost=UNITS_PER_PLACE)

    def parallel(self, candidates: CandidateLayouts) -> Floats:
        """Return seconds [n, (gather, reduce, copies, copy_out, copy_in), units] as in ``GatherReduceTime``."""
        seconds, index = self.find_distinct_parallel(candidates)
        return seconds[index]

    def find_distinct_parallel(self, candidates: CandidateLayouts) -> tuple[Floats, Ints]:
        """Return the known rows of ``parallel``, and each candidate's index into them, equal for equal messages."""
        job = self.counts.job
        differs_by_stage = bool(job.stack.reduce_bucket) or job.freezes_weights  # other messages, or other gathers

        def list_columns() -> list[Ints]:
            partials = self.partials
            columns = [*partials.select("tp inner sp ep etp"), partials.dp * partials.cp]
            if job.stack.replicated_grad_reduce == "weight":  # after every backward
                columns += partials.select("mbs cp")
            if job.stack.ddp_bucket_size[0]:
                columns.append(partials.pp)
            if differs_by_stage:
                columns.append((partials.pp == 1).astype(np.int64))
            return columns

        columns = self._list_sharding_columns(candidates)
        columns += [candidates.zero] if job.stack.ddp_bucket_size[0] or differs_by_stage else []
        columns += [
            self._number_placements(candidates, ("shard", "replica", "expert_shard", "expert_replica")),
            self._number_placements(candidates, ("tp",)),
            self._number_placements(candidates, ("pp",)) * self._enters_both_ends[candidates.shape],
        ]

        def compute(rows: Sequence[int]) -> Iterator[Floats]:
            for layout in (self.space.layout(self.partials, candidates, row) for row in rows):
                times = [self.planner.units.gather_reduce(layout, run.name) for run in self.runs]
                figures = [(time.gather, time.reduce, time.copies, time.copy_out, time.copy_in) for time in times]
                yield np.array(figures, float).T

        keys = self._make_partial_keys("parallel", list_columns)
        return self._find_rows("parallel", candidates, keys, columns, compute, cost=self._state_cost)

    def _pick_representative_unit(self, name: Name) -> Name:
        return name if isinstance(name, str) else self.counts.representatives[name]

    def find_distinct(self, candidates: CandidateLayouts) -> Ints:
        """Return indices without duplicates.

        Of candidates whose order differs but not the placement of any group, one is kept.
        """
        axes = ("tp", "cp", "ep", "etp"), ("shard", "replica", "expert_shard", "expert_replica"), ("pp",)
        columns = [candidates.partial, candidates.shape, candidates.zero, candidates.shards]
        columns += [self._number_placements(candidates, group_axes) for group_axes in axes]
        return np.sort(np.unique(encode_rows(columns), return_index=True)[1])


def _bound_reduced_bytes(parts: Sequence[UnitStates]) -> int:
    """Return a lower bound of the bytes of full gradients while a block's are reduced in every backward.

    Those of its experts may be freed before the others are made.
    """
    return max((part.sums for part in parts if part.new_shard), default=0)


def list_resting_bytes(state: UnitStates, keeps: Policy) -> tuple[int, int]:
    """Return the bytes of a unit's states at rest, and of its gradients at the update."""
    resident_bytes = (state.gathered if keeps.weights_stay else 0) + state.separate + state.moments
    return resident_bytes, state.sums if keeps.gradients_stay else state.reduced

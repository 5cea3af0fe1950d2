"""Lower bounds on the memory and time that ``Planner.estimate`` returns, for many layouts at once (numpy columns).

    memory: memory_bounds.py
    time ≥ forward up to the rank + m · its work + backward down from it + exposed reductions + update

computed for three ranks of each pipeline, of which the maximum is taken. The tests compare with ``estimate``.
"""

from __future__ import annotations

from copy import copy

import numpy as np

from fivefold.layout.spec import Layout
from fivefold.planner.counts.memory.peak import RankMemory
from fivefold.planner.predict import Planner
from fivefold.planner.search.columns import (
    CandidateLayouts,
    Floats,
    PartialLayouts,
    RecordTable,
    factorize,
    merge_equal,
)
from fivefold.planner.search.estimates import Estimates, StateFigure
from fivefold.planner.search.memory_bounds import MemoryBounds
from fivefold.planner.search.shapes import (
    BOTH_WAYS,
    NEVER,
    PAIRED,
    SPLIT,
    PipelineUnits,
    bound_last_wgrads,
    count_pipeline_units,
    sum_units,
)
from fivefold.planner.search.space import PipelineShape, Space
from fivefold.planner.search.work import SearchWork
from fivefold.planner.time.unit_overlap import overlaps_next_forward
from fivefold.planner.time.update_time import estimate_elementwise_seconds

SAFE = 1 - 1e-9  # rounding: the planner sums in another order
TIME_PARTS = ("compute", "tp", "cp", "ep", "dp", "bubble")
ROWS_AT_ONCE = 1 << 14  # candidates in every mesh order that are bounded at once: a thousand take 3 MiB of arrays


class Bounds:
    """Lower bounds for the layouts of one space under one planner. Arrays are [n] for n candidates unless stated."""

    def __init__(
        self,
        planner: Planner,
        space: Space,
        partials: PartialLayouts,
        *,
        like: Bounds | None = None,
        work: SearchWork | None = None,
    ) -> None:
        """Initialize the bounds of ``partials``; ``like`` and ``work`` have the same meaning as in ``Estimates``."""
        self.planner, self.space = planner, space
        shared = like.estimates if like else None
        self.estimates: Estimates = Estimates(planner, space, partials, like=shared, work=work)
        self.partials = partials
        self.micro_batches = space.micro_batches(partials)
        layouts = [Layout(ac=ac) for ac in space.recomputations]
        self.recompute_every = np.array(
            [layout.recompute_every if layout.recomputed_operations else NEVER for layout in layouts]
        )
        self._pipelines: RecordTable[tuple[PipelineShape, int], PipelineUnits] = (
            like._pipelines if like else RecordTable(self._count_pipeline_units)
        )
        self._memory: MemoryBounds = MemoryBounds(
            planner.counts, space.shapes, self.estimates.runs, like=like._memory if like else None
        )
        self.update_slope = _update_slope(planner)

    def restrict_to(self, partials: PartialLayouts) -> Bounds:
        """Return the bounds of other partial layouts, which reuse what is known already."""
        restricted = copy(self)
        restricted.estimates, restricted.partials = self.estimates.restrict_to(partials), partials
        restricted.micro_batches = self.space.micro_batches(partials)
        return restricted

    def memory(
        self,
        candidates: CandidateLayouts,
        *,
        states: Floats | None = None,
        scaled: bool = False,
        any_recomputation: bool = False,
    ) -> Floats:
        """Return the peak bytes per rank [n], which do not depend on the mesh order.

        ``states`` replaces the states of the candidates' ZeRO stage. ``scaled``: lower bounds, extrapolated from the
        figures of a few sizes. ``any_recomputation``: the bound holds for every recomputation.
        """
        partial = candidates.partial
        recompute_every = self.recompute_every[self.partials.ac[candidates.partial]]
        return self._memory.peak(
            candidates,
            self.estimates,
            micro_batches=self.micro_batches[partial],
            recompute_every=np.full_like(recompute_every, NEVER) if any_recomputation else recompute_every,
            states=states,
            scaled=scaled,
            any_recomputation=any_recomputation,
        )

    def memory_of_orders(self, candidates: CandidateLayouts) -> Floats:
        """Return ``memory``, computed once for candidates that differ in their mesh order alone."""
        distinct, _, inverse = merge_equal(candidates, candidates[:4])
        return self.memory(distinct)[inverse]

    def bound_seconds_of_any_order(
        self, candidates: CandidateLayouts, *, max_sequences: int = 1, any_recomputation: bool = False
    ) -> tuple[Floats, Floats]:
        """Return a lower bound like ``seconds`` for every order and ZeRO stage; ``max_sequences`` as in ``Estimates``.

        With ``any_recomputation`` the bound also holds for every recomputation.
        """
        unit_seconds = self.estimates.bound_adjacent_units(
            candidates, max_sequences=max_sequences, any_recomputation=any_recomputation
        )
        return self._sum_seconds(candidates, unit_seconds, any_recomputation=any_recomputation)

    def seconds_of_adjacent_units(self, candidates: CandidateLayouts) -> tuple[Floats, Floats]:
        """Return a lower bound like ``seconds``, for which only data-parallel groups are those of the order.

        It is computed once for all orders of a candidate in which the messages of these groups take equal time.
        """
        parallel, index = self.estimates.find_distinct_parallel(candidates)
        distinct, first, inverse = merge_equal(candidates, [*candidates[:4], index])
        results = []
        for rows in np.array_split(np.arange(len(first)), max(1, -(-len(first) // ROWS_AT_ONCE))):
            part = distinct.take(rows)
            unit_seconds = self.estimates.bound_adjacent_units(part)
            results.append(self._sum_seconds(part, unit_seconds, parallel[index[first[rows]]]))
        seconds, seconds_by_part = zip(*results, strict=True)
        return np.concatenate(seconds)[inverse], np.concatenate(seconds_by_part)[inverse]

    def seconds(self, candidates: CandidateLayouts) -> tuple[Floats, Floats]:
        """Return the seconds [n] of the slowest of three ranks, and the same by ``TIME_PARTS`` [n, parts]."""
        parallel = self.estimates.parallel(candidates)
        return self._sum_seconds(candidates, self.estimates.units(candidates), parallel, unit_seconds_are_exact=True)

    def _sum_seconds(
        self,
        candidates: CandidateLayouts,
        unit_seconds: Floats,
        parallel: Floats | None = None,
        *,
        unit_seconds_are_exact: bool = False,
        any_recomputation: bool = False,
    ) -> tuple[Floats, Floats]:
        """Return the seconds of candidates in total and by ``TIME_PARTS``.

        ``unit_seconds_are_exact``: the mesh order is known, and so are the halves of an FB. ``any_recomputation``: no
        layer is recomputed, which bounds every choice.
        """
        units = self.pipelines(candidates, any_recomputation=any_recomputation)
        n_micro_batches = self.micro_batches[candidates.partial][:, None].astype(float)
        wgrad = unit_seconds[:, 2]
        exposed_by_axis = np.zeros((len(n_micro_batches), 4, unit_seconds.shape[2]))
        (forward_dp, backward_dp), messages, ends, update = self.compute_data_parallel_seconds(
            units, candidates, unit_seconds, parallel, unit_seconds_are_exact=unit_seconds_are_exact
        )
        forward = unit_seconds[:, 0] + forward_dp
        backward = unit_seconds[:, 1] + backward_dp
        exposed_by_axis[:, :3], exposed_by_axis[:, 3] = unit_seconds[:, 3:6], forward_dp + backward_dp
        is_paired = PAIRED[units.schedule]
        is_split = SPLIT[units.schedule]
        rounds = np.where(BOTH_WAYS[units.schedule], 0.5, 1.0) * n_micro_batches
        exposed_messages = np.stack(
            [sum_units(units.rank_units, exposed_by_axis[:, axis]) for axis in range(4)], axis=2
        )  # [n, 3, axes]
        micro_batch_seconds = sum_units(units.rank_units, forward + backward + wgrad)
        paired_rows = np.flatnonzero(is_paired[:, 0])
        if len(paired_rows):
            busy = self._bound_paired_seconds(
                PipelineUnits._make(column[paired_rows] for column in units),
                n_micro_batches[paired_rows],
                unit_seconds[paired_rows],
                self.estimates.pairs(candidates.take(paired_rows)) if unit_seconds_are_exact else None,
                messages=messages[:, paired_rows],
                exposed_dp=np.stack([forward_dp[paired_rows], backward_dp[paired_rows]]),
            )
            micro_batch_seconds[paired_rows] = busy / rounds[paired_rows]
        forward_path = sum_units(units.units_before, forward)
        backward_path = sum_units(units.units_before, backward)
        backward_path += np.where(is_split | is_paired, 0.0, sum_units(units.units_before, wgrad))
        stage_messages = np.zeros_like(forward_path)
        if unit_seconds_are_exact:
            delay, sending = self.estimates.stage_message_seconds(candidates).T[:, :, None]
            forward_path = forward_path + units.first_stage * (delay + sending)
            backward_path = backward_path + units.first_stage * (delay + sending)
            stage_messages = 2 * units.stages_per_rank * sending
        rank_finish = forward_path + rounds * (micro_batch_seconds + stage_messages) + ends + update
        first_stage_wgrads = sum_units(
            units.first_stage_units, wgrad
        )  # W may run while the last backward goes to rank 0
        late_wgrads = bound_last_wgrads(
            units, first_stage_wgrads, sum_units(units.rank_units, wgrad) - first_stage_wgrads
        )
        first_rank_finish = (
            forward_path
            + rounds * (micro_batch_seconds + stage_messages)
            - late_wgrads
            + backward_path
            + (ends + update)[:, :1]
        )
        total = np.maximum(rank_finish, first_rank_finish)
        slowest = np.arange(len(total)), total.argmax(axis=1)
        parts = _split_into_parts(
            total[slowest],
            work=(rounds * micro_batch_seconds)[slowest],
            exposed=rounds[slowest][:, None] * exposed_messages[slowest],
            ends=ends[slowest],
            update=update[slowest],
        )
        return total[slowest] * SAFE, parts

    def compute_data_parallel_seconds(
        self,
        units: PipelineUnits,
        candidates: CandidateLayouts,
        unit_seconds: Floats,
        parallel: Floats | None,
        *,
        unit_seconds_are_exact: bool = True,
    ) -> tuple[Floats, Floats, Floats, Floats]:
        """Return what data parallelism adds to a step, as four arrays of seconds.

        exposed  [2, n, units]   collective calls of a forward and of a backward that compute does not cover
        messages [2, n, units]   the same calls, alone
        ends     [n, 3]          collective calls after the last backward and before the first forward
        update   [n, 3]          the optimizer

        ``parallel``: seconds of the collective calls of dp; without it only the update is counted.
        ``unit_seconds_are_exact``: the seconds of units are known, not lower bounds of them.
        """
        states = self.estimates.bound_states(candidates) if parallel is None else self.estimates.states(candidates)
        update = sum_units(units.rank_units, states[:, StateFigure.UPDATED]) * self.update_slope
        if parallel is None:
            no_messages = np.zeros((2, len(unit_seconds), unit_seconds.shape[2]))
            return no_messages, no_messages, np.zeros_like(update), update
        messages, copies = self._bound_data_parallel_seconds(candidates, parallel)
        ends = self._bound_end_seconds(
            units, candidates, unit_seconds, parallel, unit_seconds_are_exact=unit_seconds_are_exact
        )
        return self._bound_exposed_seconds(messages, copies, unit_seconds), messages, ends, update

    def _bound_paired_seconds(
        self,
        units: PipelineUnits,
        n_micro_batches: Floats,
        unit_seconds: Floats,
        pair_seconds: Floats | None,
        *,
        messages: Floats,
        exposed_dp: Floats,
    ) -> Floats:
        """Return the busy seconds [n, 3] of ranks under a schedule with FB: pairs, and the passes that remain unpaired.

        ``pair_seconds`` come from ``Estimates.pairs``, ``messages`` from ``_bound_data_parallel_seconds``, and
        ``exposed_dp`` from ``_bound_exposed_seconds``.
        """
        unit_exposed = unit_seconds[:, 3:6].sum(axis=1)
        forward_kernels = unit_seconds[:, 0] - unit_seconds[:, 6]
        backward_kernels = unit_seconds[:, 1] + unit_seconds[:, 2] - (unit_exposed - unit_seconds[:, 6])
        first_stage = units.first_stage_units
        other_stages = units.rank_units - units.first_stage_units
        ends = np.where(BOTH_WAYS[units.schedule], 2, 1)
        ranks = units.pp // ends
        micro_batches = n_micro_batches / ends
        position = np.minimum(units.rank, units.pp - 1 - units.rank)
        position = np.where(ends == 2, position, units.rank)
        middle_pairs = micro_batches - 2 * ranks + position + 1  # layout/schedule/v_shaped.py
        busy = np.zeros(units.rank.shape)
        for forward_units, backward_units, pairs in (
            (first_stage, other_stages, middle_pairs - (position == ranks - 1)),
            (other_stages, first_stage, middle_pairs + ranks - 1 - position),
        ):
            compute = sum_units(forward_units, forward_kernels) + sum_units(backward_units, backward_kernels)
            unpaired = paired = sum_units(forward_units, unit_seconds[:, 0]) + sum_units(
                backward_units, unit_seconds[:, 1] + unit_seconds[:, 2]
            )
            if pair_seconds is None:
                # Of units as slow as the host, messages shorten the compute: then an FB takes at least half of both.
                kernels, overlappable = (
                    sum_units(forward_units, unit_seconds[:, column])
                    + sum_units(backward_units, unit_seconds[:, column + 1])
                    for column in (7, 9)
                )
                paired = np.maximum(np.maximum(kernels, overlappable), unpaired / 2)
            elif self.planner.machine.has_gpus:  # else one after the other
                unoverlapped, overlappable, overlapped = (
                    sum_units(forward_units, pair_seconds[:, column])
                    + sum_units(backward_units, pair_seconds[:, 3 + column])
                    for column in range(3)
                )
                slowed = np.maximum(0.0, np.minimum(compute, overlappable) - overlapped)
                paired = np.maximum(compute, overlappable) + unoverlapped
                if self.planner.units.overlaps:
                    concurrent = forward_kernels + pair_seconds[:, 0], backward_kernels + pair_seconds[:, 3]
                    longer, shorter = (
                        sum_units(forward_units, limit(concurrent[0], messages[0]))
                        + sum_units(backward_units, limit(concurrent[1], messages[1]))
                        for limit in (np.maximum, np.minimum)
                    )
                    paired = np.maximum(paired, longer)
                    slowed = slowed + shorter
                else:
                    paired += sum_units(forward_units, messages[0]) + sum_units(backward_units, messages[1])
                paired += self.planner.units.constants.hidden_message_slowdown * slowed
            unpaired = unpaired + sum_units(forward_units, exposed_dp[0]) + sum_units(backward_units, exposed_dp[1])
            busy += pairs * paired + (micro_batches - pairs) * unpaired
        return busy

    def _bound_data_parallel_seconds(self, candidates: CandidateLayouts, parallel: Floats) -> tuple[Floats, Floats]:
        """Return the seconds [2, n, units] of ZeRO-3's gathers and of reductions in every micro-batch.

        Also return those of copies to and from the buffers of these messages. The first axis is the forward and the
        backward of each unit.
        """
        reduces_often = self.estimates.reduces_often(candidates)[:, None]
        gathers = (candidates.zero == 3)[:, None]
        gather = np.where(gathers, parallel[:, 0], 0.0)
        has_backward = self.planner.counts.has_backward
        gathers_again = np.array([has_backward(run.name) for run in self.estimates.runs], float)
        gathers_again[:2] = 0
        gathers_again *= self.planner.job.stack.reshard == "forward"
        reductions = np.where(reduces_often, parallel[:, 1], 0.0)
        reductions[:, 0] = 0  # may overlap with the next forward
        copy_out = np.where(gathers, parallel[:, 3], 0.0)
        copy_in = np.where(reduces_often, parallel[:, 4], 0.0)
        if self.planner.model.shares_table:  # of a pipeline with both ends on one rank, it is reduced once a step
            copy_in[self.partials.pp[candidates.partial] > 1, 0] = 0
        return (
            np.stack([gather, gather * gathers_again + reductions]),
            np.stack([copy_out, copy_out * gathers_again + copy_in]),
        )

    def _bound_exposed_seconds(self, messages: Floats, copies: Floats, unit_seconds: Floats) -> Floats:
        """Return the copies and exposed messages of data parallelism, and by how much overlap slows compute.

        ``messages`` and ``copies`` come from ``_bound_data_parallel_seconds``. Messages overlap with copies as with
        other compute.
        """
        if not self.planner.units.overlaps:
            return messages + copies
        compute = copies + np.stack([unit_seconds[:, 0], unit_seconds[:, 1] + unit_seconds[:, 2]])
        return np.asarray(messages + copies - (1 - self.planner.units.contention) * np.minimum(messages, compute))

    def _bound_end_seconds(
        self,
        units: PipelineUnits,
        candidates: CandidateLayouts,
        unit_seconds: Floats,
        parallel: Floats,
        *,
        unit_seconds_are_exact: bool,
    ) -> Floats:
        """Return the exposed seconds [n, 3] at the ends of a step.

        They are the reductions after the last backward and the gathers before the first forward. Without
        ``unit_seconds_are_exact``, the seconds of units may be too long for a bound where passes are paired or wait for
        gathers. There, the messages are assumed to overlap with all compute.
        """
        gathers_after_update = (candidates.zero < 3)[:, None]
        if self.planner.job.stack.zero2_shards == "separate":  # ZeRO-2 without a pipeline gathers as ZeRO-3 does
            gathers_after_update &= ((candidates.zero != 2) | (self.partials.take(candidates.partial).pp > 1))[:, None]
        gather = np.where(gathers_after_update, parallel[:, 0], 0.0)
        reduce = np.where(self.estimates.reduces_often(candidates)[:, None], 0.0, parallel[:, 1])
        if self.planner.job.stack.param_all_gather == "broadcast":  # no bound for it
            gather = np.zeros_like(gather)
        gathers, reduces, copies = (
            sum_units(units.rank_units, seconds) for seconds in (gather, reduce, parallel[:, 2])
        )
        if not self.planner.units.overlaps:
            return gathers + reduces + copies
        first_gather, last_reduce, first_reduce = (
            np.take_along_axis(column, units.first_unit, axis=1) for column in (gather, reduce, parallel[:, 1])
        )
        # Of reductions in every micro-batch the last one comes after its own backward, which is as long or hides it.
        backward_compute = (
            unit_seconds[:, 1] + unit_seconds[:, 2] - (unit_seconds[:, 3:6].sum(axis=1) - unit_seconds[:, 6])
        )
        if overlaps_next_forward("embed", self.planner.job):
            backward_compute[:, 0] = np.inf
        reduces_often = self.estimates.reduces_often(candidates)[:, None]
        copies += np.where(
            reduces_often,
            np.minimum(first_reduce, np.take_along_axis(backward_compute, units.first_unit, axis=1)),
            0.0,
        )
        forward_overlap = sum_units(units.first_stage_units, unit_seconds[:, 0])
        backward_overlap = sum_units(units.first_stage_units, unit_seconds[:, 1] + unit_seconds[:, 2])
        if not unit_seconds_are_exact:
            is_unbounded = PAIRED[units.schedule] | (candidates.zero == 3)[:, None]
            forward_overlap = np.where(is_unbounded, np.inf, forward_overlap)
            backward_overlap = np.where(is_unbounded, np.inf, backward_overlap)
        exposed_reduce = last_reduce + np.maximum(
            0.0, (reduces - last_reduce) / units.stages_per_rank - backward_overlap
        )
        exposed_gather = gathers
        if self.planner.job.stack.param_all_gather == "overlapped":
            exposed_gather = first_gather + np.maximum(
                0.0, (gathers - first_gather) / units.stages_per_rank - forward_overlap
            )
        overlapped = gathers + reduces - exposed_gather - exposed_reduce
        return np.asarray(
            exposed_gather + exposed_reduce + copies + self.planner.units.contention * np.maximum(0.0, overlapped)
        )

    def resting_bytes(self) -> Floats:
        """Return the bytes of every partial layout for any recomputation, schedule, ZeRO stage and order.

        The rank with the highest peak holds at least 1/pp of all states and gradients.
        """
        return np.asarray(self.estimates.resting_bytes(self._pick_first_candidates()) / self.partials.pp)

    def floor(self, *, max_sequences: int, complete: bool = True) -> Floats:
        """Return a lower bound in seconds like ``resting_bytes``: the busiest rank does at least 1/pp of the work.

        ``max_sequences`` and ``complete`` as in ``Estimates``.
        """
        partials = self.partials
        micro_batches = self.micro_batches
        candidates = self._pick_first_candidates()
        seconds = self.estimates.model_seconds(candidates, max_sequences=max_sequences, complete=complete)
        unpaired, paired = seconds[:, :, 0].T
        pairs = self.space.pairs & (partials.pp > 1) & (micro_batches >= 2 * partials.pp)
        return np.asarray(micro_batches / partials.pp * np.where(pairs, paired, unpaired) * SAFE)

    def _pick_first_candidates(self) -> CandidateLayouts:
        """Return one candidate of each partial layout."""
        index = np.arange(len(self.partials.dp))
        zeros = np.zeros(len(self.partials.dp), np.int64)
        shape = np.searchsorted(self.space.shape_pp, self.partials.pp)
        return CandidateLayouts(index, shape, zero=zeros, shards=zeros + 1, order=zeros, equal=zeros + 1)

    def pipelines(self, candidates: CandidateLayouts, *, any_recomputation: bool = False) -> PipelineUnits:
        """Return the candidates' pipelines, one row per candidate.

        ``any_recomputation``: a bound for every recomputation, which assumes none.
        """
        recompute_every = self.recompute_every[self.partials.ac[candidates.partial]] * (not any_recomputation)
        _, first, inverse = factorize(candidates.shape * 1000 + recompute_every)
        keys = zip(candidates.shape[first].tolist(), recompute_every[first].tolist(), strict=True)
        return self._pipelines.take([(self.space.shapes[shape], every) for shape, every in keys], inverse)

    def _count_pipeline_units(self, key: tuple[PipelineShape, int]) -> PipelineUnits:
        """Return the units of a pipeline by its shape and ``recompute_every``."""
        shape, recompute_every = key
        return count_pipeline_units(
            self.planner.counts, shape, recompute_every=recompute_every, runs=self.estimates.runs
        )


def _split_into_parts(total: Floats, *, work: Floats, exposed: Floats, ends: Floats, update: Floats) -> Floats:
    """Return the seconds of a rank by ``TIME_PARTS`` [n, parts]; its bubble is what remains of ``total`` [n].

    ``work`` [n]: all micro-batches with their messages; ``exposed`` [n, axes]: of these, messages that compute does not
    cover; ``ends`` [n]: messages of data parallelism at the ends of a step.
    """
    parts = np.empty((len(total), len(TIME_PARTS)))
    parts[:, 1:5] = exposed
    parts[:, 0] = np.maximum(0.0, work - parts[:, 1:5].sum(axis=1)) + update
    parts[:, 4] += ends
    parts[:, 5] = np.maximum(0.0, total - parts[:, :5].sum(axis=1))
    return parts


def _update_slope(planner: Planner) -> float:
    """Return the seconds per updated element, as the update is linear in them; 0 (no bound) on a calibrated machine."""
    if planner.machine.calibration is not None:
        return 0.0
    sizes, empty = (10**6, 10**9), RankMemory(0, 0, 0, 0, 0, "", 0, 0)
    small, large = (
        estimate_elementwise_seconds(planner.units, Layout(), empty._replace(updated_numel=size), ()) for size in sizes
    )
    return (large - small) / (sizes[1] - sizes[0]) * (1 - 1e-6)

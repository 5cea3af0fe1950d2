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
from fivefold.planner.search.columns import CandidateLayouts, Floats, PartialLayouts
from fivefold.planner.search.estimates import Estimates
from fivefold.planner.search.memory_bounds import MemoryBounds
from fivefold.planner.search.shapes import (
    BOTH_WAYS,
    NEVER,
    PAIRED,
    SPLIT,
    PipelineUnits,
    bound_last_wgrads,
    pipeline_units,
    sum_units,
)
from fivefold.planner.search.space import Space
from fivefold.planner.search.work import SearchWork
from fivefold.planner.time.unit_overlap import overlaps_next_forward
from fivefold.planner.time.update_time import elementwise_seconds

SAFE = 1 - 1e-9  # rounding: the planner sums in another order
TIME_PARTS = ("compute", "tp", "cp", "ep", "dp", "bubble")


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
        samples = [Layout(ac=ac) for ac in space.recomputations]
        self.every = np.array([sample.recompute_every if sample.recomputed_operations else NEVER for sample in samples])
        self._pipelines: dict[tuple[int, int], PipelineUnits] = {}
        self._memory = MemoryBounds(planner.counts, space.shapes)
        self.update_slope = _update_slope(planner)

    def restrict_to(self, partials: PartialLayouts) -> Bounds:
        """Return the bounds of other partial layouts, which reuse what is known already."""
        restricted = copy(self)
        restricted.estimates, restricted.partials = self.estimates.restrict_to(partials), partials
        restricted.micro_batches = self.space.micro_batches(partials)
        return restricted

    def memory(
        self, candidates: CandidateLayouts, *, states: Floats | None = None, limit: bool = False, bare: bool = False
    ) -> Floats:
        """Return the peak bytes per rank [n], which do not depend on the mesh order.

        ``states``: instead of those of the candidates' ZeRO stage; ``limit`` as in ``Estimates``; ``bare``: for every
        recomputation.
        """
        partial, every = candidates.partial, self.every[self.partials.ac[candidates.partial]]
        return self._memory.peak(
            candidates,
            self.estimates,
            micro_batches=self.micro_batches[partial],
            every=np.full_like(every, NEVER) if bare else every,
            states=states,
            limit=limit,
            bare=bare,
        )

    def seconds_of_any_order(
        self, candidates: CandidateLayouts, *, most: int = 1, bare: bool = False
    ) -> tuple[Floats, Floats]:
        """Return a lower bound like ``seconds`` for every order and ZeRO stage; ``most`` as in ``Estimates``.

        With ``bare`` the bound also holds for every recomputation.
        """
        unit = self.estimates.adjacent_units(candidates, most=most, bare=bare)
        return self._seconds(candidates, unit, bare=bare)

    def seconds_of_adjacent_units(self, candidates: CandidateLayouts) -> tuple[Floats, Floats]:
        """Return a lower bound like ``seconds``, for which only data-parallel groups are those of the order."""
        unit, parallel = self.estimates.adjacent_units(candidates), self.estimates.parallel(candidates)
        return self._seconds(candidates, unit, parallel)

    def seconds(self, candidates: CandidateLayouts) -> tuple[Floats, Floats]:
        """Return the seconds [n] of the slowest of three ranks, and the same by ``TIME_PARTS`` [n, parts]."""
        parallel = self.estimates.parallel(candidates)
        return self._seconds(candidates, self.estimates.units(candidates), parallel, placed=True)

    def _seconds(
        self,
        candidates: CandidateLayouts,
        unit: Floats,
        parallel: Floats | None = None,
        *,
        placed: bool = False,
        bare: bool = False,
    ) -> tuple[Floats, Floats]:
        """Return the seconds of candidates in total and by ``TIME_PARTS``.

        ``placed``: the order is known, and so are halves of an FB. ``bare``: as if no layer were recomputed.
        """
        pipe, m = self.pipelines(candidates, bare=bare), self.micro_batches[candidates.partial][:, None].astype(float)
        weight, talk = unit[:, 2], np.zeros((len(m), 4, unit.shape[2]))
        (forward_dp, backward_dp), sent, ends, update = self.data_parallel(
            pipe, candidates, unit, parallel, placed=placed
        )
        forward, backward = unit[:, 0] + forward_dp, unit[:, 1] + backward_dp
        talk[:, :3], talk[:, 3] = unit[:, 3:6], forward_dp + backward_dp
        dual, split = np.isin(pipe.schedule, PAIRED), np.isin(pipe.schedule, SPLIT)
        share = np.where(np.isin(pipe.schedule, BOTH_WAYS), 0.5, 1.0) * m
        exposed_messages = np.stack([sum_units(pipe.held, talk[:, axis]) for axis in range(4)], axis=2)  # [n, 3, axes]
        work = sum_units(pipe.held, forward + backward + weight)
        paired = np.flatnonzero(dual[:, 0])
        if len(paired):
            paired_units = PipelineUnits._make(column[paired] for column in pipe)
            paired_candidates = candidates.take(paired)
            halves = self.estimates.pairs(paired_candidates) if placed else None
            shown = np.stack([forward_dp[paired], backward_dp[paired]])
            busy = self._paired_seconds(
                paired_units, m[paired], unit[paired], halves, sent=sent[:, paired], shown=shown
            )
            work[paired] = busy / share[paired]
        way, back = sum_units(pipe.before, forward), sum_units(pipe.before, backward)
        back += np.where(split | dual, 0.0, sum_units(pipe.before, weight))
        hops = np.zeros_like(way)
        if placed:
            delay, sending = self.estimates.stage_message_seconds(candidates).T[:, :, None]
            way, back = way + pipe.first * (delay + sending), back + pipe.first * (delay + sending)
            hops = 2 * pipe.chunks * sending
        own = way + share * (work + hops) + ends + update
        lead = sum_units(pipe.lead, weight)  # W may run while the last backward goes to rank 0
        late = bound_last_wgrads(pipe, lead, sum_units(pipe.held, weight) - lead)
        there = way + share * (work + hops) - late + back + (ends + update)[:, :1]
        total = np.maximum(own, there)
        rank = total.argmax(axis=1)
        at = np.arange(len(rank)), rank
        parts = np.empty((len(rank), len(TIME_PARTS)))
        parts[:, 1:5] = share[at][:, None] * exposed_messages[at]
        parts[:, 0] = np.maximum(0.0, (share * work)[at] - parts[:, 1:5].sum(axis=1)) + update[at]
        parts[:, 4] += ends[at]
        parts[:, 5] = np.maximum(0.0, total[at] - parts[:, :5].sum(axis=1))
        return total[at] * SAFE, parts

    def data_parallel(
        self,
        pipe: PipelineUnits,
        candidates: CandidateLayouts,
        unit: Floats,
        parallel: Floats | None,
        *,
        placed: bool = True,
    ) -> tuple[Floats, Floats, Floats, Floats]:
        """Return ``_exposed_seconds``, ``_data_parallel_seconds``, ``_end_seconds``, and seconds [n, 3] of the update.

        Without ``parallel`` only the update is counted. ``placed``: ``unit`` is no lower bound.
        """
        states = self.estimates.min_states(candidates) if parallel is None else self.estimates.states(candidates)
        update = sum_units(pipe.held, states[:, 4]) * self.update_slope
        if parallel is None:
            nothing = np.zeros((2, len(unit), unit.shape[2]))
            return nothing, nothing, np.zeros_like(update), update
        sent = self._data_parallel_seconds(candidates, parallel)
        ends = self._end_seconds(pipe, candidates, unit, parallel, placed=placed)
        return self._exposed_seconds(sent, unit), sent, ends, update

    def _paired_seconds(
        self, pipe: PipelineUnits, m: Floats, unit: Floats, halves: Floats | None, *, sent: Floats, shown: Floats
    ) -> Floats:
        """Return the busy seconds [n, 3] of ranks under a schedule with FB: pairs, and the passes that remain unpaired.

        ``halves``: of ``Estimates.pairs``; ``sent``, ``shown``: of ``_data_parallel_seconds`` and ``_exposed_seconds``.
        """
        exposed = unit[:, 3:6].sum(axis=1)
        front, back = unit[:, 0] - unit[:, 6], unit[:, 1] + unit[:, 2] - (exposed - unit[:, 6])
        near, far = pipe.lead, pipe.held - pipe.lead
        half = np.where(np.isin(pipe.schedule, BOTH_WAYS), 2, 1)
        ranks, bound, place = pipe.pp // half, m / half, np.minimum(pipe.rank, pipe.pp - 1 - pipe.rank)
        place = np.where(half == 2, place, pipe.rank)
        middle = bound - 2 * ranks + place + 1  # layout/schedule/v_shaped.py
        busy = np.zeros(pipe.rank.shape)
        for forward_units, backward_units, pairs in (
            (near, far, middle - (place == ranks - 1)),
            (far, near, middle + ranks - 1 - place),
        ):
            compute = sum_units(forward_units, front) + sum_units(backward_units, back)
            unpaired = paired = sum_units(forward_units, unit[:, 0]) + sum_units(
                backward_units, unit[:, 1] + unit[:, 2]
            )
            if halves is None:
                # Of units as slow as the host, messages shorten the compute: then an FB takes at least half of both.
                kernels, overlappable = (
                    sum_units(forward_units, unit[:, at]) + sum_units(backward_units, unit[:, at + 1]) for at in (7, 9)
                )
                paired = np.maximum(np.maximum(kernels, overlappable), unpaired / 2)
            elif self.planner.machine.backend != "gloo":  # else one after the other
                stays, overlappable, hidden = (
                    sum_units(forward_units, halves[:, at]) + sum_units(backward_units, halves[:, 3 + at])
                    for at in range(3)
                )
                slowed = np.maximum(0.0, np.minimum(compute, overlappable) - hidden)
                paired = np.maximum(compute, overlappable) + stays
                if self.planner.units.overlaps:
                    units = front + halves[:, 0], back + halves[:, 3]
                    longer, shorter = (
                        sum_units(forward_units, limit(units[0], sent[0]))
                        + sum_units(backward_units, limit(units[1], sent[1]))
                        for limit in (np.maximum, np.minimum)
                    )
                    paired, slowed = np.maximum(paired, longer), slowed + shorter
                else:
                    paired += sum_units(forward_units, sent[0]) + sum_units(backward_units, sent[1])
                paired += self.planner.units.constants.hidden_message_slowdown * slowed
            unpaired = unpaired + sum_units(forward_units, shown[0]) + sum_units(backward_units, shown[1])
            busy += pairs * paired + (bound - pairs) * unpaired
        return busy

    def _data_parallel_seconds(self, candidates: CandidateLayouts, parallel: Floats) -> Floats:
        """Return the seconds [2, n, units] of ZeRO-3's gathers and of reductions in every micro-batch.

        The first axis is the forward and the backward of each unit.
        """
        often = self.estimates.reduces_often(candidates)[:, None]
        stage3 = ((candidates.zero == 3) & (candidates.shards > 1))[:, None]
        gather, regathers = np.where(stage3, parallel[:, 0], 0.0), np.ones(parallel.shape[2])
        regathers[:2] = 0
        regathers *= self.planner.job.stack.reshard == "forward"
        reductions = np.where(often, parallel[:, 1], 0.0)
        reductions[:, 0] = 0  # may overlap with the next forward
        return np.stack([gather, gather * regathers + reductions])

    def _exposed_seconds(self, sent: Floats, unit: Floats) -> Floats:
        """Return exposed seconds of ``_data_parallel_seconds``, and those by which overlap slows compute."""
        if not self.planner.units.overlaps:
            return sent
        hidden = np.minimum(sent, np.stack([unit[:, 0], unit[:, 1] + unit[:, 2]]))
        return np.asarray(sent - (1 - self.planner.units.contention) * hidden)

    def _end_seconds(
        self, pipe: PipelineUnits, candidates: CandidateLayouts, unit: Floats, parallel: Floats, *, placed: bool
    ) -> Floats:
        """Return the exposed seconds [n, 3] at the ends of a step.

        They are reductions after the last backward, and gathers before the first forward. Not ``placed``: units may
        take longer than ``unit`` without a longer step, where passes are paired or wait for gathers; then they are
        taken to overlap with everything.
        """
        stays = ((candidates.zero < 3) | (candidates.shards == 1))[:, None]
        if self.planner.job.stack.zero2_shards == "separate":  # ZeRO-2 without a pipeline gathers as ZeRO-3 does
            stays &= ((candidates.zero != 2) | (self.partials.take(candidates.partial).pp > 1))[:, None]
        gather = np.where(stays, parallel[:, 0], 0.0)
        reduce = np.where(self.estimates.reduces_often(candidates)[:, None], 0.0, parallel[:, 1])
        if self.planner.job.stack.param_all_gather == "broadcast":  # no bound for it
            gather = np.zeros_like(gather)
        gathers, reduces, copies = (
            sum_units(pipe.held, seconds_part) for seconds_part in (gather, reduce, parallel[:, 2])
        )
        if not self.planner.units.overlaps:
            return gathers + reduces + copies
        first, last, part = (
            np.take_along_axis(column, pipe.start, axis=1) for column in (gather, reduce, parallel[:, 1])
        )
        # Of reductions in every micro-batch the last one comes after its own backward, which is as long or hides it.
        backward_compute = unit[:, 1] + unit[:, 2] - (unit[:, 3:6].sum(axis=1) - unit[:, 6])
        if overlaps_next_forward("embed", self.planner.job):
            backward_compute[:, 0] = np.inf
        often = self.estimates.reduces_often(candidates)[:, None]
        copies += np.where(often, np.minimum(part, np.take_along_axis(backward_compute, pipe.start, axis=1)), 0.0)
        forward_overlap, backward_overlap = (
            sum_units(pipe.lead, unit[:, 0]),
            sum_units(pipe.lead, unit[:, 1] + unit[:, 2]),
        )
        if not placed:
            slack = np.isin(pipe.schedule, PAIRED) | ((candidates.zero == 3) & (candidates.shards > 1))[:, None]
            forward_overlap, backward_overlap = (
                np.where(slack, np.inf, forward_overlap),
                np.where(slack, np.inf, backward_overlap),
            )
        exposed_reduce = last + np.maximum(0.0, (reduces - last) / pipe.chunks - backward_overlap)
        exposed_gather = gathers
        if self.planner.job.stack.param_all_gather == "overlapped":
            exposed_gather = first + np.maximum(0.0, (gathers - first) / pipe.chunks - forward_overlap)
        overlapped = gathers + reduces - exposed_gather - exposed_reduce
        return np.asarray(
            exposed_gather + exposed_reduce + copies + self.planner.units.contention * np.maximum(0.0, overlapped)
        )

    def resting_bytes(self) -> Floats:
        """Return the bytes of every partial layout for any recomputation, schedule, ZeRO stage and order.

        The rank with the highest peak holds at least 1/pp of all states and gradients.
        """
        return np.asarray(self.estimates.resting_bytes(self._first_candidates()) / self.partials.pp)

    def floor(self, *, most: int, complete: bool = True) -> Floats:
        """Return a lower bound in seconds like ``resting_bytes``; ``most`` and ``complete`` as in ``Estimates``.

        The busiest rank does at least 1/pp of the work.
        """
        s, m, some = self.partials, self.micro_batches, self._first_candidates()
        seconds = self.estimates.model_seconds(some, most=most, complete=complete)
        alone, paired = seconds[:, :, 0].T
        pairs = self.space.pairs & (s.pp > 1) & (m >= 2 * s.pp)
        return np.asarray(m / s.pp * np.where(pairs, paired, alone) * SAFE)

    def _first_candidates(self) -> CandidateLayouts:
        """Return one candidate of each partial layout."""
        number, zeros = np.arange(len(self.partials.dp)), np.zeros(len(self.partials.dp), np.int64)
        return CandidateLayouts(number, np.searchsorted(self.space.shape_pp, self.partials.pp), zeros, zeros + 1, zeros)

    def pipelines(self, candidates: CandidateLayouts, *, bare: bool = False) -> PipelineUnits:
        """Return the candidates' pipelines, one row per candidate; ``bare``: with no layer recomputed."""
        every = self.every[self.partials.ac[candidates.partial]] * (not bare)
        _, first, inverse = np.unique(candidates.shape * 1000 + every, return_index=True, return_inverse=True)
        pipelines = []
        for at in first:
            key = int(candidates.shape[at]), int(every[at])
            if key not in self._pipelines:
                shape = self.space.shapes[key[0]]
                self._pipelines[key] = pipeline_units(
                    self.planner.counts, shape, every=key[1], runs=self.estimates.runs
                )
            pipelines.append(self._pipelines[key])
        return PipelineUnits(*(np.stack(column)[inverse] for column in zip(*pipelines, strict=True)))


def _update_slope(planner: Planner) -> float:
    """Return the seconds per updated element, as the update is linear in them; 0 (no bound) on a calibrated machine."""
    if planner.machine.calibration is not None:
        return 0.0
    sizes, empty = (10**6, 10**9), RankMemory(0, 0, 0, 0, 0, "", 0)
    small, large = (
        elementwise_seconds(planner.units, Layout(), empty._replace(updated_numel=size), ()) for size in sizes
    )
    return (large - small) / (sizes[1] - sizes[0]) * (1 - 1e-6)

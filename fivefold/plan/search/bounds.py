"""Lower bounds on the memory and time that ``Planner.estimate`` returns, for many layouts at once (numpy columns).

    memory ≥ states + live micro-batches x what a stage's layers keep + the backward of one unit
    time   ≥ forward up to the rank + m · its work + backward down from it + exposed reductions + update

computed for three ranks of each pipeline, of which the maximum is taken. The tests compare with ``estimate``.
"""

from __future__ import annotations

import numpy as np

from fivefold.layout.spec import Layout
from fivefold.plan.count.memory.allocator import room_bytes
from fivefold.plan.count.memory.rank_memory import RankMemory
from fivefold.plan.predict import Planner
from fivefold.plan.search.estimates import Estimates, Floats
from fivefold.plan.search.shapes import DUAL, LOOP, NEVER, SPLIT, PipelineUnits, live_micro_batches, pipeline_units
from fivefold.plan.search.space import CandidateLayouts, Space

SAFE = 1 - 1e-9  # rounding: the planner sums in another order
PARTS = ("compute", "tp", "cp", "ep", "dp", "bubble")


class Bounds:
    """Lower bounds for the layouts of one space under one planner. Arrays are [n] for n candidates unless stated."""

    def __init__(self, planner: Planner, space: Space) -> None:
        self.planner, self.space, self.estimates = planner, space, Estimates(planner, space)
        self.partials = space.partials
        self.micro_batches = space.micro_batches(self.partials)
        samples = [Layout(ac=ac) for ac in space.recomputations]
        self.every = np.array([sample.recompute_every if sample.recomputed else NEVER for sample in samples])
        self._pipelines: dict[tuple[int, int], PipelineUnits] = {}
        self.update_slope = _update_slope(planner)

    def memory(self, candidates: CandidateLayouts, *, states: Floats | None = None, limit: bool = False) -> Floats:
        """Peak bytes of the fullest rank [n], which do not depend on the mesh order.

        ``states``: instead of those of the candidates' ZeRO stage; ``limit`` as in ``Estimates``.
        """
        pipe, m = self.pipelines(candidates), self.micro_batches[candidates.partial]
        kept, above, apart = np.moveaxis(self.estimates.profiles(candidates, limit=limit), 1, 0)
        rest, during, ends, gathered, _ = np.moveaxis(
            self.estimates.states(candidates) if states is None else states, 1, 0
        )
        base, last = _over(pipe.held, rest), _over(pipe.held, ends)
        alone = pipe.pp == 1
        whole = np.where(alone & (m[:, None] == 1), 0.0, _over(pipe.held, during))
        split = np.isin(pipe.schedule, SPLIT)
        above = np.where(split[:, :1], np.maximum(0.0, apart), above)
        count, one = live_micro_batches(pipe, m), pipe.chunks == 1
        head = np.where(one, pipe.least[:, :, 1] * kept[:, None, 1], 0.0)
        least = pipe.least.copy()
        least[:, :, 1] = 0
        body = count * _over(least, kept)
        inside = np.where(pipe.held[:, :, 2:] > 0, (above + gathered)[:, None, 2:], np.inf).min(axis=2)
        inside = np.where(np.isfinite(inside), inside, 0.0)
        loss = np.where(pipe.held[:, :, 1] > 0, above[:, None, 1] + head, 0.0)
        # In the last of two micro-batches the head's gradients are reduced before the blocks' backward.
        gone = np.where(alone & (m[:, None] == 2), np.maximum(0.0, during - ends)[:, None, 1], 0.0)
        # A rank has all gradient sums and the most live micro-batches at once only if more micro-batches follow the
        # first backward of each stage; else one fewer with one stage, and at least one with several.
        deep = alone | np.where(one, m[:, None] > count, (m[:, None] > 2 * pipe.pp))
        fewer = np.where(deep, count, np.where(one, np.maximum(1, count - 1), 1))
        # No gradient is reduced before all sums are allocated, except with interleaved stages.
        stays = ((candidates.zero < 2) | (candidates.shards == 1))[:, None] | (pipe.schedule != LOOP)
        sure = alone | deep | (stays & (m[:, None] > 2))
        late = np.where(deep | one, np.maximum(inside - gone, loss), inside)
        born = late + np.where(sure, whole, 0.0) + fewer * _over(least, kept) + (fewer - 1) * head
        full = base + np.maximum(born, np.maximum(inside - gone, loss) + body + (count - 1) * head)
        first = np.where(alone, last - ends[:, None, 0] - ends[:, 2:].max(axis=1)[:, None] + inside, last)
        return np.asarray(np.maximum(full, base + np.maximum(last, first)).max(axis=1))

    def without_messages(self, candidates: CandidateLayouts, *, limit: bool = False) -> Floats:
        """Seconds [n] without any message, for every ZeRO stage and order; ``limit`` as in ``Estimates``."""
        return self._seconds(candidates, self.estimates.kernels(candidates, limit=limit), None)[0]

    def without_zero(self, candidates: CandidateLayouts) -> tuple[Floats, Floats]:
        """As ``seconds``, for every ZeRO stage: without the messages of data parallelism."""
        return self._seconds(candidates, self.estimates.units(candidates), None)

    def seconds(self, candidates: CandidateLayouts) -> tuple[Floats, Floats]:
        """Seconds [n] of the slowest of three ranks, and the same by ``PARTS`` [n, parts]."""
        return self._seconds(candidates, self.estimates.units(candidates), self.estimates.parallel(candidates))

    def _seconds(self, candidates: CandidateLayouts, unit: Floats, parallel: Floats | None) -> tuple[Floats, Floats]:
        pipe, m = self.pipelines(candidates), self.micro_batches[candidates.partial][:, None].astype(float)
        forward, backward, weight = unit[:, 0], unit[:, 1], unit[:, 2]
        talk = np.zeros((len(m), 4, unit.shape[2]))
        talk[:, :3] = unit[:, 3:6]
        fronts = unit[:, 6]
        ends = np.zeros(pipe.rank.shape)
        if parallel is not None:
            ends = self._ends(pipe, candidates, unit, parallel)
            ahead, behind = self._gathers(candidates, unit, parallel)
            forward, backward = forward + ahead, backward + behind
            talk[:, 3] = ahead + behind
        states = self.estimates.lightest(candidates) if parallel is None else self.estimates.states(candidates)
        update = _over(pipe.held, states[:, 4]) * self.update_slope
        dual, split = np.isin(pipe.schedule, DUAL), np.isin(pipe.schedule, SPLIT)
        share = np.where(pipe.schedule == DUAL[0], 0.5, 1.0) * m
        said = np.stack([_over(pipe.held, talk[:, axis]) for axis in range(4)], axis=2)  # [n, 3, axes]
        whole = forward + backward + weight
        work, hides = _over(pipe.held, whole), np.array([axis in self.planner.job.stack.overlap for axis in PARTS[1:4]])
        # With FB a micro-batch takes at least the longer of compute and messages, of which half of both directions and
        # the smaller one are counted, to stay below. Messages of axes that do not overlap count in full.
        every = talk[:, :3][:, hides].sum(axis=1)
        least = np.minimum(fronts, every - fronts) if hides.all() else np.zeros_like(every)
        beside = said[:, :, :3][:, :, ~hides].sum(axis=2) + np.maximum(
            work - said[:, :, :3].sum(axis=2), _over(pipe.held, every / 2 + least)
        )
        work = np.where(dual, beside, work)
        way = _over(pipe.before, forward)
        own = way + share * work + ends + update
        late = np.where(split, _over(pipe.held, weight), 0.0)  # W may run while the last backward goes to rank 0
        back = np.where(dual, 0.0, _over(pipe.before, backward) + np.where(split, 0.0, _over(pipe.before, weight)))
        there = way + share * (work - late) + back + (ends + update)[:, :1]
        total = np.maximum(own, there)
        rank = total.argmax(axis=1)
        at = np.arange(len(rank)), rank
        parts = np.empty((len(rank), len(PARTS)))
        parts[:, 1:5] = share[at][:, None] * said[at]
        parts[:, 0] = np.maximum(0.0, (share * work)[at] - parts[:, 1:5].sum(axis=1)) + update[at]
        parts[:, 4] += ends[at]
        parts[:, 5] = np.maximum(0.0, total[at] - parts[:, :5].sum(axis=1))
        return total[at] * SAFE, parts

    def _gathers(self, candidates: CandidateLayouts, unit: Floats, parallel: Floats) -> tuple[Floats, Floats]:
        """Exposed seconds of ZeRO-3's gathers, and of reductions in every micro-batch, in a forward and in a backward
        of each unit, [n, units] each.
        """
        each = self.estimates.each(candidates)[:, None]
        stage3 = ((candidates.zero == 3) & (candidates.shards > 1))[:, None]
        gather, twice = np.where(stage3, parallel[:, 0], 0.0), np.ones(parallel.shape[2])
        twice[:2] = 0
        twice *= self.planner.job.stack.reshard == "forward"
        behind = np.where(each, parallel[:, 1], 0.0)
        behind[:, 0] = 0  # may travel beside the next forward
        back = gather * twice + behind
        if self.planner.timeline.beside:
            gather = np.maximum(0.0, gather - unit[:, 0])
            back = np.maximum(0.0, back - unit[:, 1] - unit[:, 2])
        return gather, back

    def _ends(self, pipe: PipelineUnits, candidates: CandidateLayouts, unit: Floats, parallel: Floats) -> Floats:
        """Exposed seconds [n, 3] of reductions after the last backward and of gathers before the first forward."""
        stays = ((candidates.zero < 3) | (candidates.shards == 1))[:, None]
        gather = np.where(stays, parallel[:, 0], 0.0)
        reduce = np.where(self.estimates.each(candidates)[:, None], 0.0, parallel[:, 1])
        if self.planner.job.stack.weights == "broadcast":  # no bound for it
            gather = np.zeros_like(gather)
        gathers, reduces = _over(pipe.held, gather), _over(pipe.held, reduce)
        if not self.planner.timeline.beside:
            return gathers + reduces
        first = np.take_along_axis(gather, pipe.start, axis=1)
        last = np.take_along_axis(reduce, pipe.start, axis=1)
        ahead, behind = _over(pipe.lead, unit[:, 0]), _over(pipe.lead, unit[:, 1] + unit[:, 2])
        late = last + np.maximum(0.0, (reduces - last) / pipe.chunks - behind)
        if self.planner.job.stack.weights != "ahead":
            return np.asarray(late + gathers)
        return np.asarray(late + first + np.maximum(0.0, (gathers - first) / pipe.chunks - ahead))

    def floor(self, *, timed: bool = True) -> tuple[Floats, Floats]:
        """Bytes and seconds of every partial layout, for every schedule, ZeRO stage and order; with ``timed`` seconds
        of those that may fit, else 0.

        Every rank has at least the fewest blocks of any; one rank has min(m, pp) live micro-batches of them; the
        busiest does at least 1/pp of the work.
        """
        s, m = self.partials, self.micro_batches
        number = np.arange(len(m))
        shape = np.searchsorted(self.space.shape_pp, s.pp)
        candidates = CandidateLayouts(number, shape, np.zeros_like(number), np.ones_like(number), np.zeros_like(number))
        layers = self.planner.counts.model.layers
        fewest = np.full(layers + 1, layers)
        for each in self.space.shapes:
            fewest[each.pp] = min(fewest[each.pp], each.v * (layers // (each.pp * each.v)))
        size = fewest[s.pp] * self.estimates.lightest(candidates)[:, 0, 2:].min(axis=1)
        seconds = np.zeros(len(m))
        at = np.flatnonzero(size <= room_bytes(self.planner.machine))
        if len(at):
            rounds = fewest[s.pp[at]] * np.minimum(m[at], s.pp[at])
            size[at] += rounds * self.estimates.profiles(candidates.take(at), limit=True)[:, 0, 2:].min(axis=1)
        at = np.flatnonzero(size <= room_bytes(self.planner.machine))
        if timed and len(at):
            alone = candidates.take(at)._replace(shape=np.zeros(len(at), np.int64))
            kernels = self.estimates.kernels(alone, limit=True)[:, :3]
            whole = np.einsum("nu,nku->n", self.pipelines(alone).held[:, 0], kernels)
            seconds[at] = m[at] * whole / s.pp[at] * SAFE
        return size, seconds

    def pipelines(self, candidates: CandidateLayouts) -> PipelineUnits:
        """The candidates' pipelines, one row per candidate."""
        every = self.every[self.partials.ac[candidates.partial]]
        _, first, inverse = np.unique(candidates.shape * 1000 + every, return_index=True, return_inverse=True)
        found = []
        for at in first:
            key = int(candidates.shape[at]), int(every[at])
            if key not in self._pipelines:
                shape = self.space.shapes[key[0]]
                self._pipelines[key] = pipeline_units(
                    self.planner.counts, shape, every=key[1], runs=self.estimates.runs
                )
            found.append(self._pipelines[key])
        return PipelineUnits(*(np.stack(column)[inverse] for column in zip(*found, strict=True)))


def _over(counts: Floats, each: Floats) -> Floats:
    """Sums over units, weighted by their counts: [n, 3, units] x [n, units] → [n, 3]."""
    return np.asarray(np.einsum("npu,nu->np", counts, each))


def _update_slope(planner: Planner) -> float:
    """Seconds per updated element, as the update is linear in them; 0 (no bound) on a calibrated machine."""
    if planner.machine.calibration is not None:
        return 0.0
    sizes, empty = (10**6, 10**9), RankMemory(0, 0, 0, 0, 0, "", 0)
    small, large = (planner.timeline.update(Layout(), empty._replace(updated=size)) for size in sizes)
    return (large - small) / (sizes[1] - sizes[0]) * (1 - 1e-6)

"""The planner's figures for many layouts at once, computed once for each distinct way to cut, place and shard a unit.

    columns of integers → distinct keys → ``Counts``, ``Units``, ``Timeline`` → a vector over units → gathered by row

The units are embedding, head, and each kind of block with and without recomputation, in the order of ``runs``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from fivefold.layout.mesh import group
from fivefold.layout.sharding import policy
from fivefold.layout.spec import Layout
from fivefold.plan.count.counts import Name, Run, apart, run_part
from fivefold.plan.count.operations.part import part_of
from fivefold.plan.predict import Planner
from fivefold.plan.search.columns import Ints
from fivefold.plan.search.space import CandidateLayouts, Space

Floats = NDArray[np.float64]
MANY = 2**20  # sequences of a micro-batch so large that rounding per sequence vanishes


class Estimates:
    """Figures for the layouts of one space under one planner: arrays [n candidates, figures, units]."""

    def __init__(self, planner: Planner, space: Space) -> None:
        self.planner, self.space, self.counts = planner, space, planner.counts
        self.partials = space.partials
        example = self.counts.example
        self.runs = [Run("embed", 0, 1), Run("head", 0, 1, self.counts.model.mtp is not None)]
        self.runs += [Run(kind, first, 1, again) for kind, first in example.items() for again in (False, True)]
        samples = [Layout(ac=ac) for ac in space.recomputations]
        distinct = list(dict.fromkeys(sample.recomputed for sample in samples))
        self._recomputed = np.array([distinct.index(sample.recomputed) for sample in samples])
        shapes = [Layout(pp=each.pp, v=each.v, schedule=each.schedule) for each in space.shapes]
        self._apart = np.array([apart(shape) for shape in shapes]).astype(np.int64)
        self._tables: dict[str, dict[tuple[int, ...], Floats]] = {}

    def each(self, candidates: CandidateLayouts) -> NDArray[np.bool_]:
        """Whether gradients are reduced after every backward, [n]."""
        s, job = self.partials.take(candidates.partial), self.planner.job
        several = job.global_batch // (s.dp * s.mbs) > 1
        often = {"step": False, "micro_batch": True}.get(job.stack.reduce, s.pp == 1)
        return np.asarray((candidates.zero >= 2) & (candidates.shards > 1) & several & often)

    def profiles(self, candidates: CandidateLayouts, *, limit: bool = False) -> Floats:
        """[n, (kept, backward peak above it, that of a split backward), units] bytes.

        ``limit``: scaled from a micro-batch of MANY sequences, a lower bound since rows and waves round up.
        """

        def make(layout: Layout) -> Floats:
            part = part_of(layout)._replace(sequences=MANY if limit else layout.mbs)
            rows = []
            for run in self.runs:
                mine, name = run_part(part, run), self._alike(run.name)
                whole, split = self.counts.profile(mine, name), self.counts.split(mine, name)
                peaks = whole.backward_peak_bytes, split.backward_peak_bytes
                rows.append((whole.kept_bytes, *(peak - whole.kept_bytes for peak in peaks)))
            return np.array(rows, float).T

        return self._per_sequence("profiles", candidates, make, limit=limit)

    def lightest(self, candidates: CandidateLayouts) -> Floats:
        """As ``states``, the minimum over ZeRO stages and shard groups."""
        s = self.partials.take(candidates.partial)
        replicas = s.dp * s.cp
        whole = self.states(candidates._replace(zero=np.zeros_like(replicas), shards=np.ones_like(replicas)))
        least = self.states(candidates._replace(zero=np.where(replicas > 1, 3, 0), shards=replicas))
        found = np.minimum(whole, least)
        found[:, 3] = 0
        return found

    def states(self, candidates: CandidateLayouts) -> Floats:
        """[n, (at rest, gradients between micro-batches, gradients at the update, gathered weights, updated), units]:
        bytes, and elements of the last.
        """
        s = self.partials.take(candidates.partial)
        columns = [
            s.tp,
            s.inner,
            s.ep,
            s.etp,
            candidates.zero,
            candidates.shards,
            s.dp * s.cp,
            self._apart[candidates.shape],
        ]
        columns += [self.each(candidates).astype(np.int64)]

        def make(layout: Layout) -> Floats:
            keeps, rows = policy(layout), []
            for run in self.runs:
                state = self.counts.states(layout, self._alike(run.name))
                ends = state.sums if keeps.gradients_stay else state.reduced
                rest = (state.whole if keeps.weights_stay else 0) + state.apart + state.moments
                during = ends if self.counts.reduces_each(layout) or keeps.gradients_stay else state.sums
                rows.append((rest, during, ends, 0 if keeps.weights_stay else state.whole, state.updated))
            return np.array(rows, float).T

        return self._table("states", candidates, columns, make)

    def kernels(self, candidates: CandidateLayouts, *, limit: bool = False) -> Floats:
        """[n, (forward, backward, weight, four zeros), units] seconds of kernels only; ``limit`` as in ``profiles``."""
        limit = limit and self.planner.machine.calibration is None

        def make(layout: Layout) -> Floats:
            part = part_of(layout)._replace(sequences=MANY if limit else layout.mbs)
            prices, rows = self.planner.units.prices(layout), []
            for run in self.runs:
                mine = run_part(part, run)
                heads, ops = self.counts.local(mine).heads, self.counts.unit(mine, run.name).ops
                times = [(op, prices.operation(op, heads=heads)) for op in ops]
                backward = sum(time.backward + (time.forward if op.recomputed else 0.0) for op, time in times)
                rows.append((sum(t.forward for _, t in times), backward, sum(t.weight for _, t in times), *[0] * 4))
            return np.array(rows, float).T

        return self._per_sequence("kernels", candidates, make, limit=limit)

    def units(self, candidates: CandidateLayouts) -> Floats:
        """[n, (forward, backward, weight, exposed tp, cp, ep, all exposed of the forward), units] seconds.

        Forward and backward include exposed messages.
        """
        columns = self._part(candidates) + self._places(candidates, ("tp", "cp", "ep", "etp"))

        def make(layout: Layout) -> Floats:
            rows = []
            for unit in (self.planner.units.unit(layout, run) for run in self.runs):
                tp, cp, ep, etp = (a + b for a, b in zip(unit.forward_exposed, unit.backward_exposed, strict=True))
                front, back = sum(unit.forward_exposed), sum(unit.backward_exposed)
                rows.append((unit.forward + front, unit.backward + back, unit.weight, tp, cp, ep + etp, front))
            return np.array(rows, float).T

        return self._table("units", candidates, columns, make)

    def parallel(self, candidates: CandidateLayouts) -> Floats:
        """[n, (gather, reduce), units] seconds of a unit's all-gather and of its reduction."""
        s = self.partials.take(candidates.partial)
        columns = [s.tp, s.inner, s.sp, s.ep, s.etp, candidates.shards, s.dp * s.cp, self._apart[candidates.shape]]
        columns += [self.each(candidates).astype(np.int64)]
        columns += self._places(candidates, ("shard", "replica", "expert_shard", "expert_replica"))

        def make(layout: Layout) -> Floats:
            found = [self.planner.timeline.data_parallel(layout, run.name) for run in self.runs]
            return np.array([(each.gather, each.reduce) for each in found], float).T

        return self._table("parallel", candidates, columns, make)

    def _per_sequence(
        self, name: str, candidates: CandidateLayouts, make: Callable[[Layout], Floats], *, limit: bool
    ) -> Floats:  # fmt: skip
        """``_table`` of figures that depend on ``_part``; ``limit``: made for MANY sequences and scaled to mbs."""
        if not limit:
            return self._table(name, candidates, self._part(candidates), make)
        scale = self.partials.mbs[candidates.partial] / MANY * (1 - 1e-3)  # MANY is finite
        found = self._table(f"{name} of many", candidates, self._part(candidates)[1:], make)
        return np.asarray(found * scale[:, None, None])

    def _alike(self, name: Name) -> Name:
        return name if isinstance(name, str) else self.counts.alike[name.alike]

    def _part(self, candidates: CandidateLayouts) -> list[Ints]:
        """The columns on which ``part_of`` depends."""
        s = self.partials.take(candidates.partial)
        return [s.mbs, s.cp, s.kind, s.tp, s.inner, s.sp, s.ep, s.etp, self._recomputed[s.ac]]

    def _places(self, candidates: CandidateLayouts, axes: Sequence[str]) -> list[Ints]:
        """Columns on which message times depend: ranks, stride (up to a node's size) and link of each group."""
        s = self.partials.take(candidates.partial)
        columns = [s.dp, s.tp, s.cp, s.pp, candidates.order]
        columns += [s.ep, s.etp] if self.counts.model.moe else []
        columns += [candidates.shards] if "shard" in axes else []
        links = self.planner.machine.links

        def make(layout: Layout) -> Floats:
            found: list[int] = []
            for ranks, stride in (group(layout, axis) for axis in axes):
                reach = (ranks - 1) * stride + 1
                tier = next((i for i, link in enumerate(links) if link.span >= reach), len(links) - 1)
                found += [ranks, *((min(stride, links[0].span), tier) if ranks > 1 else (0, 0))]
            return np.array(found, float)

        return list(self._table("places of " + axes[0], candidates, columns, make).astype(np.int64).T)

    def _table(
        self, name: str, candidates: CandidateLayouts, columns: list[Ints], make: Callable[[Layout], Floats]
    ) -> Floats:
        """``make(layout)`` for each row, called once per search for equal values of ``columns``."""
        known = self._tables.setdefault(name, {})
        _, first, inverse = np.unique(_code(columns), return_index=True, return_inverse=True)
        rows = []
        for at in first:
            key = tuple(int(column[at]) for column in columns)
            if key not in known:
                known[key] = make(self.space.layout(self.partials, candidates, int(at)))
            rows.append(known[key])
        return np.stack(rows)[inverse]

    def distinct(self, candidates: CandidateLayouts) -> Ints:
        """Indices without duplicates: of candidates whose order differs but not the place of any group, one."""
        axes = ("tp", "cp", "ep", "etp"), ("shard", "replica", "expert_shard", "expert_replica"), ("pp",)
        columns = [candidates.partial, candidates.shape, candidates.zero, candidates.shards]
        for some in axes:
            columns += self._places(candidates, some)
        return np.sort(np.unique(_code(columns), return_index=True)[1])


def _code(columns: Sequence[Ints]) -> Ints:
    """One integer per row, equal for rows with equal columns."""
    code = np.zeros(len(columns[0]), np.int64)
    size = 1
    for column in columns:
        values, inverse = (column, column) if column.max() < 1 << 12 else np.unique(column, return_inverse=True)
        radix = int(values.max() if inverse is column else len(values)) + 1
        if size * radix >= 1 << 62:
            _, code = np.unique(code, return_inverse=True)
            size = int(code.max()) + 1
        code, size = code * radix + inverse, size * radix
    return code

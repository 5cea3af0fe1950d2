"""Figures of candidates, made once for each distinct set of the columns on which they depend.

columns → one code per row → ``make`` for each new one → gathered by row
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Self

import numpy as np

from fivefold.layout.mesh import group
from fivefold.layout.spec import Layout, divisors
from fivefold.planner.predict import Planner
from fivefold.planner.search.columns import CandidateLayouts, Floats, Ints, PartialLayouts, factorize, map_distinct
from fivefold.planner.search.space import Space
from fivefold.planner.search.work import UNITS_PER_PLACE, SearchWork

LARGE_MICRO_BATCH = 2**20  # sequences of a micro-batch so large that rounding per sequence vanishes
SMALL_MICRO_BATCH = 6
ROUNDED = 1 - 1e-3  # of figures that are scaled from those of more: rows and waves round up
LADDER = (
    LARGE_MICRO_BATCH,
    256,
    32,
    SMALL_MICRO_BATCH,
)  # per sequence, a micro-batch takes no less than one of n sequences, a multiple of it

Table = dict[tuple[int, ...], Floats]


class Tables:
    """Tables by name for the layouts of one space under one planner."""

    def __init__(
        self, planner: Planner, space: Space, partials: PartialLayouts, *, known: Mapping[str, Table], work: SearchWork
    ) -> None:
        """Initialize the tables of ``partials``.

        ``known``: tables to reuse, of a job that differs only in how often gradients are reduced, which is a column.
        ``work``: counts what is computed.
        """
        self.planner, self.space, self.counts, self.partials = planner, space, planner.counts, partials
        self.work = work
        self.measured = planner.machine.calibration is not None
        samples = [Layout(ac=ac) for ac in space.recomputations]
        distinct = list(dict.fromkeys(sample.recomputed_operations for sample in samples))
        self._groups = distinct
        self._recomputed = np.array([distinct.index(sample.recomputed_operations) for sample in samples])
        self._tables = dict(known)

    def restrict_to(self, partials: PartialLayouts) -> Self:
        """Return the same figures for other partial layouts, computed once for all."""
        restricted = copy(self)
        restricted.partials = partials
        return restricted

    def _scale_table(
        self,
        name: str,
        candidates: CandidateLayouts,
        columns: list[Ints],
        make: Callable[[Layout, int], Floats],
        *,
        many: Ints,
        cost: int,
    ) -> Floats:
        """Return ``_table`` of figures of ``many`` sequences, scaled to mbs."""
        mbs = self.partials.mbs[candidates.partial]
        scaled = self._table(name, candidates, [many, *columns], make, cost=cost)
        scale = np.where(many == mbs, 1.0, mbs / many * np.where(many == LARGE_MICRO_BATCH, ROUNDED, 1.0))
        return np.asarray(scaled * scale[:, None, None])

    def _multiples(self, candidates: CandidateLayouts, *, most: int) -> Ints:
        """Return for each micro-batch its largest multiple of at most ``most`` sequences.

        Without one, the largest multiple of the next candidate size is returned; with ``most`` 1, the size itself.
        """
        mbs = self.partials.mbs[candidates.partial]
        if most == 1:
            return mbs
        sizes, rungs = divisors(self.planner.job.even_batch), [rung for rung in LADDER[:0:-1] if rung >= most]

        def multiple(unit: int) -> int:
            multiples = ([size for size in sizes if size <= rung and size % unit == 0] for rung in rungs)
            return next((max(some) for some in multiples if some), LARGE_MICRO_BATCH)

        return map_distinct(mbs, multiple)

    def _part(self, candidates: CandidateLayouts) -> list[Ints]:
        """Return the columns on which ``part_of`` depends."""
        s = self.partials.take(candidates.partial)
        piped = ((s.pp > 1) & (self.planner.job.stack.stage_outputs == "retained")).astype(np.int64)
        return [s.mbs, piped, s.cp, s.kind, s.tp, s.inner, s.sp, s.ep, s.etp, self._recomputed[s.ac]]

    def _places(self, candidates: CandidateLayouts, axes: Sequence[str]) -> list[Ints]:
        """Return the columns on which message times depend.

        They are ranks, stride (up to a node's size) and link of each group.
        """
        s = self.partials.take(candidates.partial)
        columns = [s.dp, s.tp, s.cp, s.pp, candidates.order]
        columns += [s.ep, s.etp] if self.counts.model.moe else []
        columns += [candidates.shards] if "shard" in axes else []
        links = self.planner.machine.links

        def make(layout: Layout, _: int) -> Floats:
            rows: list[int] = []
            for ranks, stride in (group(layout, axis) for axis in axes):
                reach = (ranks - 1) * stride + 1
                tier = next((i for i, link in enumerate(links) if link.span >= reach), len(links) - 1)
                rows += [ranks, *((min(stride, links[0].span), tier) if ranks > 1 else (0, 0))]
            return np.array(rows, float)

        name = " ".join(("places of", *axes))
        return list(self._table(name, candidates, columns, make, cost=UNITS_PER_PLACE).astype(np.int64).T)

    def _table(
        self,
        name: str,
        candidates: CandidateLayouts,
        columns: list[Ints],
        make: Callable[[Layout, int], Floats],
        *,
        cost: int,
    ) -> Floats:
        """Return ``make(layout, first column)`` for each row.

        It is called once per search for equal values of ``columns``, at ``cost`` units of work.
        """
        known = self._tables.setdefault(name, {})
        before = len(known)
        _, first, inverse = factorize(encode_rows(columns))
        rows = []
        keys = zip(*(column[first].tolist() for column in columns), strict=True)
        for at, key in zip(first.tolist(), keys, strict=True):
            row = known.get(key)
            if row is None:
                row = known[key] = make(self.space.layout(self.partials, candidates, at), key[0])
            rows.append(row)
        self.work.add((len(known) - before) * cost + len(inverse))
        return np.stack(rows)[inverse]


def encode_rows(columns: Sequence[Ints]) -> Ints:
    """Return one integer per row, equal for rows with equal columns."""
    code = np.zeros(len(columns[0]), np.int64)
    size = 1
    for column in columns:
        values, _, inverse = factorize(column)
        if size * len(values) >= 1 << 62:
            number, _, code = factorize(code)
            size = len(number)
        code, size = code * len(values) + inverse, size * len(values)
    return code

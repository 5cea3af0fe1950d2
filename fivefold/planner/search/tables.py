"""Figures of candidates, computed once for each distinct set of the columns on which they depend.

columns → one code per row → ``compute`` for each new code → gathered by row
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Self

import numpy as np

from fivefold.layout.mesh import group
from fivefold.layout.spec import Layout, list_divisors
from fivefold.planner.predict import Planner
from fivefold.planner.search.columns import (
    CandidateLayouts,
    Floats,
    Ints,
    PartialLayouts,
    factorize,
    map_distinct,
    number_values,
    stack_rows,
)
from fivefold.planner.search.space import Space
from fivefold.planner.search.work import UNITS_PER_PLACE, SearchWork

LARGE_MICRO_BATCH = 2**20  # sequences of a micro-batch so large that rounding per sequence vanishes
SMALL_MICRO_BATCH = 6
ROUNDED = 1 - 1e-3  # of figures that are scaled from those of more: rows and waves round up
# Sequences per micro-batch at which lower bounds are computed: per sequence, a micro-batch takes no less time than one
# of a multiple of its size.
MICRO_BATCH_SIZES = (LARGE_MICRO_BATCH, 256, 32, SMALL_MICRO_BATCH)

Table = dict[tuple[int, ...], Floats]


class Tables:
    """Tables by name for the layouts of one space under one planner."""

    def __init__(
        self, planner: Planner, space: Space, partials: PartialLayouts, *, like: Tables | None, work: SearchWork
    ) -> None:
        """Initialize the tables of ``partials``.

        ``like``: tables to reuse, of a job that differs only in how often gradients are reduced, which is a column.
        ``work``: counts what is computed.
        """
        self.planner, self.space, self.counts, self.partials = planner, space, planner.counts, partials
        self.work = work
        self.measured = planner.machine.calibration is not None
        layouts = [Layout(ac=ac) for ac in space.recomputations]
        distinct = list(dict.fromkeys(layout.recomputed_operations for layout in layouts))
        self._recomputed_groups = distinct
        self._recomputed = np.array([distinct.index(layout.recomputed_operations) for layout in layouts])
        self._tables: dict[str, Table] = dict(like._tables) if like else {}
        self._placements: dict[tuple[int, ...], int] = like._placements if like else {}

    def restrict_to(self, partials: PartialLayouts) -> Self:
        """Return the same figures for other partial layouts, computed once for all."""
        restricted = copy(self)
        restricted.partials = partials
        return restricted

    def _look_up_scaled(
        self,
        name: str,
        candidates: CandidateLayouts,
        columns: list[Ints],
        compute: Callable[[Layout, int], Floats],
        *,
        sequences: Ints,
        cost: int,
    ) -> Floats:
        """Return ``_look_up`` of figures for ``sequences`` sequences, scaled to mbs."""
        mbs = self.partials.mbs[candidates.partial]
        scaled = self._look_up(name, candidates, [sequences, *columns], compute, cost=cost)
        scale = np.where(
            sequences == mbs, 1.0, mbs / sequences * np.where(sequences == LARGE_MICRO_BATCH, ROUNDED, 1.0)
        )
        return np.asarray(scaled * scale[:, None, None])

    def _choose_larger_sizes(self, candidates: CandidateLayouts, *, max_sequences: int) -> Ints:
        """Return for each micro-batch its largest multiple within ``max_sequences``, one of ``MICRO_BATCH_SIZES`` or 1.

        Only divisors of the global batch count. A micro-batch without such a multiple gets its largest within the next
        larger size. ``max_sequences=1`` returns the micro-batch sizes themselves.
        """
        mbs = self.partials.mbs[candidates.partial]
        if max_sequences == 1:
            return mbs
        batch_divisors = list_divisors(self.planner.job.even_batch)
        limits = [limit for limit in MICRO_BATCH_SIZES[:0:-1] if limit >= max_sequences]

        def find_largest_multiple(micro_batch_size: int) -> int:
            multiples = [size for size in batch_divisors if size % micro_batch_size == 0]
            multiples_by_limit = ([size for size in multiples if size <= limit] for limit in limits)
            return next((max(within) for within in multiples_by_limit if within), LARGE_MICRO_BATCH)

        return map_distinct(mbs, find_largest_multiple)

    def _list_operation_columns(self, candidates: CandidateLayouts) -> list[Ints]:
        """Return the columns that determine the operations of a rank."""
        partials = self.partials.take(candidates.partial)
        retains_outputs = ((partials.pp > 1) & (self.planner.job.stack.stage_outputs == "retained")).astype(np.int64)
        degrees = partials.select("cp kind tp inner sp ep etp")
        return [partials.mbs, retains_outputs, *degrees, self._recomputed[partials.ac]]

    def _number_placements(self, candidates: CandidateLayouts, axes: Sequence[str]) -> Ints:
        """Return a number per row, equal where the messages of the groups of ``axes`` take equal time.

        It stands for the ranks, stride (up to a node's size) and link of each group, and is never 0.
        """
        partials = self.partials.take(candidates.partial)
        degrees = partials.select("dp tp cp pp ep etp" if self.counts.model.moe else "dp tp cp pp")
        columns = [*degrees, candidates.order]
        columns += [candidates.shards] if "shard" in axes else []
        links = self.planner.machine.links

        def compute(layout: Layout, _sequences: int) -> Floats:
            placement: list[int] = []
            for ranks, stride in (group(layout, axis) for axis in axes):
                reach = (ranks - 1) * stride + 1
                link_index = next((index for index, link in enumerate(links) if link.span >= reach), len(links) - 1)
                placement += [ranks, *((min(stride, links[0].span), link_index) if ranks > 1 else (0, 0))]
            return np.array([self._placements.setdefault(tuple(placement), len(self._placements) + 1)], float)

        name = " ".join(("places of", *axes))
        return self._look_up(name, candidates, columns, compute, cost=UNITS_PER_PLACE)[:, 0].astype(np.int64)

    def _look_up(
        self,
        name: str,
        candidates: CandidateLayouts,
        columns: list[Ints],
        compute: Callable[[Layout, int], Floats],
        *,
        cost: int,
    ) -> Floats:
        """Return ``compute(layout, first column)`` for each row.

        It is called once per search for equal values of ``columns``, at ``cost`` units of work.
        """
        figures, index = self._look_up_distinct(name, candidates, columns, compute, cost=cost)
        return figures[index]

    def _look_up_distinct(
        self,
        name: str,
        candidates: CandidateLayouts,
        columns: list[Ints],
        compute: Callable[[Layout, int], Floats],
        *,
        cost: int,
    ) -> tuple[Floats, Ints]:
        """Return ``_look_up`` of the distinct rows of ``columns``, and for each row its index into these."""
        known = self._tables.setdefault(name, {})
        n_before = len(known)
        _, first_rows, inverse = factorize(encode_rows(columns))
        all_figures = []
        keys = zip(*(column[first_rows].tolist() for column in columns), strict=True)
        for row_index, key in zip(first_rows.tolist(), keys, strict=True):
            figures = known.get(key)
            if figures is None:
                figures = known[key] = compute(self.space.layout(self.partials, candidates, row_index), key[0])
            all_figures.append(figures)
        self.work.add((len(known) - n_before) * cost + len(inverse))
        return stack_rows(all_figures), inverse


def encode_rows(columns: Sequence[Ints]) -> Ints:
    """Return one integer per row, equal for rows with equal columns."""
    code = np.zeros(len(columns[0]), np.int64)
    size = 1
    for column in columns:
        n_values, inverse = number_values(column)
        if size * n_values >= 1 << 62:
            size, code = number_values(code)
        code, size = code * n_values + inverse, size * n_values
    return code

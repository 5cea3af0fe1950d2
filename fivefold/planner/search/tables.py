"""Figures of candidates, computed once for each distinct set of the columns on which they depend.

columns → one code per row → ``compute`` for new codes → gathered by row
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fivefold.layout.spec import Layout, list_divisors
from fivefold.planner.predict import Planner
from fivefold.planner.search.columns import (
    CandidateLayouts,
    Floats,
    Ints,
    PartialLayouts,
    encode_rows,
    factorize,
    map_distinct,
    stack_rows,
)
from fivefold.planner.search.placements import list_groups
from fivefold.planner.search.space import Space
from fivefold.planner.search.work import UNITS_PER_PLACE, SearchWork

LARGE_MICRO_BATCH = 2**20  # sequences of a micro-batch so large that rounding per sequence vanishes
SMALL_MICRO_BATCH = 6
ROUNDED = 1 - 1e-3  # of figures that are scaled from those of more: rows and waves round up
# Sequences per micro-batch at which lower bounds are computed: per sequence, a micro-batch takes no less time than one
# of a multiple of its size.
MICRO_BATCH_SIZES = (LARGE_MICRO_BATCH, 256, 32, SMALL_MICRO_BATCH)

Table = dict[tuple[int, ...], NDArray[Any]]


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

        def number(rows: Sequence[int]) -> Iterator[Ints]:
            placements = self._list_placements(candidates.take(np.array(rows)), axes)
            for placement in zip(*(column.tolist() for column in placements), strict=True):
                yield np.array([self._placements.setdefault(placement, len(self._placements) + 1)])

        name = " ".join(("places of", *axes))
        numbers, index = self._look_up_distinct(name, columns, number, cost=UNITS_PER_PLACE)
        return np.asarray(numbers[index, 0])

    def _list_placements(self, candidates: CandidateLayouts, axes: Sequence[str]) -> Iterator[Ints]:
        """Yield ranks, stride up to a node's size, and index of the link of each group; no stride of a single rank."""
        links, partials = self.planner.machine.links, self.partials.take(candidates.partial)
        spans = np.maximum.accumulate([link.span for link in links])
        for ranks, stride in list_groups(partials, candidates, axes, orders=self.space.orders):
            link_index = np.minimum(np.searchsorted(spans, (ranks - 1) * stride + 1), len(links) - 1)
            yield ranks
            yield np.where(ranks > 1, np.minimum(stride, links[0].span), 0)
            yield np.where(ranks > 1, link_index, 0)

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

        def compute_rows(rows: Sequence[int]) -> Iterator[Floats]:
            for row in rows:
                yield compute(self.space.layout(self.partials, candidates, row), int(columns[0][row]))

        figures, index = self._look_up_distinct(name, columns, compute_rows, cost=cost)
        return figures[index]

    def _look_up_distinct(
        self, name: str, columns: list[Ints], compute: Callable[[Sequence[int]], Iterable[NDArray[Any]]], *, cost: int
    ) -> tuple[NDArray[Any], Ints]:
        """Return the figures of the distinct rows of ``columns``, and for each row its index into these.

        ``compute`` returns those of some rows, which were not computed before; each takes ``cost`` units of work.
        """
        known = self._tables.setdefault(name, {})
        _, first_rows, inverse = factorize(encode_rows(columns))
        keys = list(zip(*(column[first_rows].tolist() for column in columns), strict=True))
        if new_keys := {key: row for key, row in zip(keys, first_rows.tolist(), strict=True) if key not in known}:
            known.update(zip(new_keys, compute([*new_keys.values()]), strict=True))
        self.work.add(len(new_keys) * cost + len(inverse))
        return stack_rows([known[key] for key in keys]), inverse

"""Figures of candidates, computed once for each distinct set of the columns on which they depend.

columns → one code per row → a row of a table, computed for new codes → gathered by candidate
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from typing import NamedTuple, Self

import numpy as np

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
    number_values,
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


class FigureTable:
    """Figures by key, as the rows of one array that grows."""

    def __init__(self) -> None:
        self.row_by_key: dict[tuple[int, ...], int] = {}
        self._rows: Floats | None = None

    @property
    def figures(self) -> Floats:
        """Return the rows that are filled, in the order in which they were added."""
        assert self._rows is not None, "a table is read once it has a row"
        return self._rows[: len(self.row_by_key)]

    def add(self, keys: Iterable[tuple[int, ...]], figures: Sequence[Floats]) -> None:
        """Append a row of figures for each of some new keys."""
        start = len(self.row_by_key)
        end = start + len(figures)
        if self._rows is None or end > len(self._rows):
            grown = np.empty((start + end, *figures[0].shape))
            if self._rows is not None:
                grown[:start] = self._rows[:start]
            self._rows = grown
        self._rows[start:end] = stack_rows(figures)
        self.row_by_key.update(zip(keys, range(start, end), strict=True))


class PartialKeys(NamedTuple):
    """Columns of partial layouts on which figures depend, and one code per partial layout that stands for them.

    ``table_rows``: the row of a table for each code, -1 if it is not known yet.
    """

    columns: list[Ints]
    codes: Ints
    table_rows: Ints


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
        self._tables: dict[str, FigureTable] = dict(like._tables) if like else {}
        self._partial_keys: dict[tuple[str, int], PartialKeys] = {}
        self._placements: dict[tuple[int, ...], int] = like._placements if like else {}

    def restrict_to(self, partials: PartialLayouts) -> Self:
        """Return the same figures for other partial layouts, computed once for all."""
        restricted = copy(self)
        restricted.partials, restricted._partial_keys = partials, {}
        return restricted

    def _make_partial_keys(self, name: str, list_columns: Callable[[], list[Ints]], *, variant: int = 0) -> PartialKeys:
        """Return the keys that the partial layouts determine of table ``name``, made once for each ``variant``."""
        keys = self._partial_keys.get((name, variant))
        if keys is None:
            columns = list_columns()
            n_codes, codes = number_values(encode_rows(columns))
            keys = self._partial_keys[name, variant] = PartialKeys(columns, codes, np.full(n_codes, -1))
        return keys

    def _look_up_scaled(
        self,
        name: str,
        candidates: CandidateLayouts,
        columns: slice,
        compute: Callable[[Layout, int], Floats],
        *,
        max_sequences: int,
        cost: int,
    ) -> Floats:
        """Return ``_look_up`` of figures for the sequences of ``_choose_larger_sizes``, scaled to mbs.

        They depend on ``columns`` of ``_list_operation_columns``.
        """

        def list_columns() -> list[Ints]:
            return [self._choose_larger_sizes(max_sequences=max_sequences), *self._list_operation_columns()[columns]]

        keys = self._make_partial_keys(name, list_columns, variant=max_sequences)
        scaled = self._look_up(name, candidates, keys, compute, cost=cost)
        mbs, sequences = self.partials.mbs[candidates.partial], keys.columns[0][candidates.partial]
        scale = np.where(
            sequences == mbs, 1.0, mbs / sequences * np.where(sequences == LARGE_MICRO_BATCH, ROUNDED, 1.0)
        )
        return np.asarray(scaled * scale[:, None, None])

    def _choose_larger_sizes(self, *, max_sequences: int) -> Ints:
        """Return for each micro-batch its largest multiple within ``max_sequences``, one of ``MICRO_BATCH_SIZES`` or 1.

        Only divisors of the global batch count. A micro-batch without such a multiple gets its largest within the next
        larger size. ``max_sequences=1`` returns the micro-batch sizes themselves.
        """
        mbs = self.partials.mbs
        if max_sequences == 1:
            return mbs
        batch_divisors = list_divisors(self.planner.job.even_batch)
        limits = [limit for limit in MICRO_BATCH_SIZES[:0:-1] if limit >= max_sequences]

        def find_largest_multiple(micro_batch_size: int) -> int:
            multiples = [size for size in batch_divisors if size % micro_batch_size == 0]
            multiples_by_limit = ([size for size in multiples if size <= limit] for limit in limits)
            return next((max(within) for within in multiples_by_limit if within), LARGE_MICRO_BATCH)

        return map_distinct(mbs, find_largest_multiple)

    def _list_operation_columns(self) -> list[Ints]:
        """Return the columns of partial layouts that determine the operations of a rank; the first is mbs."""
        partials = self.partials
        retains_outputs = ((partials.pp > 1) & (self.planner.job.stack.stage_outputs == "retained")).astype(np.int64)
        degrees = partials.select("cp kind tp inner sp ep etp")
        return [partials.mbs, retains_outputs, *degrees, self._recomputed[partials.ac]]

    def _number_placements(self, candidates: CandidateLayouts, axes: Sequence[str]) -> Ints:
        """Return a number per row, equal where the messages of the groups of ``axes`` take equal time.

        It stands for the ranks, stride (up to a node's size) and link of each group, and is never 0.
        """
        degrees = "dp tp cp pp ep etp" if self.counts.model.moe else "dp tp cp pp"
        columns = [candidates.order, *([candidates.shards] if "shard" in axes else [])]

        def number(rows: Sequence[int]) -> Iterator[Floats]:
            placements = self._list_placements(candidates.take(np.array(rows)), axes)
            for placement in zip(*(column.tolist() for column in placements), strict=True):
                yield np.array([self._placements.setdefault(placement, len(self._placements) + 1)], float)

        name = " ".join(("places of", *axes))
        keys = self._make_partial_keys("places", lambda: self.partials.select(degrees))
        numbers, index = self._find_rows(name, candidates, keys, columns, number, cost=UNITS_PER_PLACE)
        return np.asarray(numbers[index, 0], np.int64)

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
        keys: PartialKeys,
        compute: Callable[[Layout, int], Floats],
        *,
        columns: Sequence[Ints] = (),
        cost: int,
    ) -> Floats:
        """Return ``compute(layout, first column)`` for each row.

        It is called once per search for equal values of the columns of ``keys`` and of further ``columns`` of the
        candidates, at ``cost`` units of work.
        """

        def compute_rows(rows: Sequence[int]) -> Iterator[Floats]:
            for row in rows:
                first = int(keys.columns[0][candidates.partial[row]])
                yield compute(self.space.layout(self.partials, candidates, row), first)

        figures, index = self._find_rows(name, candidates, keys, columns, compute_rows, cost=cost)
        return figures[index]

    def _find_rows(
        self,
        name: str,
        candidates: CandidateLayouts,
        keys: PartialKeys,
        columns: Sequence[Ints],
        compute: Callable[[Sequence[int]], Iterable[Floats]],
        *,
        cost: int,
    ) -> tuple[Floats, Ints]:
        """Return all figures of table ``name``, and for each candidate its row of them.

        ``compute`` returns those of some candidates, which were not computed before; each takes ``cost`` units of work.
        """
        table = self._tables.setdefault(name, FigureTable())
        codes = keys.codes[candidates.partial]
        self.work.add(int(candidates.equal.sum()))
        if not columns:
            unknown = np.flatnonzero(keys.table_rows[codes] < 0)
            if len(unknown):
                new_codes, first = np.unique(codes[unknown], return_index=True)
                keys.table_rows[new_codes] = self._add_rows(table, candidates, keys, (), unknown[first], compute, cost)
            return table.figures, keys.table_rows[codes]
        _, first_rows, inverse = factorize(encode_rows([codes, *columns]))
        table_rows = self._add_rows(table, candidates, keys, columns, first_rows, compute, cost)
        return table.figures, table_rows[inverse]

    def _add_rows(
        self,
        table: FigureTable,
        candidates: CandidateLayouts,
        keys: PartialKeys,
        columns: Sequence[Ints],
        rows: Ints,
        compute: Callable[[Sequence[int]], Iterable[Floats]],
        cost: int,
    ) -> Ints:
        """Return the row of ``table`` for some candidates with distinct keys; compute those that it does not have."""
        partial = candidates.partial[rows]
        by_column = [
            *(column[partial].tolist() for column in keys.columns),
            *(column[rows].tolist() for column in columns),
        ]
        row_keys = list(zip(*by_column, strict=True))
        new = {key: row for key, row in zip(row_keys, rows.tolist(), strict=True) if key not in table.row_by_key}
        if new:
            table.add(new, list(compute(list(new.values()))))
            self.work.add(len(new) * cost)
        return np.array([table.row_by_key[key] for key in row_keys])

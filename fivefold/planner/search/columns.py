"""Layouts as columns of integers: combines every row with each of some values, and filters rows by a rule."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from fivefold.layout.spec import Layout

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Key = TypeVar("Key", bound=Hashable)
Row = TypeVar("Row", bound=tuple[Any, ...])
LOOKED_UP = 1 << 16  # numbers so small are looked up rather than sorted, however few there are


def take_rows(columns: Iterable[Ints], index: NDArray[np.integer] | NDArray[np.bool_]) -> Iterator[Ints]:
    """Yield some of the rows of each column."""
    rows = np.flatnonzero(index) if index.dtype == bool else index  # a mask is slower, and read for each column
    return (column[rows] for column in columns)


class PartialLayouts(NamedTuple):
    """Columns of equal length.

    ``kind`` and ``ac`` are indices into ``CP_KINDS`` and ``Space.recomputations``; ``inner`` is the y of tp = x·y.
    """

    dp: Ints
    tp: Ints
    cp: Ints
    pp: Ints
    ep: Ints
    etp: Ints
    mbs: Ints
    kind: Ints
    sp: Ints
    ac: Ints
    inner: Ints

    def select(self, names: str) -> list[Ints]:
        """Return the columns with these names."""
        return [getattr(self, name) for name in names.split()]

    def take(self, index: NDArray[np.integer] | NDArray[np.bool_]) -> Self:
        """Return some of the rows."""
        return type(self)(*take_rows(self, index))


def concatenate(parts: Sequence[PartialLayouts]) -> PartialLayouts:
    """Return the rows of all of ``parts``."""
    empty = np.zeros(0, np.int64)
    return (
        PartialLayouts(*(np.concatenate([empty, *columns]) for columns in zip(*parts, strict=True)))
        if parts
        else (PartialLayouts(*[empty] * len(PartialLayouts._fields)))
    )


def select_degrees(
    partials: PartialLayouts, layout: Layout, *, axes: Sequence[str] = ("dp", "tp", "cp", "pp", "ep", "etp")
) -> NDArray[np.bool_]:
    """Return a mask of the partial layouts with the degrees of ``layout`` along ``axes``, of any micro-batch."""
    matches = np.ones(len(partials.dp), bool)
    for name in axes:
        matches &= getattr(partials, name) == getattr(layout, name)
    return matches


class CandidateLayouts(NamedTuple):
    """Columns of equal length.

    ``partial``, ``shape`` and ``order`` are indices into the space's ``partials``, ``shapes`` and ``orders``;
    ``shards`` is 1 under zero0, and on the only rank of what is offloaded. ``equal``: layouts that a row stands for,
    which differ in their order alone.
    """

    partial: Ints
    shape: Ints
    zero: Ints
    shards: Ints
    order: Ints
    equal: Ints

    @property
    def keeps_unsharded(self) -> NDArray[np.bool_]:
        """Return whether a rank keeps the gradients of all of its weights, not a shard of them."""
        return np.asarray(self.zero < 2)

    def take(self, index: NDArray[np.integer] | NDArray[np.bool_]) -> Self:
        """Return some of the rows."""
        return type(self)(*take_rows(self, index))


def merge_equal(candidates: CandidateLayouts, columns: Sequence[Ints]) -> tuple[CandidateLayouts, Ints, Ints]:
    """Return the first of the candidates with equal ``columns``, its row, and the index into these of each row."""
    _, first, inverse = factorize(encode_rows(columns))
    equal = np.bincount(inverse, weights=candidates.equal).astype(np.int64)
    return candidates.take(first)._replace(equal=equal), first, inverse


class BoundedSpace(NamedTuple):
    """Partial layouts but for their recomputation, and lower bounds of each."""

    partials: PartialLayouts
    size: Floats
    seconds: Floats


class ExpandedCandidates(NamedTuple):
    """Partial layouts with schedules that may be among the best, and lower bounds of each."""

    partials: PartialLayouts
    candidates: CandidateLayouts
    size: Floats
    seconds: Floats


def combine_with_values(
    rows: Ints, column: int, values: Iterable[int], legal: Callable[[Ints], NDArray[np.bool_]] | None = None
) -> Ints:
    """Return every row with each of ``values`` in one column, without rows that are not ``legal``."""
    pieces = [rows[:0]]
    for value in values:
        crossed = rows.copy()
        crossed[:, column] = value
        pieces.append(crossed if legal is None else crossed[legal(crossed)])
    return np.concatenate(pieces)


def split(rows: Ints, column: int, sizes: Iterable[int]) -> Ints:
    """Return every row with each of ``sizes`` as the degree of one axis, whose ranks are taken from dp (column 0)."""
    crossed = combine_with_values(rows, column, sizes, lambda row: row[:, 0] % row[:, column] == 0)
    crossed[:, 0] //= crossed[:, column]
    return crossed


def map_distinct(column: Ints, function: Callable[[int], int]) -> Ints:
    """Return ``function`` of each element. It is called once per distinct element."""
    values, _, inverse = factorize(column)
    return np.array([function(int(value)) for value in values], np.int64)[inverse]


def factorize(column: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the distinct values of a column in order, the first row of each, and the index into them of each row.

    As ``numpy.unique``, which sorts; small numbers are looked up instead.
    """
    size = _find_lookup_size(column)
    if not size:
        values, first, inverse = np.unique(column, return_index=True, return_inverse=True)
        return values, first, inverse
    first = np.full(size, -1)
    first[column[::-1]] = np.arange(len(column) - 1, -1, -1)
    values = np.flatnonzero(first >= 0)
    index_of_value = np.zeros(size, np.int64)
    index_of_value[values] = np.arange(len(values))
    return values, first[values], index_of_value[column]


def number_values(column: Ints) -> tuple[int, Ints]:
    """Return the number of distinct values of a column and the index into them of each row, as ``factorize`` does."""
    size = _find_lookup_size(column)
    if not size:
        values, inverse = np.unique(column, return_inverse=True)
        return len(values), inverse
    is_present = np.zeros(size, bool)
    is_present[column] = True
    index_of_value = np.cumsum(is_present) - 1
    return int(index_of_value[-1]) + 1, index_of_value[column]


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


def _find_lookup_size(column: Ints) -> int:
    """Return one more than the largest value if the values are looked up; 0 if they are sorted instead."""
    size = int(column.max()) + 1 if len(column) else 0
    return size if 0 < size <= LOOKED_UP + len(column) and column.min() >= 0 else 0


class RecordTable(Generic[Key, Row]):
    """Named tuples of arrays of equal shapes by key, as the rows of columns that grow."""

    def __init__(self, make: Callable[[Key], Row]) -> None:
        """Initialize a table whose rows ``make`` returns, once for each key."""
        self._make = make
        self._row_by_key: dict[Key, int] = {}
        self._columns: Row | None = None

    def take(self, keys: Sequence[Key], index: Ints) -> Row:
        """Return the columns of the rows that have the ``keys`` at ``index``."""
        if new := [key for key in dict.fromkeys(keys) if key not in self._row_by_key]:
            rows = [self._make(key) for key in new]
            columns = self._columns
            grown = [
                np.concatenate([*([] if columns is None else [columns[at]]), stack_rows(column)])
                for at, column in enumerate(zip(*rows, strict=True))
            ]
            self._columns = type(rows[0])(*grown)
            self._row_by_key.update(zip(new, range(len(self._row_by_key), len(grown[0])), strict=True))
        columns = self._columns
        assert columns is not None, "a table is read for at least one key"
        table_rows = np.array([self._row_by_key[key] for key in keys])[index]
        return type(columns)(*(column[table_rows] for column in columns))


def stack_rows(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return ``numpy.stack``, which takes three times as long for many small arrays."""
    return np.concatenate(arrays).reshape(-1, *arrays[0].shape)

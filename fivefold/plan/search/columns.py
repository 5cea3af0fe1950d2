"""Rows of integers, of which each is a choice: every row with each of some values, cut or kept by a rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def cross(
    rows: Ints, column: int, values: Iterable[int], legal: Callable[[Ints], NDArray[np.bool_]] | None = None
) -> Ints:  # fmt: skip
    """Every row with each of ``values`` in one column, without rows that are not ``legal``."""
    pieces = []
    for value in values:
        copy = rows.copy()
        copy[:, column] = value
        pieces.append(copy if legal is None else copy[legal(copy)])
    return np.concatenate(pieces)


def split(rows: Ints, column: int, sizes: Iterable[int]) -> Ints:
    """Every row with each of ``sizes`` as the degree of one axis, whose ranks are taken from dp (column 0)."""
    found = cross(rows, column, sizes, lambda r: r[:, 0] % r[:, column] == 0)
    found[:, 0] //= found[:, column]
    return found


def mapped(column: Ints, value: Callable[[int], int]) -> Ints:
    """``value`` of each element, called once per distinct one."""
    distinct, inverse = np.unique(column, return_inverse=True)
    return np.array([value(int(each)) for each in distinct], np.int64)[inverse]

"""Sets of moments as sorted, disjoint intervals: the time that several streams cover together, in integer nanoseconds.

[(0, 5), (3, 9), (12, 13)]  →  union [(0, 9), (12, 13)], 10 ns
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Nanoseconds = npt.NDArray[np.int64]


class Intervals(NamedTuple):
    """Intervals in ascending order that do not touch; none is empty."""

    starts: Nanoseconds
    ends: Nanoseconds

    @property
    def total(self) -> int:
        """Return the nanoseconds covered."""
        return int((self.ends - self.starts).sum())


EMPTY = Intervals(np.empty(0, np.int64), np.empty(0, np.int64))


def merge_intervals(starts: Nanoseconds, ends: Nanoseconds) -> Intervals:
    """Return what intervals in any order cover."""
    keep = ends > starts
    starts, ends = starts[keep], ends[keep]
    if not len(starts):
        return EMPTY
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    begins = np.concatenate(([True], starts[1:] > reach[:-1]))
    last = np.concatenate((begins[1:], [True]))
    return Intervals(starts[begins], reach[last])


def unite(*parts: Intervals) -> Intervals:
    """Return what any of ``parts`` covers."""
    return merge_intervals(
        np.concatenate([part.starts for part in parts]), np.concatenate([part.ends for part in parts])
    )


def clip(intervals: Intervals, start: int, end: int) -> Intervals:
    """Return the part that lies in [start, end)."""
    first = np.searchsorted(intervals.ends, start, side="right")
    last = np.searchsorted(intervals.starts, end)
    if first >= last or end <= start:
        return EMPTY
    return Intervals(np.maximum(intervals.starts[first:last], start), np.minimum(intervals.ends[first:last], end))


def find_gaps(intervals: Intervals, start: int, end: int) -> Intervals:
    """Return the part of [start, end) that is not covered."""
    inside = clip(intervals, start, end)
    starts = np.concatenate(([start], inside.ends))
    ends = np.concatenate((inside.starts, [end]))
    keep = ends > starts
    return Intervals(starts[keep], ends[keep])


def subtract(intervals: Intervals, other: Intervals) -> Intervals:
    """Return what ``intervals`` covers and ``other`` does not."""
    if not len(intervals.starts):
        return EMPTY
    start, end = int(intervals.starts[0]), int(intervals.ends[-1])
    rest = find_gaps(intervals, start, end)
    return find_gaps(unite(rest, other), start, end)


def intersect(intervals: Intervals, other: Intervals) -> Intervals:
    """Return what both cover."""
    return subtract(intervals, subtract(intervals, other))

"""Break down a rank's time within a window: compute, communication, copies, idle; by category and by kernel.

compute        |██████|        |████|                  a gap counts as the host's if the next kernel had not been
communication      |███████|                           launched when the last one ended; else it waits for a stream
                    ▔▔ ▁▁▁▁ exposed    ·····gap
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fivefold.profiling.traces.intervals import (
    EMPTY,
    Intervals,
    clip,
    find_gaps,
    intersect,
    merge_intervals,
    subtract,
    unite,
)
from fivefold.profiling.traces.rank_trace import COMMUNICATION, COMPUTE, MEMCPY, UNKNOWN, RankEvents, StepWindow
from fivefold.profiling.traces.recording import ANNOTATION, DATA_LOADING, LAUNCH, TraceEvents
from fivefold.results.trace_report import Breakdown, Category, KernelLine

ALLOCATION = re.compile(
    r"^(cuda|hip)(Malloc|Free|HostAlloc|ModuleLoad|LibraryLoad)(?!Async)|^cu(Mem|ModuleLoad)(?!cpy|set)"
)
BLOCKING = re.compile(r"Synchronize|(cuda|hip|cu)Memcpy")


class Timeline:
    """The kinds of work of a rank over all of its trace, from which windows are cut."""

    def __init__(self, trace: RankEvents, *, waits: Intervals | None = None) -> None:
        """Compute the intervals of each kind of work.

        ``waits``: when the rank waited for other ranks within a message; None if the traces of the others are missing.
        """
        self.trace = trace
        self.compute, self.communication, self.memcpy = map(trace.get_intervals, (COMPUTE, COMMUNICATION, MEMCPY))
        self.busy = unite(self.compute, self.communication, self.memcpy)
        self.exposed = subtract(self.communication, self.compute)
        self.exposed_memcpy = subtract(self.memcpy, unite(self.compute, self.communication))
        rows = trace.in_optimizer & (trace.activity == COMPUTE)
        self.optimizer = merge_intervals(trace.start[rows], trace.end[rows])
        self.waits = subtract(waits, self.compute) if waits is not None else None
        self.host_states = find_host_states(trace.recording)

    def breakdown(self, window: StepWindow, *, first: int = 0) -> Breakdown:
        """Return the breakdown of a window.

        ``first``: the moment from which starts are counted, on the clock of all ranks.
        """
        seconds = {
            name: clip(getattr(self, name), window.start, window.end).total / 1e9
            for name in ("compute", "communication", "exposed", "memcpy", "optimizer")
        }
        idle = find_gaps(self.busy, window.start, window.end)
        host, queued = self._split_idle(idle)
        return Breakdown(
            rank=self.trace.rank,
            step=window.name,
            window_seconds=(window.end - window.start) / 1e9,
            start_seconds=(window.start + self.trace.shift - first) / 1e9,
            **{f"{name}_seconds": value for name, value in seconds.items()},
            memcpy_alone_seconds=clip(self.exposed_memcpy, window.start, window.end).total / 1e9,
            idle_seconds=idle.total / 1e9,
            idle_host_seconds=host.total / 1e9,
            idle_waiting_seconds=queued.total / 1e9,
            **{
                f"idle_{state}_seconds": intersect(host, intervals).total / 1e9
                for state, intervals in self.host_states._asdict().items()
            },
            waiting_seconds=None if self.waits is None else clip(self.waits, window.start, window.end).total / 1e9,
        )

    def _split_idle(self, idle: Intervals) -> tuple[Intervals, Intervals]:
        """Return the gaps in which nothing had been launched, and those in which something was queued."""
        if not self.trace.recording.has_gpu_kernels:
            return idle, EMPTY
        launches = self.first_launches(idle.ends)
        queued = launches < idle.starts
        host = ~queued & (launches != UNKNOWN)
        return Intervals(idle.starts[host], idle.ends[host]), Intervals(idle.starts[queued], idle.ends[queued])

    def first_launches(
        self, ends: np.ndarray[tuple[int], np.dtype[np.int64]]
    ) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return when the first of the rows that begin at each of ``ends`` was launched.

        A gap that ends with the window has no such row: nothing more was launched, so the gap is the host's.
        """
        trace = self.trace
        left, right = (np.searchsorted(trace.start, ends, side=side) for side in ("left", "right"))
        launches, begins = ends.copy(), right > left
        launches[begins] = trace.launch[left[begins]]
        for gap in np.flatnonzero(right > left + 1).tolist():
            launches[gap] = trace.launch[left[gap] : right[gap]].min()
        return launches


def sum_kernel_lines(windows: Sequence[tuple[RankEvents, StepWindow]]) -> tuple[list[KernelLine], list[KernelLine]]:
    """Return the time by category and by kernel, as means over the windows, the largest first.

    A category names the kernel that takes most of it.
    """
    kinds: dict[Category, list[int]] = {}
    names: dict[tuple[Category, str], list[int]] = {}  # calls, ns, longest
    categories_by_rank = {
        rank: trace.categories() for rank, trace in {trace.rank: trace for trace, _ in windows}.items()
    }
    number = len(windows)
    for trace, window in windows:
        rows = trace.rows_in(window)
        lengths = trace.end[rows] - trace.start[rows]
        keys = trace.name[rows] * 4 + trace.in_optimizer[rows] * 2 + (trace.activity[rows] == COMMUNICATION)
        order = np.argsort(keys, kind="stable")
        unique_keys, first, calls = np.unique(keys[order], return_index=True, return_counts=True)
        totals, longest = (how.reduceat(lengths[order], first) if len(first) else first for how in (np.add, np.maximum))
        for key, *sums in zip(unique_keys.tolist(), calls.tolist(), totals.tolist(), longest.tolist(), strict=True):
            kind = _classify_row(
                categories_by_rank[trace.rank][key // 4], optimizer=bool(key & 2), message=bool(key & 1)
            )
            _add(kinds.setdefault(kind, [0, 0, 0]), sums)
            _add(names.setdefault((kind, trace.names[key // 4]), [0, 0, 0]), sums)
    by_name = _sort_lines([_build_line(kind, name, sums, number) for (kind, name), sums in names.items()])
    largest = {line.category: line.name for line in reversed(by_name)}
    by_kind = [_build_line(kind, "", sums, number).replace(largest=largest[kind]) for kind, sums in kinds.items()]
    return _sort_lines(by_kind), by_name


def _classify_row(category: Category, *, optimizer: bool, message: bool) -> Category:
    if message:
        return "communication"
    return "optimizer" if optimizer else category


def _add(sums: list[int], more: Sequence[int]) -> None:
    sums[:] = [sums[0] + more[0], sums[1] + more[1], max(sums[2], more[2])]


def _build_line(kind: Category, name: str, sums: list[int], number: int) -> KernelLine:
    calls, total, longest = sums
    return KernelLine(
        category=kind, name=name, calls=calls / number, seconds=total / number / 1e9, longest_seconds=longest / 1e9
    )


def _sort_lines(kernel_lines: list[KernelLine]) -> list[KernelLine]:
    return sorted(kernel_lines, key=lambda line: (-line.seconds, line.name))


class HostStates(NamedTuple):
    """When the host loads data, allocates device memory or is within a blocking call: the first that applies."""

    loading: Intervals
    allocation: Intervals
    blocked: Intervals


def find_host_states(recording: TraceEvents) -> HostStates:
    """Return when any thread of the host is in each state."""
    loading = _select(recording, ANNOTATION, re.compile(re.escape(DATA_LOADING)))
    allocation = subtract(_select(recording, LAUNCH, ALLOCATION), loading)
    blocked = subtract(_select(recording, LAUNCH, BLOCKING), unite(loading, allocation))
    return HostStates(loading, allocation, blocked)


def _select(recording: TraceEvents, kind: int, pattern: re.Pattern[str]) -> Intervals:
    """Return what the events of a kind whose name matches cover."""
    matches = np.array([pattern.search(name) is not None for name in recording.names], np.bool_)
    rows = (recording.kind == kind) & matches[recording.name]
    return merge_intervals(recording.start[rows], recording.end[rows])

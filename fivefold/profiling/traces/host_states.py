"""What the host does while a device idles: it loads data, allocates device memory, or is within a blocking call.

Only the first that applies counts. Calls by the names of the CUDA and HIP runtimes and of the CUDA driver.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from fivefold.profiling.traces.intervals import Intervals, merge_intervals, subtract, unite
from fivefold.profiling.traces.recording import ANNOTATION, DATA_LOADING, LAUNCH, TraceEvents

ALLOCATION = re.compile(
    r"^(cuda|hip)(Malloc|Free|HostAlloc|ModuleLoad|LibraryLoad)(?!Async)|^cu(Mem|ModuleLoad)(?!cpy|set)"
)
BLOCKING = re.compile(r"Synchronize|(cuda|hip|cu)Memcpy")


class HostStates(NamedTuple):
    """When the host is in each state; the intervals of different states do not overlap."""

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

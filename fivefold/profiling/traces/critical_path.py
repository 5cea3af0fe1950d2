"""Find the critical path of a step over ranks: the work that, had it been shorter, would have made the step shorter.

rank 0   |▓▓▓▓▓|·····|━━━━|▓▓▓▓▓|         The path is followed backward from the end of the last rank: from each row
rank 1   |▓▓▓▓▓▓▓▓▓▓▓|━━━━|▓▓▓|           to the one that ended last before it on the rank; from a message to what
         └─ rank 1 ──┘    └rank 0┘        its last rank did before. Gaps are the host's, or a wait for a stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fivefold.profiling.traces.job_traces import JobTraces
from fivefold.profiling.traces.matching import Matched, MessagePart
from fivefold.profiling.traces.rank_trace import COMMUNICATION, COMPUTE, RankEvents, StepWindow
from fivefold.results.trace_report import Activity, Arrivals, PathPart

WORK: dict[int, Activity] = {COMPUTE: "compute", COMMUNICATION: "communication"}  # else memcpy


class Segment(NamedTuple):
    """A piece of the path in ns on the clock of all ranks; ``name`` is empty in a gap."""

    rank: int
    activity: Activity
    name: str
    start: int
    end: int


class EndOrder:
    """The rows of a rank in the order in which they end; computed once for all steps, as it sorts the full trace."""

    def __init__(self, trace: RankEvents) -> None:
        self.trace = trace
        rows = np.flatnonzero(trace.end > trace.start)
        self.rows = rows[np.lexsort((trace.start[rows], trace.end[rows]))]
        self.ends = trace.end[self.rows] + trace.shift

    def find_last_before(self, moment: int) -> int:
        """Return the row that ended last at ``moment``, or -1."""
        index = int(np.searchsorted(self.ends, moment, side="right")) - 1
        return int(self.rows[index]) if index >= 0 else -1


def find_critical_path(
    orders: dict[int, EndOrder], windows: dict[int, StepWindow], *, matched: Matched, starts: dict[MessagePart, int]
) -> list[Segment]:
    """Return the path of a step in order of time, which covers the step without a gap; ``windows`` are by rank."""
    ranks = {rank: order for rank, order in orders.items() if rank in windows}
    begin = min(windows[rank].start + order.trace.shift for rank, order in ranks.items())
    last = max(ranks, key=lambda rank: windows[rank].end + ranks[rank].trace.shift)
    moment = windows[last].end + ranks[last].trace.shift
    return list(reversed(list(_walk_back(ranks, last, moment, begin, matched, starts))))


def _walk_back(
    ranks: dict[int, EndOrder], rank: int, moment: int, begin: int, matched: Matched, starts: dict[MessagePart, int]
) -> Iterator[Segment]:
    """Yield the segments that end at ``moment`` and before, down to ``begin``."""
    next_row = -1
    while moment > begin:
        order = ranks[rank]
        trace, row = order.trace, order.find_last_before(moment)
        ended = max(begin, int(trace.end[row]) + trace.shift if row >= 0 else begin)
        if ended < moment:
            yield Segment(rank, _explain_gap(trace, next_row, ended), "", ended, moment)
            moment = ended
        if ended <= begin:
            return
        activity = WORK.get(int(trace.activity[row]), "memcpy")
        last_part = _find_last_arrival(matched.message_parts.get(MessagePart(rank, row), ()), starts, moment, ranks)
        start = starts[last_part] if last_part else int(trace.start[row]) + trace.shift
        yield Segment(rank, activity, trace.names[trace.name[row]], max(begin, start), moment)
        moment = start
        rank, next_row = (last_part.rank, last_part.row) if last_part else (rank, row)


def _find_last_arrival(
    parts: Sequence[MessagePart], starts: dict[MessagePart, int], moment: int, ranks: dict[int, EndOrder]
) -> MessagePart | None:
    """Return the last part that had begun before ``moment``: clocks that disagree must not lead forward in time."""
    begun_parts = [part for part in parts if part.rank in ranks and starts[part] < moment]
    return max(begun_parts, key=lambda part: (starts[part], part.rank), default=None)


def _explain_gap(trace: RankEvents, row: int, ended: int) -> Activity:
    """Return the cause of a gap: the host had not launched ``row`` when the previous row ended, or it was queued."""
    if row < 0 or not trace.recording.has_gpu_kernels:
        return "host"
    return "waiting" if int(trace.launch[row]) + trace.shift < ended else "host"


class PathSums:
    """Sums of what ranks and kernels contribute to the critical paths of steps, so that no path has to be kept."""

    def __init__(self) -> None:
        self.steps, self.total_ns = 0, 0
        self.by_rank: dict[tuple[int, Activity, str], int] = {}
        self.by_kernel: dict[tuple[int, Activity, str], int] = {}

    def add(self, path: Sequence[Segment]) -> None:
        """Add the path of a step."""
        self.steps += 1
        self.total_ns += path[-1].end - path[0].start if path else 0
        for rank, activity, name, start, end in path:
            for sums, key in ((self.by_rank, (rank, activity, "")), (self.by_kernel, (rank, activity, name))):
                sums[key] = sums.get(key, 0) + end - start

    @property
    def mean_seconds(self) -> float:
        """Return the mean length of a path."""
        return self.total_ns / max(1, self.steps) / 1e9

    def list_parts(self, *, named: bool) -> list[PathPart]:
        """Return what ranks (or, if ``named``, kernels of ranks) contribute, as means over paths, the largest first."""
        path_parts = [
            PathPart(rank=rank, activity=activity, name=name, seconds=total / self.steps / 1e9)
            for (rank, activity, name), total in (self.by_kernel if named else self.by_rank).items()
        ]
        return sorted(path_parts, key=lambda part: (-part.seconds, part.rank, part.name))


def count_late_arrivals(job: JobTraces, matched: Matched, starts: dict[MessagePart, int]) -> list[Arrivals]:
    """Return for every rank in how many messages it was the last to arrive, and how long the others waited for it."""
    ends = {trace.rank: trace.end + trace.shift for trace in job.ranks}
    last_count, matched_count, waited_ns = ({trace.rank: 0 for trace in job.ranks} for _ in range(3))
    for message in set(matched.message_parts.values()):
        last_part = max(message, key=lambda part: (starts[part], part.rank))
        last_count[last_part.rank] += 1
        for part in message:
            matched_count[part.rank] += 1
            until = min(starts[last_part], int(ends[part.rank][part.row]))
            waited_ns[last_part.rank] += until - starts[part]
    return [
        Arrivals(
            rank=rank, last=last_count[rank], matched=matched_count[rank], others_waited_seconds=waited_ns[rank] / 1e9
        )
        for rank in sorted(last_count)
        if matched_count[rank]
    ]

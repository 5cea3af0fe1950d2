"""Traces of any trainer: read PyTorch profiler traces of one or many ranks and show where the time went.

json_stream · recording     events of a file of any size; one rank's events as columns
rank_trace                  compute, communication and copies; the steps; kinds of kernels
job_traces · matching       traces of one job on one clock; which kernels of the ranks are one message
intervals                   sets of moments
breakdown · messages · critical_path · prediction     the results; comparison with a prediction
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fivefold.errors import UserError
from fivefold.machine.spec import Machine
from fivefold.profiling.traces import breakdown, messages
from fivefold.profiling.traces.breakdown import Timeline
from fivefold.profiling.traces.critical_path import EndOrder, PathSums, Segment, count_late_arrivals, find_critical_path
from fivefold.profiling.traces.job_traces import JobTraces, Progress, read_traces
from fivefold.profiling.traces.matching import find_starts, match, measure_waits
from fivefold.profiling.traces.rank_trace import StepWindow
from fivefold.rendering.trace_report import PathPiece
from fivefold.results.trace_report import MessageLine, TraceReport


class AnalyzedTraces(NamedTuple):
    """The report; only the messages of the lowest rank; the critical path of the last step, to be drawn."""

    report: TraceReport
    lowest: list[MessageLine]
    path: list[Segment]

    def pieces(self) -> list[PathPiece]:
        """Return the path for a picture: consecutive segments of one rank and kind are merged into one piece."""
        begin = self.path[0].start if self.path else 0
        pieces: list[PathPiece] = []
        for rank, activity, _, start, end in self.path:
            end_seconds = (end - begin) / 1e9
            if pieces and (pieces[-1].rank, pieces[-1].activity) == (rank, activity):
                pieces[-1] = pieces[-1]._replace(end=end_seconds)
            else:
                pieces.append(PathPiece(rank, activity, (start - begin) / 1e9, end_seconds))
        return pieces


def read(
    paths: Sequence[Path],
    *,
    step: int | None = None,
    top: int = 10,
    machine: Machine | None = None,
    axes: dict[tuple[int, ...], str] | None = None,
    progress: Progress | None = None,
) -> AnalyzedTraces:
    """Read the traces of a job and report on them.

    ``step``: only the ProfilerStep of this number. ``top``: the largest number of kernels that are listed. ``machine``:
    the machine whose links messages are compared with. ``axes``: the axes of a layout, by the members of their groups.
    Raises ``UserError`` for files that are no traces, or not of one job.
    """
    job = read_traces(paths, progress=progress)
    matched = match(job)
    starts = find_starts(job, matched)
    chosen = _choose_windows(job, step)
    pairs = [(trace, window) for trace in job.ranks for window in chosen[trace.rank]]
    first = min(
        window.start + trace.shift for trace, window in [*pairs, *((rank, rank.full_window()) for rank in job.ranks)]
    )
    waits_by_rank = measure_waits(job, matched, starts)
    lines = {trace.rank: Timeline(trace, waits=waits_by_rank.get(trace.rank)) for trace in job.ranks}
    messages_of = partial(messages.list_message_lines, matched=matched, starts=starts, machine=machine, axes=axes)
    lowest = job.ranks[0]
    kinds, kernels = breakdown.sum_kernel_lines(pairs)
    orders = {trace.rank: EndOrder(trace) for trace in job.ranks}
    sums, last_path = PathSums(), list[Segment]()
    for windows in _list_steps(job, chosen, progress):
        last_path = find_critical_path(orders, windows, matched=matched, starts=starts)
        sums.add(last_path)
    report = TraceReport(
        device="GPU" if job.device == "GPU" else "CPU",
        world=job.world,
        ranks=tuple(rank.rank for rank in job.ranks),
        files=tuple(str(rank.recording.path) for rank in job.ranks),
        steps=tuple(dict.fromkeys(window.name for _, window in pairs)),
        total=tuple(lines[trace.rank].breakdown(trace.full_window(), first=first) for trace in job.ranks),
        breakdown=tuple(lines[trace.rank].breakdown(window, first=first) for trace, window in pairs),
        categories=tuple(kinds),
        kernels=tuple(kernels[:top]),
        messages=tuple(messages_of(pairs)),
        path_seconds=sums.mean_seconds,
        path=tuple(sums.list_parts(named=False)),
        path_names=tuple(sums.list_parts(named=True)[:top]),
        arrivals=tuple(count_late_arrivals(job, matched, starts)),
        remarks=(*job.remarks, *matched.remarks),
    )
    return AnalyzedTraces(report, messages_of([(lowest, window) for window in chosen[lowest.rank]]), last_path)


def _choose_windows(job: JobTraces, step: int | None) -> dict[int, list[StepWindow]]:
    """Return the windows by rank: the steps that every rank has, or the full trace if a rank has none."""
    numbers = [{window.number for window in trace.windows} for trace in job.ranks]
    shared = set.intersection(*numbers)
    if step is not None and step not in shared:
        shared_steps = ", ".join(map(str, sorted(shared)[:12])) or "none"
        raise UserError(f"--step {step}: no such ProfilerStep on every rank; they share: {shared_steps}")
    if not shared:
        if any(numbers):
            job.remarks.append("no ProfilerStep is on every rank: all of each trace is taken as one step")
        return {trace.rank: [trace.full_window()] for trace in job.ranks}
    missing_steps = set.union(*numbers) - shared
    if missing_steps:
        job.remarks.append(f"steps {', '.join(map(str, sorted(missing_steps)[:12]))} are not on every rank: left out")
    chosen_steps = shared if step is None else {step}
    by_number = {trace.rank: {window.number: window for window in reversed(trace.windows)} for trace in job.ranks}
    return {rank: [windows[number] for number in sorted(chosen_steps)] for rank, windows in by_number.items()}


def _list_steps(
    job: JobTraces, chosen: dict[int, list[StepWindow]], progress: Progress | None
) -> Iterator[dict[int, StepWindow]]:
    """Yield the windows of every step by rank, and report how many have been passed."""
    ranks = [trace.rank for trace in job.ranks]
    steps = list(zip(*(chosen[rank] for rank in ranks), strict=True))
    for done, windows in enumerate(steps):
        if progress:
            progress("critical paths", done, len(steps))
        yield dict(zip(ranks, windows, strict=True))

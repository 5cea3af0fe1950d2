"""The traces of one job: the rank of each file, whether they belong together, what is missing, one clock for all.

The clocks of several hosts are aligned by the ends of messages that ranks share, which are nearly the same moment on
every rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from fivefold.bounded_types import RANKS
from fivefold.errors import UserError
from fivefold.profiling.traces.rank_trace import RankEvents, rank_trace
from fivefold.profiling.traces.recording import TraceEvents, parse_ranks, read_trace
from fivefold.units import MIB, show_seconds

SUFFIXES = (".json", ".json.gz")
RANK_IN_NAME = re.compile(r"rank[-_]?(\d{1,7})(?!\d)", re.IGNORECASE)
MAX_CLOCK_OFFSET_NS = 60_000_000_000  # ns by which the clocks of two hosts may differ


Progress = Callable[[str, int, int], None]  # what, done, of how many


SLOW_OPTIONS = ("profile_memory", "with_stack")  # options of torch.profiler that slow the host


@dataclass
class JobTraces:
    """All traces of a job, by rank; ``remarks``: what was omitted or assumed."""

    ranks: list[RankEvents]
    world: int
    remarks: list[str] = field(default_factory=list)

    @property
    def device(self) -> str:
        """Return the kind of device that the kernels ran on."""
        return "GPU" if self.ranks[0].recording.has_gpu_kernels else "CPU"


def read_traces(paths: Sequence[Path], *, progress: Progress | None = None) -> JobTraces:
    """Read files and folders of traces of one job; raises ``UserError`` if they hold none, or traces of two jobs."""
    remarks: list[str] = []
    recordings: list[TraceEvents] = []
    files = _list_files(paths)
    sizes = [path.stat().st_size if path.is_file() else 0 for path, _ in files]
    for index, (path, named) in enumerate(files):
        report = partial(_report, progress, path.name, before=sum(sizes[:index]), total=sum(sizes))
        try:
            recordings.append(read_trace(path, report=report))
        except UserError as error:
            if named:
                raise
            remarks.append(f"left out: {str(error).replace(f'{path}', path.name)}")
    if not recordings:
        raise UserError(f"{paths[0]}: contains no PyTorch profiler trace; {'; '.join(remarks[:2]) or 'it is empty'}")
    ranks = _sort_by_rank(recordings, remarks)
    world = _check_one_job(ranks, remarks)
    rank_traces = [rank_trace(recording, rank=rank) for rank, recording in sorted(ranks.items())]
    remarks += [remark for recording in rank_traces for remark in recording.recording.remarks]
    recorded = {option for trace in ranks.values() for option in SLOW_OPTIONS if trace.metadata.get(option)}
    if recorded:
        remarks.append(f"recorded with {' and '.join(sorted(recorded))}: the host is slower than without")
    _set_origins(rank_traces)
    return JobTraces(rank_traces, world, remarks)


def _report(progress: Progress | None, name: str, size: int, *, before: int, total: int) -> None:
    """Call ``progress`` with how much of all files has been read, in MiB."""
    if progress:
        progress(f"{name} (MiB)", (before + size) // MIB, max(1, total // MIB))


def _list_files(paths: Sequence[Path]) -> list[tuple[Path, bool]]:
    """Return the files, and whether each was named by the user; of a folder all that may be traces."""
    files: list[tuple[Path, bool]] = []
    for path in paths:
        if path.is_dir():
            files_inside = sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES) and file.is_file())
            if not files_inside:
                raise UserError(f"{path} holds no .json or .json.gz; name trace files or their folder")
            files += [(file, False) for file in files_inside]
        else:
            files.append((path, True))
    return files


def _sort_by_rank(recordings: list[TraceEvents], remarks: list[str]) -> dict[int, TraceEvents]:
    """Return recordings by the rank that they state, that their file's name states, or else in their order."""
    ranks: dict[int, TraceEvents] = {}
    for index, recording in enumerate(recordings):
        rank = _count(recording, "rank")
        if rank is None:
            rank_in_name = RANK_IN_NAME.search(recording.path.name)
            rank = int(rank_in_name[1]) if rank_in_name else index
            if not rank_in_name and len(recordings) > 1:
                remarks.append(f"{recording.path.name} names no rank: read as rank {rank}, its place in the list")
        if rank in ranks:
            both = f"{ranks[rank].path} and {recording.path}"
            raise UserError(f"{both} are both traces of rank {rank}; give the traces of one job, one per rank")
        ranks[rank] = recording
    return ranks


def _count(recording: TraceEvents, key: str) -> int | None:
    """Return a number of ``distributedInfo``; None if it is not a number, or exceeds any number of ranks."""
    value = _get_info(recording).get(key)
    return value if type(value) is int and 0 <= value <= RANKS else None


def _get_info(recording: TraceEvents) -> dict[str, object]:
    info = recording.metadata.get("distributedInfo")
    return info if isinstance(info, dict) else {}


def _check_one_job(ranks: dict[int, TraceEvents], remarks: list[str]) -> int:
    """Return the world size; raises ``UserError`` if the files cannot be of one run."""
    worlds = {rank: size for rank, recording in ranks.items() if (size := _count(recording, "world_size"))}
    first = next(iter(ranks.values()))
    for rank, recording in ranks.items():
        if recording.has_gpu_kernels != first.has_gpu_kernels:
            raise UserError(
                f"{first.path} and {recording.path} are of two jobs: one ran on GPUs, the other on CPUs; give traces "
                "of one job"
            )
        if worlds.get(rank, size := next(iter(worlds.values()), 0)) != size:
            raise UserError(
                f"{first.path} and {recording.path} are of two jobs, of {size} and {worlds[rank]} ranks; give traces "
                "of one job"
            )
    _refuse_other_times(list(ranks.values()))
    world = max([*worlds.values(), max(ranks) + 1, 1])
    missing = world - len(ranks)
    if missing:
        missing_ranks = [str(rank) for rank in range(min(world, len(ranks) + 9)) if rank not in ranks]
        missing_list = ", ".join(missing_ranks[:8]) + (", …" if missing > 8 else "")
        remarks.append(
            f"{missing} of {world} ranks {'are' if missing > 1 else 'is'} missing ({missing_list}), "
            "so it is not known who waited for them"
        )
    return world


def _refuse_other_times(recordings: list[TraceEvents]) -> None:
    """Raise ``UserError`` if the recordings do not overlap in time, so that they are of two runs."""
    spans = [
        (recording.origin + int(recording.start.min()), recording.origin + int(recording.end.max()), recording.path)
        for recording in recordings
    ]
    begins = max(spans, key=lambda span: span[0])
    ends = min(spans, key=lambda span: span[1])
    gap_ns = begins[0] - ends[1]
    if gap_ns > MAX_CLOCK_OFFSET_NS:
        raise UserError(
            f"{ends[2]} and {begins[2]} are traces of two runs, {show_seconds(gap_ns / 1e9)} apart; "
            "give traces of one run"
        )


def _set_origins(ranks: list[RankEvents]) -> None:
    """Shift every rank's times to count from the earliest origin."""
    first = min(trace.recording.origin for trace in ranks)
    for trace in ranks:
        trace.shift = trace.recording.origin - first


def read_groups(trace: RankEvents) -> dict[str, tuple[int, ...]]:
    """Return the members of each process group that the trace lists, by name."""
    entries = _get_info(trace.recording).get("pg_config")
    groups: dict[str, tuple[int, ...]] = {}
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict):
            groups[str(entry.get("pg_name", ""))] = parse_ranks(entry.get("ranks"))
    return groups

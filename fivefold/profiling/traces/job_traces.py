"""The traces of one job: which file is which rank, whether they belong together, what is missing, one clock for all.

Clocks of several hosts are set by the ends of messages that ranks share, which are nearly the same moment everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from fivefold.bounded_types import RANKS
from fivefold.profiling.traces.rank_trace import RankTrace, rank_trace
from fivefold.profiling.traces.recording import Recording, ranks_in, record
from fivefold.record import Mistake
from fivefold.units import MIB, show_seconds

SUFFIXES = (".json", ".json.gz")
RANK_IN_NAME = re.compile(r"rank[-_]?(\d{1,7})(?!\d)", re.IGNORECASE)
SLACK = 60_000_000_000  # ns by which clocks of two hosts may differ


Progress = Callable[[str, int, int], None]  # what, done, of how many


@dataclass
class JobTraces:
    """All traces, by rank; ``remarks``: what was left out or assumed."""

    ranks: list[RankTrace]
    world: int
    remarks: list[str] = field(default_factory=list)

    @property
    def device(self) -> str:
        """What the kernels ran on."""
        return "GPU" if self.ranks[0].recording.on_gpu else "CPU"


def read_traces(paths: Sequence[Path], *, progress: Progress | None = None) -> JobTraces:
    """Read files and folders of traces of one job; raises ``Mistake`` if they are none, or of two jobs."""
    remarks: list[str] = []
    found: list[Recording] = []
    files = _files(paths)
    sizes = [path.stat().st_size if path.is_file() else 0 for path, _ in files]
    for place, (path, named) in enumerate(files):
        report = partial(_report, progress, path.name, before=sum(sizes[:place]), total=sum(sizes))
        try:
            found.append(record(path, report=report))
        except Mistake as error:
            if named:
                raise
            remarks.append(f"left out: {str(error).replace(f'{path}', path.name)}")
    if not found:
        raise Mistake(f"{paths[0]}: no trace of PyTorch's profiler in it; {'; '.join(remarks[:2]) or 'it is empty'}")
    ranks = _by_rank(found, remarks)
    world = _one_job(ranks, remarks)
    sorted_out = [rank_trace(each, rank=rank) for rank, each in sorted(ranks.items())]
    remarks += [remark for each in sorted_out for remark in each.recording.remarks]
    _set_origins(sorted_out)
    return JobTraces(sorted_out, world, remarks)


def _report(progress: Progress | None, name: str, size: int, *, before: int, total: int) -> None:
    """Tell ``progress`` how much of all files has been read, in MiB."""
    if progress:
        progress(f"{name} (MiB)", (before + size) // MIB, max(1, total // MIB))


def _files(paths: Sequence[Path]) -> list[tuple[Path, bool]]:
    """Files, and whether each was named; of a folder all that may be traces."""
    files: list[tuple[Path, bool]] = []
    for path in paths:
        if path.is_dir():
            within = sorted(each for each in path.iterdir() if each.name.endswith(SUFFIXES) and each.is_file())
            if not within:
                raise Mistake(f"{path}: holds no .json or .json.gz; name trace files or their folder")
            files += [(each, False) for each in within]
        else:
            files.append((path, True))
    return files


def _by_rank(found: list[Recording], remarks: list[str]) -> dict[int, Recording]:
    """Recordings by the rank that they say, that their file's name says, or else in their order."""
    ranks: dict[int, Recording] = {}
    for place, each in enumerate(found):
        rank = _count(each, "rank")
        if rank is None:
            named = RANK_IN_NAME.search(each.path.name)
            rank = int(named[1]) if named else place
            if not named and len(found) > 1:
                remarks.append(f"{each.path.name} says no rank: taken as rank {rank}, by its place")
        if rank in ranks:
            both = f"{ranks[rank].path} and {each.path}"
            raise Mistake(f"{both} are both of rank {rank}; give the traces of one job, one of each rank")
        ranks[rank] = each
    return ranks


def _count(found: Recording, key: str) -> int | None:
    """A number of ``distributedInfo``; None if it is none, or more than there are ranks anywhere."""
    value = _info(found).get(key)
    return value if type(value) is int and 0 <= value <= RANKS else None


def _info(found: Recording) -> dict[str, object]:
    info = found.metadata.get("distributedInfo")
    return info if isinstance(info, dict) else {}


def _one_job(ranks: dict[int, Recording], remarks: list[str]) -> int:
    """Return the world's size; raises ``Mistake`` if the files cannot be of one run."""
    worlds = {rank: size for rank, each in ranks.items() if (size := _count(each, "world_size"))}
    first = next(iter(ranks.values()))
    for rank, each in ranks.items():
        if each.on_gpu != first.on_gpu:
            raise Mistake(f"{first.path} and {each.path} are of two jobs: one ran on GPUs, the other on CPUs")
        if worlds.get(rank, size := next(iter(worlds.values()), 0)) != size:
            raise Mistake(f"{first.path} and {each.path} are of two jobs, of {size} and {worlds[rank]} ranks")
    _refuse_other_times(list(ranks.values()))
    world = max([*worlds.values(), max(ranks) + 1, 1])
    missing = world - len(ranks)
    if missing:
        which = [str(rank) for rank in range(min(world, len(ranks) + 9)) if rank not in ranks]
        listed = ", ".join(which[:8]) + (", …" if missing > 8 else "")
        remarks.append(
            f"{missing} of {world} ranks {'are' if missing > 1 else 'is'} not here ({listed}): "
            "who waited for them is not known"
        )
    return world


def _refuse_other_times(found: list[Recording]) -> None:
    spans = [(each.origin + int(each.start.min()), each.origin + int(each.end.max()), each.path) for each in found]
    begins, ends = max(spans, key=lambda span: span[0]), min(spans, key=lambda span: span[1])
    apart = begins[0] - ends[1]
    if apart > SLACK:
        raise Mistake(
            f"{ends[2]} and {begins[2]} are of two runs: {show_seconds(apart / 1e9)} lie between them; "
            "give traces of one"
        )


def _set_origins(ranks: list[RankTrace]) -> None:
    """Shift every rank's times to count from the earliest origin."""
    first = min(each.recording.origin for each in ranks)
    for each in ranks:
        each.shift = each.recording.origin - first


def groups_of(found: RankTrace) -> dict[str, tuple[int, ...]]:
    """Return the members of each process group that the trace lists, by name."""
    listed = _info(found.recording).get("pg_config")
    groups: dict[str, tuple[int, ...]] = {}
    for each in listed if isinstance(listed, list) else ():
        if isinstance(each, dict):
            groups[str(each.get("pg_name", ""))] = ranks_in(each.get("ranks"))
    return groups

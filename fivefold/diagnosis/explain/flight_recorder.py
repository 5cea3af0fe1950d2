"""Explain flight recorders of torch.distributed, one per rank: who did not join which collective, and what differs.

    by group, collective by collective: same operation, dtype and sizes on all ranks → all there → all done

The first collective of a group that fails this is its problem. If several groups have one, the cause is the one whose
missing ranks do not themselves wait in another. Format: torch/csrc/distributed/c10d/FlightRecorder.hpp, pickle or JSON.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from fivefold.diagnosis.explain.frames import find_user_line, parse_frames
from fivefold.errors import UserError
from fivefold.results.explanation import Explanation, RankAt

ANY_INPUT = ("all_to_all", "alltoall_base", "scatter", "coalesced")  # input sizes may differ between ranks
ANY_OUTPUT = ("all_to_all", "alltoall_base", "gather", "coalesced")


class CollectiveEntry(NamedTuple):
    """One collective on one rank."""

    rank: int
    group: str  # name and ranks
    number: int  # collective_seq_id
    name: str
    sizes: str  # dtype and sizes that all ranks must share
    shown: str  # sizes for messages
    done: bool
    line: str
    at: int  # ns

    def __str__(self) -> str:
        return f"{self.name} {self.shown}".rstrip()


class Problem(NamedTuple):
    """The first collective of a group that did not complete on all ranks."""

    kind: Literal["mismatch", "missing", "stuck"]
    group: str
    number: int
    present: dict[int, CollectiveEntry]
    missing: tuple[int, ...]

    @property
    def name(self) -> str:
        """Return the name of the collective for messages."""
        return f"collective {self.number}, {next(iter(self.present.values()))}, of {_shorten_group(self.group)}"


def is_dump(data: object) -> bool:
    """Return whether ``data`` looks like a rank's dump."""
    return isinstance(data, dict) and "entries" in data and ("pg_config" in data or "version" in data)


def explain(dumps: Mapping[int, dict[str, Any]], *, files: tuple[str, ...]) -> Explanation:
    """Explain what stopped a job, by the dumps of its ranks."""
    entries = {rank: list(_list_entries(dump, rank, origin=files[0])) for rank, dump in dumps.items()}
    members = _list_members(dumps)
    last_entry = {
        rank: max(rank_entries, key=lambda entry: entry.at) for rank, rank_entries in entries.items() if rank_entries
    }
    problems = [
        problem
        for group in dict.fromkeys(entry.group for rank_entries in entries.values() for entry in rank_entries)
        if (problem := _find_problem(group, entries, members.get(group, ()))) is not None
    ]
    ranks = tuple(_rank_at(rank, problems, last_entry.get(rank)) for rank in sorted(dumps))
    if not problems:
        verdict = "every collective that is in the dumps has ended on every rank: it did not hang in one"
        findings = ["where the ranks were else: stacks, by py-spy dump or TORCH_SHOW_CPP_STACKTRACES=1"]
    else:
        cause = _find_cause(problems)
        verdict, findings = _describe_problem(cause), list(_list_findings(cause, problems))
    absent = sorted({rank for group_ranks in members.values() for rank in group_ranks} - set(dumps))
    if absent:
        findings.append(f"no dump of {_format_rank_ranges(absent)}: it may have ended, or never written one")
    return Explanation(kind="flight recorder", files=files, verdict=verdict, findings=tuple(findings), ranks=ranks)


# Reading


def _list_entries(dump: dict[str, Any], rank: int, *, origin: str) -> Iterator[CollectiveEntry]:
    """Yield the collectives of one rank, without sends and receives, which are numbered by pairs of ranks."""
    raw_entries = dump["entries"]
    if not isinstance(raw_entries, list):
        raise UserError(f"{origin}: a flight recorder dump whose entries are not a list; give a file that torch wrote")
    for raw_entry in (item for item in raw_entries if isinstance(item, dict)):
        name = str(raw_entry.get("profiling_name", "")).rpartition(":")[2].strip()
        if raw_entry.get("is_p2p") or re.match(r"(send|recv|isend|irecv)\b", name):
            continue
        group = raw_entry.get("process_group") or [raw_entry.get("pg_id", 0), ""]
        number = raw_entry.get("collective_seq_id", raw_entry.get("seq_id", 0))
        yield CollectiveEntry(
            rank=rank,
            group=_name_group(dump, str(group[0]), str(group[1] if len(group) > 1 else "")),
            number=number if isinstance(number, int) else 0,
            name=name,
            sizes=_format_sizes(raw_entry, name),
            shown=_format_input(raw_entry),
            done=raw_entry.get("state") == "completed" or bool(raw_entry.get("retired")),
            line=find_user_line(parse_frames(raw_entry.get("frames"))),
            at=int(raw_entry.get("time_created_ns") or 0),
        )


def _format_sizes(entry: dict[str, Any], name: str) -> str:
    """Return what has to be equal on every rank."""
    inputs = None if name in ANY_INPUT else entry.get("input_sizes")
    outputs = None if name in ANY_OUTPUT else entry.get("output_sizes")
    return json.dumps([inputs, outputs, entry.get("input_dtypes") if inputs is not None else None], default=str)


def _format_input(entry: dict[str, Any]) -> str:
    sizes = entry.get("input_sizes") or []
    dtypes = entry.get("input_dtypes") or []
    first = next((size for size in sizes if isinstance(size, list | tuple)), None)
    dtype = f" {str(dtypes[0]).lower()}" if dtypes and first is not None else ""
    return f"{list(first)}{dtype}" if first is not None else ""


def _find_config(dump: dict[str, Any], name: str) -> dict[str, Any]:
    config = dump.get("pg_config")
    group_config = config.get(name) if isinstance(config, dict) else None
    return group_config if isinstance(group_config, dict) else {}


def _group_ranks(dump: dict[str, Any], name: str) -> tuple[int, ...]:
    numbers = re.findall(r"\d{1,7}", str(_find_config(dump, name).get("ranks", "")))
    return tuple(sorted(map(int, numbers)))


def _name_group(dump: dict[str, Any], name: str, about: str) -> str:
    """Return a group's name for messages, also used as its key: equal names with other ranks are other groups."""
    about = "" if about in ("", "undefined") else about
    ranks = ",".join(map(str, _group_ranks(dump, name)))
    return f"{about or f'group {name}'} (ranks {ranks})" if ranks else about or f"group {name}"


def _list_members(dumps: Mapping[int, dict[str, Any]]) -> dict[str, tuple[int, ...]]:
    ranks_by_group = {}
    for dump in dumps.values():
        config = dump.get("pg_config")
        for name, group_config in config.items() if isinstance(config, dict) else ():
            if (ranks := _group_ranks(dump, name)) and isinstance(group_config, dict):
                ranks_by_group[_name_group(dump, str(name), str(group_config.get("desc", "")))] = ranks
    return ranks_by_group


# Judging


def _find_problem(
    group: str, entries: Mapping[int, Sequence[CollectiveEntry]], members: Sequence[int]
) -> Problem | None:
    """Return the first collective of a group that differs, is missing or is not done on some of its ranks."""
    by_rank = {
        rank: {entry.number: entry for entry in rank_entries if entry.group == group}
        for rank, rank_entries in entries.items()
    }
    ranks = [rank for rank in by_rank if (rank in members if members else by_rank[rank])]
    if not members and len(ranks) == 1:
        ranks = list(by_rank)  # the members are not known; a rank waits only for others, so all count as members
    present_numbers = [numbers for rank in ranks if (numbers := by_rank[rank])]
    # The ring buffers of ranks begin at different collectives.
    first = max((min(numbers) for numbers in present_numbers), default=0)
    last = max((max(numbers) for numbers in present_numbers), default=-1)
    late_problem = None
    for number in range(first, last + 1):
        present = {rank: by_rank[rank][number] for rank in ranks if number in by_rank[rank]}
        missing = tuple(rank for rank in ranks if rank not in present)
        if len({(entry.name, entry.sizes) for entry in present.values()}) > 1:
            return Problem("mismatch", group, number, present, missing)
        if missing and present:
            return Problem("missing", group, number, present, missing)
        done = [entry.done for entry in present.values()]
        if not any(done) and present:
            return Problem("stuck", group, number, present, ())
        if not all(done) and late_problem is None:  # a late report, unless nothing else is wrong
            late_problem = Problem("stuck", group, number, present, ())
    return late_problem


def _find_cause(problems: Sequence[Problem]) -> Problem:
    """Return the problem that explains the others: a mismatch, else one whose missing ranks do not wait elsewhere."""
    waiting = {rank for other in problems for rank, entry in other.present.items() if not entry.done}

    def sort_key(problem: Problem) -> tuple[int, int, int]:
        kinds = {"mismatch": 0, "missing": 1 if set(problem.missing) - waiting else 2, "stuck": 3}
        elsewhere = len(waiting.intersection(problem.missing))
        return kinds[problem.kind], elsewhere, min(entry.at for entry in problem.present.values())

    cause = min(problems, key=sort_key)
    idle_ranks = tuple(rank for rank in cause.missing if rank not in waiting)
    return cause._replace(missing=idle_ranks) if idle_ranks else cause


def _describe_problem(problem: Problem) -> str:
    """Return the sentence that names the collective and the ranks which did not agree."""
    if problem.kind == "mismatch":
        parts: dict[str, list[CollectiveEntry]] = defaultdict(list)
        for entry in problem.present.values():
            parts[f"{entry.name} {entry.sizes}"].append(entry)
        calls = [
            f"{_format_rank_ranges(entry.rank for entry in same_calls)} "
            f"{'calls' if len(same_calls) == 1 else 'call'} {same_calls[0]}"
            + (f" at {same_calls[0].line}" if same_calls[0].line else "")
            for same_calls in sorted(parts.values(), key=len)
        ]
        return f"collective {problem.number} of {_shorten_group(problem.group)} differs: {'; '.join(calls)}"
    if problem.kind == "missing":
        waiting = next(iter(problem.present.values()))
        where = f", at {waiting.line}" if waiting.line else ""
        gave_up = all(entry.done for entry in problem.present.values())  # retired at the time limit
        wait = "waited until the time limit" if gave_up else "waits" if len(problem.present) == 1 else "wait"
        place = f"{problem.name}, in which {_format_rank_ranges(problem.present)} {wait}{where}"
        return f"{_format_rank_ranges(problem.missing)} did not come to {place}"
    entry = next(candidate for candidate in problem.present.values() if not candidate.done)
    where = f", at {entry.line}" if entry.line else ""
    return f"all {len(problem.present)} ranks came to {problem.name}{where}, and it did not end"


def _list_findings(cause: Problem, problems: Sequence[Problem]) -> Iterator[str]:
    """Yield further findings about the cause, and how many other groups stopped."""
    waiting = {rank: problem for problem in problems for rank, entry in problem.present.items() if not entry.done}
    for rank in cause.missing if cause.kind == "missing" else ():
        if rank in waiting:
            yield (
                f"rank {rank} waits meanwhile in {waiting[rank].name}: ranks call collectives of different "
                "groups in a different order"
            )
    if cause.kind == "stuck":
        undone = [rank for rank, entry in cause.present.items() if not entry.done]
        if len(undone) < len(cause.present):
            ranks = _format_rank_ranges(undone)
            yield f"it has ended on the others but not on {ranks}: look at that rank's GPU and links"
        else:
            yield "the calls agree, so it is the network, a GPU, or work before it on the same stream"
    if cause.kind == "mismatch":
        names = Counter(entry.name for entry in cause.present.values())
        yield "a branch that not all ranks take" if len(names) > 1 else "sizes that depend on a rank's own data"
    other_problems = [problem for problem in problems if (problem.group, problem.number) != (cause.group, cause.number)]
    if other_problems:
        yield (
            f"{len(other_problems)} further group{'s' if len(other_problems) > 1 else ''} stopped too, "
            f"such as {other_problems[0].name}"
        )


def _rank_at(rank: int, problems: Sequence[Problem], last: CollectiveEntry | None) -> RankAt:
    """Return the last collective of a rank, and whether it waits, gave up or has ended."""
    for problem in problems:
        entry = problem.present.get(rank)
        if entry is not None and not entry.done:
            return RankAt(rank=str(rank), state=f"waits in {problem.name}", line=entry.line)
        if entry is not None and problem.kind == "missing":
            return RankAt(rank=str(rank), state=f"gave up waiting in {problem.name}", line=entry.line)
    if last is None:
        return RankAt(rank=str(rank), state="has called no collective")
    word = "has ended" if last.done else "waits in"
    return RankAt(
        rank=str(rank),
        state=f"{word} collective {last.number}, {last}, of {_shorten_group(last.group)}",
        line=last.line,
    )


def _shorten_group(group: str) -> str:
    return group if len(group) < 60 else f"{group[:50]}…)"


def _format_rank_ranges(ranks: Any) -> str:
    sorted_ranks = sorted(ranks)
    if len(sorted_ranks) == 1:
        return f"rank {sorted_ranks[0]}"
    listed = ", ".join(map(str, sorted_ranks[:8])) + (" …" if len(sorted_ranks) > 8 else "")
    return f"ranks {listed}"

"""Reads flight recorders of torch.distributed, one per rank: who did not come to which collective, and what differs.

    by group, collective by collective: same operation, dtype and sizes on all ranks → all there → all done

The first collective of a group that fails this is its problem. Of several groups that one is the cause whose missing
ranks do not themselves wait in another. Format: torch/csrc/distributed/c10d/FlightRecorder.hpp, pickle or JSON.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from fivefold.diagnosis.explain.frames import frames, user_line
from fivefold.record import Mistake
from fivefold.results.explanation import Explanation, RankAt

ANY_INPUT = ("all_to_all", "alltoall_base", "scatter", "coalesced")  # whose sizes may differ between ranks
ANY_OUTPUT = ("all_to_all", "alltoall_base", "gather", "coalesced")


class Entry(NamedTuple):
    """One collective on one rank."""

    rank: int
    group: str  # name and ranks
    number: int  # collective_seq_id
    name: str
    sizes: str  # dtype and sizes that all ranks must share
    shown: str  # sizes for people
    done: bool
    line: str
    at: int  # ns

    def __str__(self) -> str:
        return f"{self.name} {self.shown}".rstrip()


class Problem(NamedTuple):
    """The first collective of a group that did not end well."""

    kind: Literal["mismatch", "missing", "stuck"]
    group: str
    number: int
    present: dict[int, Entry]
    missing: tuple[int, ...]

    @property
    def name(self) -> str:
        """What the collective is called."""
        return f"collective {self.number}, {next(iter(self.present.values()))}, of {_short(self.group)}"


def is_dump(data: object) -> bool:
    """Whether ``data`` looks like a rank's dump."""
    return isinstance(data, dict) and "entries" in data and ("pg_config" in data or "version" in data)


def explain(dumps: Mapping[int, dict[str, Any]], *, files: tuple[str, ...]) -> Explanation:
    """What stopped a job, by the dumps of its ranks."""
    entries = {rank: list(_entries(dump, rank, origin=files[0])) for rank, dump in dumps.items()}
    members = _members(dumps)
    last = {rank: max(of, key=lambda each: each.at) for rank, of in entries.items() if of}
    problems = [found for group in dict.fromkeys(each.group for of in entries.values() for each in of)
                if (found := _problem(group, entries, members.get(group, ()))) is not None]  # fmt: skip
    ranks = tuple(_rank_at(rank, problems, last.get(rank)) for rank in sorted(dumps))
    if not problems:
        verdict = "every collective that is in the dumps has ended on every rank: it did not hang in one"
        findings = ["where the ranks were else: stacks, by py-spy dump or TORCH_SHOW_CPP_STACKTRACES=1"]
    else:
        cause = _cause(problems)
        verdict, findings = _verdict(cause), list(_findings(cause, problems))
    absent = sorted({rank for of in members.values() for rank in of} - set(dumps))
    if absent:
        findings.append(f"no dump of {_ranks(absent)}: it may have ended, or never come to write one")
    return Explanation(kind="flight recorder", files=files, verdict=verdict, findings=tuple(findings), ranks=ranks)


# Reading


def _entries(dump: dict[str, Any], rank: int, *, origin: str) -> Iterator[Entry]:
    """The collectives of one rank; sends and receives are left out, for they are numbered by pairs of ranks."""
    raw = dump["entries"]
    if not isinstance(raw, list):
        raise Mistake(f"{origin}: a flight recorder whose entries are no list")
    for each in (one for one in raw if isinstance(one, dict)):
        name = str(each.get("profiling_name", "")).rpartition(":")[2].strip()
        if each.get("is_p2p") or re.match(r"(send|recv|isend|irecv)\b", name):
            continue
        group = each.get("process_group") or [each.get("pg_id", 0), ""]
        number = each.get("collective_seq_id", each.get("seq_id", 0))
        yield Entry(
            rank=rank, group=_key(dump, str(group[0]), str(group[1] if len(group) > 1 else "")),
            number=number if isinstance(number, int) else 0, name=name, sizes=_sizes(each, name),
            shown=_shown(each), done=each.get("state") == "completed" or bool(each.get("retired")),
            line=user_line(frames(each.get("frames"))), at=int(each.get("time_created_ns") or 0),
        )  # fmt: skip


def _sizes(each: dict[str, Any], name: str) -> str:
    """What has to be the same on every rank."""
    inputs = None if name in ANY_INPUT else each.get("input_sizes")
    outputs = None if name in ANY_OUTPUT else each.get("output_sizes")
    return json.dumps([inputs, outputs, each.get("input_dtypes") if inputs is not None else None], default=str)


def _shown(each: dict[str, Any]) -> str:
    sizes, dtypes = each.get("input_sizes") or [], each.get("input_dtypes") or []
    first = next((size for size in sizes if isinstance(size, list | tuple)), None)
    dtype = f" {str(dtypes[0]).lower()}" if dtypes and first is not None else ""
    return f"{list(first)}{dtype}" if first is not None else ""


def _config(dump: dict[str, Any], name: str) -> dict[str, Any]:
    config = dump.get("pg_config")
    found = config.get(name) if isinstance(config, dict) else None
    return found if isinstance(found, dict) else {}


def _group_ranks(dump: dict[str, Any], name: str) -> tuple[int, ...]:
    found = re.findall(r"\d{1,7}", str(_config(dump, name).get("ranks", "")))
    return tuple(sorted(map(int, found)))


def _key(dump: dict[str, Any], name: str, about: str) -> str:
    """A group's name for people and as a key: groups of one name but other ranks are others."""
    about = "" if about in ("", "undefined") else about
    ranks = ",".join(map(str, _group_ranks(dump, name)))
    return f"{about or f'group {name}'} (ranks {ranks})" if ranks else about or f"group {name}"


def _members(dumps: Mapping[int, dict[str, Any]]) -> dict[str, tuple[int, ...]]:
    found = {}
    for dump in dumps.values():
        config = dump.get("pg_config")
        for name, of in config.items() if isinstance(config, dict) else ():
            if (ranks := _group_ranks(dump, name)) and isinstance(of, dict):
                found[_key(dump, str(name), str(of.get("desc", "")))] = ranks
    return found


# Judging


def _problem(group: str, entries: Mapping[int, Sequence[Entry]], members: Sequence[int]) -> Problem | None:
    """The first collective of a group that is not the same, not there or not done on all of its ranks."""
    by_rank = {rank: {each.number: each for each in of if each.group == group} for rank, of in entries.items()}
    ranks = [rank for rank in by_rank if (rank in members if members else by_rank[rank])]
    if not members and len(ranks) == 1:
        ranks = list(by_rank)  # nobody says who belongs to it; alone it waits for nobody
    there = [numbers for rank in ranks if (numbers := by_rank[rank])]
    first = max((min(numbers) for numbers in there), default=0)  # rings are of different length
    last, behind = max((max(numbers) for numbers in there), default=-1), None
    for number in range(first, last + 1):
        present = {rank: by_rank[rank][number] for rank in ranks if number in by_rank[rank]}
        missing = tuple(rank for rank in ranks if rank not in present)
        if len({(each.name, each.sizes) for each in present.values()}) > 1:
            return Problem("mismatch", group, number, present, missing)
        if missing and present:
            return Problem("missing", group, number, present, missing)
        done = [each.done for each in present.values()]
        if not any(done) and present:
            return Problem("stuck", group, number, present, ())
        if not all(done) and behind is None:  # a late report, unless nothing else is wrong
            behind = Problem("stuck", group, number, present, ())
    return behind


def _cause(problems: Sequence[Problem]) -> Problem:
    """The problem that explains the others: a mismatch, else one whose missing ranks do not wait elsewhere."""
    waiting = {rank for each in problems for rank, entry in each.present.items() if not entry.done}

    def weight(problem: Problem) -> tuple[int, int, int]:
        kinds = {"mismatch": 0, "missing": 1 if set(problem.missing) - waiting else 2, "stuck": 3}
        elsewhere = len(waiting.intersection(problem.missing))
        return kinds[problem.kind], elsewhere, min(each.at for each in problem.present.values())

    cause = min(problems, key=weight)
    idle = tuple(rank for rank in cause.missing if rank not in waiting)
    return cause._replace(missing=idle) if idle else cause


def _verdict(problem: Problem) -> str:
    if problem.kind == "mismatch":
        parts: dict[str, list[Entry]] = defaultdict(list)
        for entry in problem.present.values():
            parts[f"{entry.name} {entry.sizes}"].append(entry)
        said = [f"{_ranks(entry.rank for entry in of)} {'calls' if len(of) == 1 else 'call'} {of[0]}"
                + (f" at {of[0].line}" if of[0].line else "") for of in sorted(parts.values(), key=len)]  # fmt: skip
        return f"collective {problem.number} of {_short(problem.group)} differs: {'; '.join(said)}"
    if problem.kind == "missing":
        waits = next(iter(problem.present.values()))
        at = f", at {waits.line}" if waits.line else ""
        wait = f"{_ranks(problem.present)} {'waits' if len(problem.present) == 1 else 'wait'}"
        return f"{_ranks(problem.missing)} did not come to {problem.name}, in which {wait}{at}"
    entry = next(each for each in problem.present.values() if not each.done)
    at = f", at {entry.line}" if entry.line else ""
    return f"all {len(problem.present)} ranks came to {problem.name}{at}, and it did not end"


def _findings(cause: Problem, problems: Sequence[Problem]) -> Iterator[str]:
    waiting = {rank: each for each in problems for rank, entry in each.present.items() if not entry.done}
    for rank in cause.missing if cause.kind == "missing" else ():
        if rank in waiting:
            yield (f"rank {rank} waits meanwhile in {waiting[rank].name}: ranks call collectives of different "
                   "groups in a different order")  # fmt: skip
    if cause.kind == "stuck":
        undone = [rank for rank, entry in cause.present.items() if not entry.done]
        if len(undone) < len(cause.present):
            yield f"it has ended on the others but not on {_ranks(undone)}: look at that rank's GPU and links"
        else:
            yield "the calls agree, so it is the network, a GPU, or work before it on the same stream"
    if cause.kind == "mismatch":
        names = Counter(each.name for each in cause.present.values())
        yield "a branch that not all ranks take" if len(names) > 1 else "sizes that depend on a rank's own data"
    others = [each for each in problems if (each.group, each.number) != (cause.group, cause.number)]
    if others:
        yield f"{len(others)} further group{'s' if len(others) > 1 else ''} stopped too, such as {others[0].name}"


def _rank_at(rank: int, problems: Sequence[Problem], last: Entry | None) -> RankAt:
    for problem in problems:
        entry = problem.present.get(rank)
        if entry is not None and not entry.done:
            return RankAt(rank=str(rank), state=f"waits in {problem.name}", line=entry.line)
    if last is None:
        return RankAt(rank=str(rank), state="has called no collective")
    word = "has ended" if last.done else "waits in"
    return RankAt(rank=str(rank), state=f"{word} collective {last.number}, {last}, of {_short(last.group)}",
                  line=last.line)  # fmt: skip


def _short(group: str) -> str:
    return group if len(group) < 60 else f"{group[:50]}…)"


def _ranks(ranks: Any) -> str:
    found = sorted(ranks)
    if len(found) == 1:
        return f"rank {found[0]}"
    shown = ", ".join(map(str, found[:8])) + (" …" if len(found) > 8 else "")
    return f"ranks {shown}"

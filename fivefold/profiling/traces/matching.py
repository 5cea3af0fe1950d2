"""Which kernels of the ranks are one message: the same group and collective, in the same step and place in order.

rank 0     |·····wait·····|━━━━━━|        All have arrived when the last one's kernel begins; what each one's kernel
rank 1              |··wait··|━━━|        took before is waiting, the rest is the message itself.
rank 2                    |━━━━━━|
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from statistics import median
from typing import NamedTuple

import numpy as np

from fivefold.profiling.traces.intervals import Intervals, union
from fivefold.profiling.traces.job_traces import JobTraces, groups_of
from fivefold.profiling.traces.recording import Message
from fivefold.units import show_seconds

SIZED = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")  # every rank's bytes are the same


class Group(NamedTuple):
    """A process group, as far as its traces say."""

    name: str
    about: str
    ranks: int | None
    members: tuple[int, ...]


class _Key(NamedTuple):
    group: str
    members: tuple[int, ...]  # of a pair the sender first
    collective: str
    size: int | None
    step: int
    sequence: int = -1


class Part(NamedTuple):
    """One rank's row of a message."""

    rank: int
    row: int


@dataclass
class Matched:
    """Messages of all members, and of each rank's row with what it is one, if all of its members are at hand."""

    groups: dict[Part, Group] = field(default_factory=dict)
    whole: dict[Part, tuple[Part, ...]] = field(default_factory=dict)  # all parts of the message, this one too
    remarks: list[str] = field(default_factory=list)


def match(job: JobTraces) -> Matched:
    """Match the messages of all ranks, and set the clocks of ranks on other hosts by them."""
    found = Matched()
    rows: dict[_Key, dict[int, list[Part]]] = {}  # of messages that have all in common but their place in order
    unmatched: Counter[str] = Counter()
    for trace in job.ranks:
        group_of = lru_cache(maxsize=None)(partial(_group, rank=trace.rank, listed=groups_of(trace), world=job.world))
        for row in np.flatnonzero(trace.message >= 0).tolist():
            message = trace.messages[trace.message[row]]
            part = Part(trace.rank, row)
            group = group_of(message.group, message.about, message.ranks, message.members)
            found.groups[part] = group
            key = _key(message, group, trace.rank, step=int(trace.step[row]))
            if key is None:
                unmatched[message.collective] += 1
            else:
                rows.setdefault(key, {}).setdefault(trace.rank, []).append(part)
    at_hand, incomplete = {trace.rank for trace in job.ranks}, 0
    for key, of_rank in rows.items():
        if len(key.members) < 2 or not at_hand.issuperset(key.members):
            continue
        if of_rank.keys() == set(key.members) and len({len(parts) for parts in of_rank.values()}) == 1:
            for message_parts in zip(*of_rank.values(), strict=True):
                found.whole |= dict.fromkeys(message_parts, message_parts)
        else:
            incomplete += max(map(len, of_rank.values()))
    if incomplete:
        found.remarks.append(f"{incomplete:,} messages are not in the traces of all their ranks: not matched")
    for collective, times in sorted(unmatched.items()):
        found.remarks.append(f"{times:,} {collective} do not say between which ranks: not matched")
    _set_clocks(job, found)
    return found


def _group(
    name: str, about: str, ranks: int | None, members: tuple[int, ...], *, rank: int,
    listed: dict[str, tuple[int, ...]], world: int,
) -> Group:  # fmt: skip
    """The group of a message; where it is unsaid, the only one of several ranks that the trace lists for ``rank``."""
    members = members or listed.get(name, ())
    ranks = ranks or (len(members) or None)
    if not name and not members:
        kinds = {each for each in listed.values() if rank in each and len(each) > 1}
        if len(kinds) == 1 or world == 2:
            members = next(iter(kinds)) if len(kinds) == 1 else tuple(range(world))
            ranks = len(members)
    if not members and ranks == world:
        members = tuple(range(world))
    return Group(name, about, ranks, members)


def _key(message: Message, group: Group, rank: int, *, step: int) -> _Key | None:
    """What the parts of one message have in common beside their order; None if the trace does not say who has one."""
    if message.collective in ("send", "recv"):
        sends = message.collective == "send"
        peer = message.target if sends else message.source
        others = [each for each in group.members if each != rank]
        if peer < 0 and len(others) == 1:
            peer = others[0]
        pair = (rank, peer) if sends else (peer, rank)
        return _Key(group.name, pair, "p2p", None, step) if peer >= 0 else None
    if message.collective == "coalesced" or not group.members:
        return None
    size = payload(message, group) if message.collective in SIZED else None
    if message.sequence >= 0:
        return _Key(group.name, group.members, message.collective, size, -1, message.sequence)
    return _Key(group.name, group.members, message.collective, size, step)


def payload(message: Message, group: Group) -> int | None:
    """Bytes of the full tensor (docs/notation.md §5); None if the trace does not say."""
    sent, received, ranks = message.bytes_in, message.bytes_out, group.ranks
    if message.collective in ("all_gather", "gather"):
        if sent is not None and ranks:
            return sent * ranks
        return received
    return sent if sent is not None else received


def waits(job: JobTraces, found: Matched, starts: dict[Part, int]) -> dict[int, Intervals]:
    """Return when the kernels of each rank that shares messages waited for another to arrive.

    ``starts``: on the clock of all ranks.
    """
    until: dict[int, dict[int, int]] = {}
    for part, parts in found.whole.items():
        until.setdefault(part.rank, {})[part.row] = arrival(parts, starts)
    waited = {}
    for trace in job.ranks:
        if rows := until.get(trace.rank):
            here = np.fromiter(rows, np.int64)
            ends = np.fromiter(rows.values(), np.int64) - trace.shift
            waited[trace.rank] = union(trace.start[here], np.minimum(ends, trace.end[here]))
    return waited


def starts_of(job: JobTraces, found: Matched) -> dict[Part, int]:
    """Return when the kernel of each matched part begins, on the clock of all ranks."""
    by_rank = {trace.rank: trace for trace in job.ranks}
    return {part: int(by_rank[part.rank].start[part.row]) + by_rank[part.rank].shift for part in found.whole}


def arrival(parts: Sequence[Part], starts: dict[Part, int]) -> int:
    """Return when the last one had arrived."""
    return max(starts[part] for part in parts)


def _set_clocks(job: JobTraces, found: Matched) -> None:
    """Set the clock of each rank on another host than the first's by the median of where their messages end."""
    hosts = {trace.rank: trace.recording.metadata.get("host_name") for trace in job.ranks}
    first, *others = job.ranks
    away = [trace for trace in others if hosts[trace.rank] != hosts[first.rank]]
    if not away:
        return
    ends: dict[int, list[int]] = defaultdict(list)
    by_rank = {trace.rank: trace for trace in job.ranks}
    for parts in set(found.whole.values()):
        at = {part.rank: int(by_rank[part.rank].end[part.row]) + by_rank[part.rank].shift for part in parts}
        known = [rank for rank in at if hosts[rank] == hosts[first.rank]]
        for trace in away:
            if known and trace.rank in at:
                ends[trace.rank].append(at[trace.rank] - at[known[0]])
    for trace in away:
        apart = ends.get(trace.rank)
        if not apart:
            found.remarks.append(
                f"rank {trace.rank} is on another host and shares no message: its clock is as recorded"
            )
            continue
        offset = int(median(apart))
        spread = median(abs(each - offset) for each in apart)
        trace.shift -= offset
        found.remarks.append(
            f"rank {trace.rank} is on another host: its clock is set {show_seconds(abs(offset) / 1e9)} "
            f"{'back' if offset > 0 else 'on'}, by where {len(apart)} messages end (± {show_seconds(spread / 1e9)})"
        )

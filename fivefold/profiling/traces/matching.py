"""Match kernels of the ranks that are one message: the same group and collective, in the same step and order.

rank 0     |·····wait·····|━━━━━━|        All ranks have arrived when the kernel of the last one begins. The time of
rank 1              |··wait··|━━━|        each kernel before that is waiting; the rest is the message itself.
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

from fivefold.profiling.traces.intervals import Intervals, merge_intervals
from fivefold.profiling.traces.job_traces import JobTraces, read_groups
from fivefold.profiling.traces.recording import RecordedMessage
from fivefold.units import show_seconds

SIZED = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")  # collectives in which every rank has equal bytes


class TraceGroup(NamedTuple):
    """A process group, as far as its traces describe it."""

    name: str
    about: str
    ranks: int | None
    members: tuple[int, ...]


class _MessageKey(NamedTuple):
    group: str
    members: tuple[int, ...]  # for a pair: sender, receiver
    collective: str
    size: int | None
    step: int
    sequence: int = -1


class MessagePart(NamedTuple):
    """The row of one rank that belongs to a message."""

    rank: int
    row: int


@dataclass
class Matched:
    """The messages of all ranks: the group of each row, and all rows of its message if every member has a trace."""

    groups: dict[MessagePart, TraceGroup] = field(default_factory=dict)
    message_parts: dict[MessagePart, tuple[MessagePart, ...]] = field(
        default_factory=dict
    )  # all parts of the message, this one too
    remarks: list[str] = field(default_factory=list)


def match(job: JobTraces) -> Matched:
    """Match the messages of all ranks, and align the clocks of ranks on other hosts by them."""
    matched = Matched()
    rows: dict[
        _MessageKey, dict[int, list[MessagePart]]
    ] = {}  # messages with equal keys, which only their order tells apart
    unmatched: Counter[str] = Counter()
    for trace in job.ranks:
        group_of = lru_cache(maxsize=None)(partial(_group, rank=trace.rank, listed=read_groups(trace), world=job.world))
        for row in np.flatnonzero(trace.message >= 0).tolist():
            message = trace.messages[trace.message[row]]
            part = MessagePart(trace.rank, row)
            group = group_of(message.group, message.about, message.ranks, message.members)
            matched.groups[part] = group
            key = _build_key(message, group, trace.rank, step=int(trace.step[row]))
            if key is None:
                unmatched[message.collective] += 1
            else:
                rows.setdefault(key, {}).setdefault(trace.rank, []).append(part)
    traced_ranks, incomplete = {trace.rank for trace in job.ranks}, 0
    for key, parts_by_rank in rows.items():
        if len(key.members) < 2 or not traced_ranks.issuperset(key.members):
            continue
        if parts_by_rank.keys() == set(key.members) and len({len(parts) for parts in parts_by_rank.values()}) == 1:
            for message_parts in zip(*parts_by_rank.values(), strict=True):
                matched.message_parts |= dict.fromkeys(message_parts, message_parts)
        else:
            incomplete += max(map(len, parts_by_rank.values()))
    if incomplete:
        matched.remarks.append(f"{incomplete:,} messages are not in the traces of all their ranks: not matched")
    for collective, times in sorted(unmatched.items()):
        matched.remarks.append(f"{times:,} {collective} do not say between which ranks: not matched")
    _set_clocks(job, matched)
    return matched


def _group(
    name: str,
    about: str,
    ranks: int | None,
    members: tuple[int, ...],
    *,
    rank: int,
    listed: dict[str, tuple[int, ...]],
    world: int,
) -> TraceGroup:
    """Return the group of a message.

    If the message does not state it, this is the only group of several ranks that the trace lists for ``rank``.
    """
    members = members or listed.get(name, ())
    ranks = ranks or (len(members) or None)
    if not name and not members:
        kinds = {ranks_listed for ranks_listed in listed.values() if rank in ranks_listed and len(ranks_listed) > 1}
        if len(kinds) == 1 or world == 2:
            members = next(iter(kinds)) if len(kinds) == 1 else tuple(range(world))
            ranks = len(members)
    if not members and ranks == world:
        members = tuple(range(world))
    return TraceGroup(name, about, ranks, members)


def _build_key(message: RecordedMessage, group: TraceGroup, rank: int, *, step: int) -> _MessageKey | None:
    """Return what the parts of one message have in common besides their order; None if the trace does not say."""
    if message.collective in ("send", "recv"):
        sends = message.collective == "send"
        peer = message.target if sends else message.source
        other_members = [member for member in group.members if member != rank]
        if peer < 0 and len(other_members) == 1:
            peer = other_members[0]
        pair = (rank, peer) if sends else (peer, rank)
        return _MessageKey(group.name, pair, "p2p", None, step) if peer >= 0 else None
    if message.collective == "coalesced" or not group.members:
        return None
    size = compute_payload(message, group) if message.collective in SIZED else None
    if message.sequence >= 0:
        return _MessageKey(group.name, group.members, message.collective, size, -1, message.sequence)
    return _MessageKey(group.name, group.members, message.collective, size, step)


def compute_payload(message: RecordedMessage, group: TraceGroup) -> int | None:
    """Return the bytes of the full tensor (docs/notation.md §5); None if the trace does not say."""
    sent, received, ranks = message.bytes_in, message.bytes_out, group.ranks
    if message.collective in ("all_gather", "gather"):
        if sent is not None and ranks:
            return sent * ranks
        return received
    return sent if sent is not None else received


def measure_waits(job: JobTraces, matched: Matched, starts: dict[MessagePart, int]) -> dict[int, Intervals]:
    """Return when the kernels of each rank that shares messages waited for another rank to arrive.

    ``starts`` are on the clock of all ranks.
    """
    until: dict[int, dict[int, int]] = {}
    for part, parts in matched.message_parts.items():
        until.setdefault(part.rank, {})[part.row] = find_last_arrival(parts, starts)
    waits_by_rank = {}
    for trace in job.ranks:
        if rows := until.get(trace.rank):
            rank_rows = np.fromiter(rows, np.int64)
            ends = np.fromiter(rows.values(), np.int64) - trace.shift
            waits_by_rank[trace.rank] = merge_intervals(trace.start[rank_rows], np.minimum(ends, trace.end[rank_rows]))
    return waits_by_rank


def find_starts(job: JobTraces, matched: Matched) -> dict[MessagePart, int]:
    """Return when the kernel of each matched part begins, on the clock of all ranks."""
    by_rank = {trace.rank: trace for trace in job.ranks}
    return {part: int(by_rank[part.rank].start[part.row]) + by_rank[part.rank].shift for part in matched.message_parts}


def find_last_arrival(parts: Sequence[MessagePart], starts: dict[MessagePart, int]) -> int:
    """Return when the last rank had arrived."""
    return max(starts[part] for part in parts)


def _set_clocks(job: JobTraces, matched: Matched) -> None:
    """Align the clocks of ranks on other hosts with the first rank's, by the median offset of message ends."""
    hosts = {trace.rank: trace.recording.metadata.get("host_name") for trace in job.ranks}
    first, *other_traces = job.ranks
    remote_traces = [trace for trace in other_traces if hosts[trace.rank] != hosts[first.rank]]
    if not remote_traces:
        return
    ends: dict[int, list[int]] = defaultdict(list)
    by_rank = {trace.rank: trace for trace in job.ranks}
    for parts in set(matched.message_parts.values()):
        ends_by_rank = {part.rank: int(by_rank[part.rank].end[part.row]) + by_rank[part.rank].shift for part in parts}
        ranks_of_first_host = [rank for rank in ends_by_rank if hosts[rank] == hosts[first.rank]]
        for trace in remote_traces:
            if ranks_of_first_host and trace.rank in ends_by_rank:
                ends[trace.rank].append(ends_by_rank[trace.rank] - ends_by_rank[ranks_of_first_host[0]])
    for trace in remote_traces:
        offsets = ends.get(trace.rank)
        if not offsets:
            matched.remarks.append(
                f"rank {trace.rank} is on another host and shares no message: its clock is as recorded"
            )
            continue
        offset = int(median(offsets))
        spread = median(abs(value - offset) for value in offsets)
        trace.shift -= offset
        matched.remarks.append(
            f"rank {trace.rank} is on another host: its clock is moved {show_seconds(abs(offset) / 1e9)} "
            f"{'earlier' if offset > 0 else 'later'}, so that {len(offsets)} shared messages end together (± "
            f"{show_seconds(spread / 1e9)})"
        )

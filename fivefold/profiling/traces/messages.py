"""Summarize messages by group and collective: number, size, time, and bandwidth over which link.

algorithm bandwidth = bytes of the full tensor ÷ seconds     bus bandwidth = bytes a rank sends on a ring ÷ seconds

Seconds count from the last arrival, where the traces of all members are available. Source: NVIDIA/nccl-tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fivefold.machine.spec import Machine
from fivefold.profiling.traces.matching import Matched, MessagePart, TraceGroup, compute_payload, find_last_arrival
from fivefold.profiling.traces.rank_trace import RankEvents, StepWindow
from fivefold.results.trace_report import MessageLine
from fivefold.step import count_sent_bytes


class _LineSums:
    """The sums over the messages of one line."""

    def __init__(self) -> None:
        self.messages, self.seconds = 0, 0.0
        self.waiting: float | None = 0.0  # None as soon as it is unknown for one message
        self.bytes: int | None = 0
        self.sent: int | None = 0
        self.place = ("", None)

    def add(self, seconds: float, waiting: float | None, size: int | None, sent: int | None) -> None:
        """Add a message to the sums."""
        self.messages += 1
        self.seconds += seconds
        self.waiting = None if waiting is None or self.waiting is None else self.waiting + waiting
        self.bytes = None if size is None or self.bytes is None else self.bytes + size
        self.sent = None if sent is None or self.sent is None else self.sent + sent


class _LineKey(NamedTuple):
    group: str
    axis: str
    ranks: int | None
    collective: str
    link: str
    bandwidth: float | None


def list_message_lines(
    windows: Sequence[tuple[RankEvents, StepWindow]],
    *,
    matched: Matched,
    starts: dict[MessagePart, int],
    machine: Machine | None = None,
    axes: dict[tuple[int, ...], str] | None = None,
) -> list[MessageLine]:
    """Return a line per group and collective, as means over the windows, those that take longest first.

    ``axes``: the axes of a layout, by the members of their groups.
    """
    sums: dict[_LineKey, _LineSums] = {}
    for trace, window in windows:
        rows = trace.rows_in(window)
        for row in (np.flatnonzero(trace.message[rows] >= 0) + rows.start).tolist():
            part = MessagePart(trace.rank, row)
            message = trace.messages[trace.message[row]]
            group = matched.groups[part]
            size = compute_payload(message, group)
            collective = message.collective
            sent = None
            if size is not None and group.ranks:
                sent = count_sent_bytes(collective, payload=size, ranks=group.ranks)
            seconds = int(trace.end[row] - trace.start[row]) / 1e9
            waiting = None
            if part in matched.message_parts:
                wait_ns = find_last_arrival(matched.message_parts[part], starts) - starts[part]
                waiting = min(wait_ns / 1e9, seconds)
            axis = (axes or {}).get(group.members, "")
            key = _LineKey(_name_group(group), axis, group.ranks, collective, *_link(group, trace.rank, machine))
            sums.setdefault(key, _LineSums()).add(seconds, waiting, size, sent)
    message_lines = [_build_line(key, total, len(windows)) for key, total in sums.items()]
    return sorted(message_lines, key=lambda line: (-line.seconds, line.group, line.collective))


def _name_group(group: TraceGroup) -> str:
    """Return the name of a group: its description if it has one, else its own name, else its ranks."""
    if group.about and group.about != "undefined":
        return group.about
    if group.name:
        return f"group {group.name}"
    rank_list = ", ".join(map(str, group.members[:4])) + (", …" if len(group.members) > 4 else "")
    return f"ranks {rank_list}" if rank_list else "unknown"


def _link(group: TraceGroup, rank: int, machine: Machine | None) -> tuple[str, float | None]:
    """Return the link that bounds a ring over a group, and its bus bandwidth in one direction.

    Within a node this is the nearest link that spans the group; otherwise as many NICs as the group has ranks in a
    node, or the link within the node if that is slower.
    """
    if machine is None or len(group.members) < 2:
        return "", None
    inner_link, node = machine.links[0], machine.ranks_per_node
    local = sum(member // node == rank // node for member in group.members)
    first, last = group.members[0], group.members[-1]
    if first // node == last // node:
        link = machine.link(last % node - first % node + 1)
        share = (local - 1) / (link.span - 1) if link.direct and local < link.span else 1.0
        return link.name, share * link.bandwidth
    outer_link = machine.link(max(last - first + 1, inner_link.span + 1))
    nic_bandwidth = local * outer_link.bandwidth
    return (
        (inner_link.name, inner_link.bandwidth)
        if local > 1 and inner_link.bandwidth < nic_bandwidth
        else (outer_link.name, nic_bandwidth)
    )


def _build_line(key: _LineKey, total: _LineSums, number: int) -> MessageLine:
    """Return one line of the table of messages, as means over ``number`` steps."""
    moving = total.seconds - (total.waiting or 0.0)
    rates = [size / moving if size is not None and moving > 0 else None for size in (total.bytes, total.sent)]
    return MessageLine(
        group=key.group,
        axis=key.axis,
        ranks=key.ranks,
        collective=key.collective,
        calls=total.messages / number,
        bytes=None if total.bytes is None else total.bytes / number,
        seconds=total.seconds / number,
        waiting_seconds=None if total.waiting is None else total.waiting / number,
        algorithm_bandwidth=rates[0],
        bus_bandwidth=rates[1],
        link=key.link,
        link_bandwidth=key.bandwidth,
    )

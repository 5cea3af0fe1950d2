"""The point-to-point schedule of a rank: when to post each receive, and when to wait for each send.

A message is named by the part that makes it: F of a stage goes to the rank of the next stage, B to the previous one.
    receives   posted one action ahead; those from one rank in the order in which it sends
    sends      waited for before the first action that starts after the receiver's action has ended, if F, B and W
               all take one unit of time
All waits agree with this one timeline, so ranks cannot deadlock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from fivefold.layout.schedule.action import Action, Part, needs, parts
from fivefold.layout.schedule.order import Task
from fivefold.layout.schedule.play import play
from fivefold.layout.schedule.table import Table


class P2PStep(NamedTuple):
    """An action, with the receives to post and the own sends to wait for before it."""

    action: Action
    post_receives: tuple[Part, ...]
    wait_sends: tuple[Part, ...]


def receiver(part: Part, *, path: Sequence[int]) -> int | None:
    """The rank to which the output of ``part`` is sent; None if it stays on its rank or is not sent."""
    kind, stage, _ = part
    to = {"F": stage + 1, "B": stage - 1}.get(kind, -1)
    if not 0 <= to < len(path) or path[to] == path[stage]:
        return None
    return path[to]


def links(table: Table) -> tuple[tuple[str, int, int], ...]:
    """All distinct (kind F or B, source rank, target rank) of a table, in the same order on every rank."""
    found = {
        (kind, path[stage], target)
        for i, path in enumerate(table.paths)
        for stage in range(table.stages)
        for kind in ("F", "B")
        if (target := receiver((kind, stage, i), path=path)) is not None
    }
    return tuple(sorted(found))


def p2p_steps(table: Table, *, rank: int) -> tuple[P2PStep, ...]:
    """The actions of ``rank`` with its messages; ``Mistake`` if the table deadlocks."""
    row = table.rows[rank]
    return tuple(map(P2PStep, row, _receives_to_post(table, rank=rank), _sends_to_wait(table, rank=rank)))


def _receives_to_post(table: Table, *, rank: int) -> list[tuple[Part, ...]]:
    """Per action, the receives to post before it: those of the next action, and earlier ones of the same sender."""
    lines: dict[tuple[str, int], list[Part]] = defaultdict(list)  # messages from each rank, in sending order
    for source, row in enumerate(table.rows):
        for part in (part for action in row for part in parts(action)):
            if receiver(part, path=table.paths[part[2]]) == rank:
                lines[part[0], source].append(part)
    waiting = {part: line for line in lines.values() for part in line}
    by_action: list[list[Part]] = [[] for _ in table.rows[rank]]
    for index, action in enumerate(table.rows[rank]):
        for need in needs(action, stages=table.stages):
            line = waiting.get(need, [])
            while need in line:
                by_action[max(0, index - 1)].append(line.pop(0))
    return list(map(tuple, by_action))


def _sends_to_wait(table: Table, *, rank: int) -> list[tuple[Part, ...]]:
    """Per action, the own sends to wait for before it: those whose receivers are done, in unit time."""
    spans = play(table, seconds=_unit_time).spans
    ends = {part: span.end for row in spans for span in row for part in parts(span.action)}
    under_way: list[tuple[float, Part]] = []
    found = []
    for span in spans[rank]:
        found.append(tuple(part for end, part in under_way if end <= span.start))
        under_way = [(end, part) for end, part in under_way if end > span.start]
        for part in parts(span.action):
            kind, stage, i = part
            if receiver(part, path=table.paths[i]) is not None:
                under_way.append((ends[kind, stage + 1 if kind == "F" else stage - 1, i], part))
    return found


def _unit_time(task: Task) -> float:
    return {"BW": 2.0, "FB": 3.0}.get(task.kind, 1.0)

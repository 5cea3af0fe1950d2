"""The point-to-point schedule of a rank: when to post each receive, and when to wait for each send.

A message has the name of the part that produces it: F of a stage is sent to the rank of the next stage, B to that of
the previous one.
    receives   are posted one action ahead; those from one rank in the order in which it sends
    sends      are waited for before the first action that starts after the receiver's action has ended, if F, B and W
               all take one unit of time
All waits follow this one timeline, so ranks cannot deadlock.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from fivefold.layout.schedule.action import Action, Part, list_dependencies, list_parts
from fivefold.layout.schedule.order import Task
from fivefold.layout.schedule.simulation import simulate_schedule
from fivefold.layout.schedule.table import Table


class P2PStep(NamedTuple):
    """An action, with the receives to post and the sends to wait for before it."""

    action: Action
    post_receives: tuple[Part, ...]
    wait_sends: tuple[Part, ...]


def find_receiver(part: Part, table: Table) -> int | None:
    """Return the rank to which the output of ``part`` is sent; None if it stays on its rank or is not sent."""
    kind, stage, micro_batch = part
    path = table.paths[micro_batch]
    target_stage = {"F": stage + 1, "B": stage - 1 if stage > table.first_backward else -1}.get(kind, -1)
    if not 0 <= target_stage < len(path) or path[target_stage] == path[stage]:
        return None
    return path[target_stage]


def list_links(table: Table) -> tuple[tuple[str, int, int], ...]:
    """Return all distinct (kind F or B, source rank, target rank) of a table, in the same order on every rank."""
    kinds_and_ranks = {
        (kind, path[stage], target)
        for micro_batch, path in enumerate(table.paths)
        for stage in range(table.stages)
        for kind in ("F", "B")
        if (target := find_receiver((kind, stage, micro_batch), table)) is not None
    }
    return tuple(sorted(kinds_and_ranks))


def list_p2p_steps(table: Table, *, rank: int) -> tuple[P2PStep, ...]:
    """Return the actions of ``rank`` with its messages; ``UserError`` if the table deadlocks."""
    row = table.rows[rank]
    return tuple(map(P2PStep, row, _list_receives(table, rank=rank), _list_sends(table, rank=rank)))


def _list_receives(table: Table, *, rank: int) -> list[tuple[Part, ...]]:
    """Return for each action the receives to post before it: those of the next one, and earlier ones of that sender."""
    queues: dict[tuple[str, int], list[Part]] = defaultdict(list)  # messages from each rank, in sending order
    for source, row in enumerate(table.rows):
        for part in (part for action in row for part in list_parts(action)):
            if find_receiver(part, table) == rank:
                queues[part[0], source].append(part)
    waiting = {part: queue for queue in queues.values() for part in queue}
    by_action: list[list[Part]] = [[] for _ in table.rows[rank]]
    for index, action in enumerate(table.rows[rank]):
        for dependency in list_dependencies(action, stages=table.stages):
            queue = waiting.get(dependency, [])
            while dependency in queue:
                by_action[max(0, index - 1)].append(queue.pop(0))
    return list(map(tuple, by_action))


def _list_sends(table: Table, *, rank: int) -> list[tuple[Part, ...]]:
    """Return for each action the sends to wait for before it: those whose receivers are done, in unit time."""
    spans = simulate_schedule(table, seconds=_get_unit_time).spans
    ends = {part: span.end for row in spans for span in row for part in list_parts(span.action)}
    in_flight: list[tuple[float, Part]] = []
    sends = []
    for span in spans[rank]:
        sends.append(tuple(part for end, part in in_flight if end <= span.start))
        in_flight = [(end, part) for end, part in in_flight if end > span.start]
        for part in list_parts(span.action):
            kind, stage, micro_batch = part
            if find_receiver(part, table) is not None:
                in_flight.append((ends[kind, stage + 1 if kind == "F" else stage - 1, micro_batch], part))
    return sends


def _get_unit_time(task: Task) -> float:
    return {"BW": 2.0, "FB": 3.0}.get(task.kind, 1.0)

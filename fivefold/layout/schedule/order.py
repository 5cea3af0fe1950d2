"""Topological order of a table: all actions of all ranks in one list, in which none depends on a later one.

Computed once per table, so that ``play`` with any durations is one pass over six integers per action.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from fivefold.layout.schedule.action import Action, Kind, Part, named, needs, parts
from fivefold.record import Mistake

Row = tuple[Action, ...]


class Task(NamedTuple):
    """A kind of action with one duration; ``backward_stage`` is -1 except for ``FB``."""

    kind: Kind
    stage: int
    backward_stage: int


class OrderedAction(NamedTuple):
    """One action. ``first``, ``second``: indices of actions on other ranks that it waits for, or -1, and their hops."""

    rank: int
    task: int
    first: int
    first_hop: int
    second: int
    second_hop: int


class Order(NamedTuple):
    """The actions in order, with the distinct tasks and hops (from rank, to rank) that they index."""

    tasks: tuple[Task, ...]
    hops: tuple[tuple[int, int], ...]
    actions: tuple[OrderedAction, ...]


def order(rows: Sequence[Row], *, stages: int) -> Order:
    """Run each rank until it must wait, resume it when that part is done; ``Mistake`` on deadlock."""
    done: dict[Part, int] = {}  # part → index of its action
    waiting: dict[Part, list[int]] = {}  # part → ranks blocked on it
    tasks: dict[Task, int] = {}
    hops: dict[tuple[int, int], int] = {}
    actions: list[OrderedAction] = []
    position = [0] * len(rows)
    awake = deque(range(len(rows)))
    while awake:
        rank = awake.popleft()
        row = rows[rank]
        while position[rank] < len(row):
            action = row[position[rank]]
            needed = needs(action, stages=stages)
            missing = next((part for part in needed if part not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            links = [
                (turn, hops.setdefault((actions[turn].rank, rank), len(hops)))
                for turn in map(done.__getitem__, needed)
                if actions[turn].rank != rank
            ]
            (first, first_hop), (second, second_hop) = (*links, (-1, 0), (-1, 0))[:2]
            task = tasks.setdefault(Task(action.kind, action.stage, action.backward_stage), len(tasks))
            for part in parts(action):
                done[part] = len(actions)
                awake.extend(waiting.pop(part, ()))
            actions.append(OrderedAction(rank, task, first, first_hop, second, second_hop))
            position[rank] += 1
    if len(actions) < sum(map(len, rows)):
        raise _deadlock({rows[rank][position[rank]]: (rank, part) for part, ranks in waiting.items() for rank in ranks})
    return Order(tuple(tasks), tuple(hops), tuple(actions))


def _deadlock(stuck: dict[Action, tuple[int, Part]]) -> Mistake:
    stands = sorted(f"rank {rank} at {action} waits for {named(part)}" for action, (rank, part) in stuck.items())
    more = f" and {len(stands) - 3} more" if len(stands) > 3 else ""
    return Mistake(f"deadlock: {', '.join(stands[:3])}{more}; reorder one of them")

"""Topological order of a table: all actions of all ranks in one list, in which none depends on a later one.

Computed once per table, so that ``play`` with any durations is one pass over six integers per action.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from fivefold.layout.schedule.action import Action, Kind, named
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
    done: dict[int, tuple[int, int]] = {}  # part, as in ``_coded`` → index of its action, and its rank
    waiting: dict[int, list[int]] = {}  # part → ranks blocked on it
    tasks: dict[tuple[Kind, int, int], int] = {}
    hops: dict[tuple[int, int], int] = {}
    actions: list[OrderedAction] = []
    coded = [[_coded(action, stages) for action in row] for row in rows]
    position = [0] * len(rows)
    awake = deque(range(len(rows)))
    while awake:
        rank = awake.popleft()
        row = coded[rank]
        for at in range(position[rank], len(row)):
            task, needed, made = row[at]
            links = list[int]()
            for part in needed:
                if part not in done:
                    waiting.setdefault(part, []).append(rank)
                    break
                turn, source = done[part]
                if source != rank:
                    links += turn, hops.setdefault((source, rank), len(hops))
            else:
                for part in made:
                    done[part] = len(actions), rank
                    if part in waiting:
                        awake.extend(waiting.pop(part))
                actions.append(OrderedAction(rank, tasks.setdefault(task, len(tasks)), *(*links, -1, 0, -1, 0)[:4]))
                continue
            break
        else:
            at = len(row)
        position[rank] = at
    if len(actions) < sum(map(len, rows)):
        raise _deadlock({rows[rank][position[rank]]: (rank, part) for part, ranks in waiting.items() for rank in ranks},
                        stages)  # fmt: skip
    return Order(tuple(Task(*task) for task in tasks), tuple(hops), tuple(actions))


def _coded(action: Action, stages: int) -> tuple[tuple[Kind, int, int], tuple[int, ...], tuple[int, ...]]:
    """An action's task, and the parts of ``action.needs`` and ``parts`` as numbers, but for W, for which none waits.

    F of a stage and micro-batch is 2 (micro-batch · stages + stage), B one more.
    """
    kind, stage, micro_batch, backward_stage, backward_micro_batch = action
    task, forward = (kind, stage, backward_stage), 2 * (micro_batch * stages + stage)
    ahead = (forward - 2,) if stage else ()
    if kind == "F":
        return task, ahead, (forward,)
    if kind == "W":
        return task, (forward + 1,), ()
    if kind == "FB":
        back = 2 * (backward_micro_batch * stages + backward_stage)
        behind = (back, back + 3) if backward_stage + 1 < stages else (back,)
        return task, (*ahead, *behind), (forward, back + 1)
    return task, (forward, forward + 3) if stage + 1 < stages else (forward,), (forward + 1,)


def _deadlock(stuck: dict[Action, tuple[int, int]], stages: int) -> Mistake:
    def name(part: int) -> str:
        return named(("FB"[part % 2], part // 2 % stages, part // 2 // stages))

    stands = sorted(f"rank {rank} at {action} waits for {name(part)}" for action, (rank, part) in stuck.items())
    more = f" and {len(stands) - 3} more" if len(stands) > 3 else ""
    return Mistake(f"deadlock: {', '.join(stands[:3])}{more}; reorder one of them")

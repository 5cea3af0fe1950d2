"""Topological order of a table: all actions of all ranks in one list, in which none depends on a later one.

Computed once per table, so that ``play`` with any durations is one pass over six integers per action.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from fivefold.layout.schedule.action import Kind, named
from fivefold.layout.schedule.columns import KINDS, Columns, Needs, needs_of
from fivefold.record import Mistake

if TYPE_CHECKING:
    from fivefold.layout.schedule.columns import Ints


class Task(NamedTuple):
    """A kind of action with one duration; ``backward_stage`` is -1 except for ``FB``."""

    kind: Kind
    stage: int
    backward_stage: int

    def on_stages(self, stages: Sequence[int]) -> Task:
        """Return the task with each of its stages replaced by the one that ``stages`` names for it."""
        kind, stage, back = self
        return Task(kind, stages[stage], stages[back] if back >= 0 else -1)


class Order(NamedTuple):
    """The distinct tasks, and hops (from rank, to rank), and of each action, in order, its rank and task and up to two
    actions on other ranks that it waits for: their indices in the order, or -1, and their hops. ``places``: for each
    action of ``Columns`` its index in this order.
    """

    tasks: tuple[Task, ...]
    hops: tuple[tuple[int, int], ...]
    rank: list[int]
    task: list[int]
    first: list[int]
    first_hop: list[int]
    second: list[int]
    second_hop: list[int]
    places: Ints

    @property
    def actions(self) -> Iterator[tuple[int, int, int, int, int, int]]:
        """Rank, task, first, its hop, second, its hop of each action."""
        return zip(*self[2:8], strict=True)


def order(columns: Columns, *, stages: int) -> Order:
    """Run each rank until it must wait, resume it when that part is done; ``Mistake`` on deadlock."""
    import numpy as np

    needs = needs_of(columns, stages=stages)
    turns = np.array(_turns(columns, needs, stages), np.int64)
    places = np.empty_like(turns)
    places[turns] = np.arange(len(turns))
    rank, others = columns.rank[turns], needs.maker[needs.parts[turns]]
    one, two, three = ((others >= 0) & (columns.rank[others] != rank[:, None])).T  # of which on other ranks
    at, pp = np.arange(len(turns)), int(rank.max(initial=0)) + 1
    first = np.where(one | two | three, others[at, np.where(one, 0, np.where(two, 1, 2))], -1)
    second = np.where((one & two) | ((one | two) & three), others[at, np.where(one & two, 1, 2)], -1)
    links = np.stack([first, second], axis=1)
    sent = links >= 0
    numbers, hop = np.zeros_like(links), (columns.rank[links] * pp + rank[:, None])[sent]
    hops, numbers[sent] = _distinct(hop)
    width = stages + 1
    kinds = (columns.kind[turns] * width + columns.stage[turns]) * width + columns.backward_stage[turns] + 1
    tasks, task = _distinct(kinds)
    targets = np.where(sent, places[links], -1)
    return Order(
        tuple(Task(KINDS[code // width**2], code // width % width, code % width - 1) for code in tasks.tolist()),
        tuple(divmod(code, pp) for code in hops.tolist()),
        rank.tolist(), task.tolist(), targets[:, 0].tolist(), numbers[:, 0].tolist(), targets[:, 1].tolist(),
        numbers[:, 1].tolist(), places,
    )  # fmt: skip


def _turns(columns: Columns, needs: Needs, stages: int) -> list[int]:
    """Indices of the actions in order."""
    import numpy as np

    ends = np.searchsorted(columns.rank, np.arange(int(columns.rank.max(initial=-1)) + 1), side="right").tolist()
    position, count = [0, *ends[:-1]], len(columns.rank)
    others = [column.tolist() for column in needs.maker[needs.parts].T]
    one, two, three = others
    done = bytearray(count + 2)  # the last but one: of an action that is missing
    done[-1] = 1  # of none
    waiting: dict[int, list[int]] = {}  # action → ranks blocked on it
    turns: list[int] = []
    awake = deque(range(len(ends)))
    while awake:
        rank = awake.popleft()
        at, end = position[rank], ends[rank]
        while at < end and done[one[at]] and done[two[at]] and done[three[at]]:
            turns.append(at)
            done[at] = 1
            if at in waiting:
                awake.extend(waiting.pop(at))
            at += 1
        position[rank] = at
        if at < end:
            missing = next(other[at] for other in others if not done[other[at]])
            waiting.setdefault(missing, []).append(rank)
    if len(turns) < count:
        raise _deadlock(columns, needs, [at for at, end in zip(position, ends, strict=True) if at < end], done, stages)
    return turns


def _distinct(codes: Ints) -> tuple[Ints, Ints]:
    """The distinct codes as they first come, and for each code its index among them."""
    import numpy as np

    first = np.full(int(codes.max(initial=0)) + 1, len(codes))
    first[codes[::-1]] = np.arange(len(codes))[::-1]
    values = np.argsort(first)[: int((first < len(codes)).sum())]
    number = np.zeros_like(first)
    number[values] = np.arange(len(values))
    return values, number[codes]


def _deadlock(columns: Columns, needs: Needs, stuck: list[int], done: bytearray, stages: int) -> Mistake:
    """``stuck``: the actions at which ranks stand."""

    def waits(at: int) -> str:
        part = next(part for part in needs.parts[at].tolist() if not done[needs.maker[part]])
        return named(("FB"[part % 2], part // 2 % stages, part // 2 // stages))

    stands = sorted(f"rank {columns.rank[at]} at {columns.action(at)} waits for {waits(at)}" for at in stuck)
    more = f" and {len(stands) - 3} more" if len(stands) > 3 else ""
    return Mistake(f"deadlock: {', '.join(stands[:3])}{more}; reorder one of them")

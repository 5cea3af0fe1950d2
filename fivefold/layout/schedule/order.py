"""The topological order of a table: all actions of all ranks in one list, in which none depends on a later one.

It is computed once per table, so that ``simulate_schedule`` is one pass over six integers per action for any durations.
With many ranks the actions are grouped in waves of actions that can start at once, which numpy simulates together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from fivefold.errors import UserError
from fivefold.layout.schedule.action import Kind, format_part
from fivefold.layout.schedule.columns import KINDS, Columns, Needs, build_dependencies

if TYPE_CHECKING:
    from fivefold.layout.schedule.columns import Ints


MIN_WAVE_RANKS = 16  # fewer ranks are faster one by one than with numpy


class Task(NamedTuple):
    """A kind of action with one duration; ``backward_stage`` is -1 except for ``FB``."""

    kind: Kind
    stage: int
    backward_stage: int

    def with_stages(self, stages: Sequence[int]) -> Task:
        """Return the task with each of its stages replaced by the one that ``stages`` names for it."""
        kind, stage, back = self
        return Task(kind, stages[stage], stages[back] if back >= 0 else -1)


@dataclass(frozen=True, eq=False)
class Order:
    """All actions of a table in topological order.

    ``tasks``: the distinct tasks; ``hops``: the distinct (from rank, to rank). For each action: its rank and task, and
    up to two actions on other ranks that it waits for, ``first`` and ``second``: their indices in the order, or -1, and
    their hops. ``places``: for each action of ``Columns`` its index in this order. ``wave_starts``: the first action of
    each wave, and the number of actions; None if the order is not one of waves.
    """

    tasks: tuple[Task, ...]
    hops: tuple[tuple[int, int], ...]
    rank: Ints
    task: Ints
    first: Ints
    first_hop: Ints
    second: Ints
    second_hop: Ints
    places: Ints
    wave_starts: list[int] | None

    @cached_property
    def actions(self) -> list[tuple[int, int, int, int, int, int]]:
        """Return rank, task, first, first_hop, second and second_hop of each action."""
        columns = (self.rank, self.task, self.first, self.first_hop, self.second, self.second_hop)
        return list(zip(*(column.tolist() for column in columns), strict=True))


def order(columns: Columns, *, stages: int) -> Order:
    """Find an order: wave by wave with many ranks, else rank by rank; ``UserError`` on deadlock."""
    import numpy as np

    needs = build_dependencies(columns, stages=stages)
    row_ends = np.searchsorted(columns.rank, np.arange(int(columns.rank.max(initial=-1)) + 1), side="right")
    waves = _sort_by_waves(needs, row_ends) if len(row_ends) >= MIN_WAVE_RANKS else None
    if waves is not None and sum(map(len, waves)) == len(columns.rank):
        wave_starts = [0, *accumulate(map(len, waves))]
        turns = np.concatenate(waves)
    else:
        wave_starts = None
        turns = np.array(_sort_by_ranks(columns, needs, row_ends.tolist(), stages), np.int64)
    places = np.empty_like(turns)
    places[turns] = np.arange(len(turns))
    rank, producers = columns.rank[turns], needs.maker[needs.parts[turns]]
    one, two, three = ((producers >= 0) & (columns.rank[producers] != rank[:, None])).T  # those on other ranks
    indices, pp = np.arange(len(turns)), int(rank.max(initial=0)) + 1
    first = np.where(one | two | three, producers[indices, np.where(one, 0, np.where(two, 1, 2))], -1)
    second = np.where((one & two) | ((one | two) & three), producers[indices, np.where(one & two, 1, 2)], -1)
    links = np.stack([first, second], axis=1)
    is_sent = links >= 0
    hop_numbers = np.zeros_like(links)
    hop = (columns.rank[links] * pp + rank[:, None])[is_sent]
    hops, hop_numbers[is_sent] = _factorize(hop)
    width = stages + 1
    kinds = (columns.kind[turns] * width + columns.stage[turns]) * width + columns.backward_stage[turns] + 1
    tasks, task = _factorize(kinds)
    targets = np.where(is_sent, places[links], -1)
    return Order(
        tuple(Task(KINDS[code // width**2], code // width % width, code % width - 1) for code in tasks.tolist()),
        tuple(divmod(code, pp) for code in hops.tolist()),
        rank,
        task,
        targets[:, 0],
        hop_numbers[:, 0],
        targets[:, 1],
        hop_numbers[:, 1],
        places,
        wave_starts,
    )


def _sort_by_waves(needs: Needs, row_ends: Ints) -> list[Ints]:
    """Return the indices of the actions, wave by wave: the next ones of all ranks that need not wait; all but stuck."""
    import numpy as np

    one, two, three = needs.maker[needs.parts].T.copy()
    done = np.zeros(len(one) + 2, bool)  # the last but one is for a missing action
    done[-1] = True  # the last one is for no dependency
    positions = np.append(0, row_ends[:-1])
    waves = list[Any]()
    while True:
        if (has_ended := positions == row_ends).any():
            positions, row_ends = positions[~has_ended], row_ends[~has_ended]
        is_ready = done[one[positions]] & done[two[positions]] & done[three[positions]]
        wave = positions[is_ready]
        if not len(wave):
            return waves
        waves.append(wave)
        done[wave] = True
        positions = positions + is_ready


def _sort_by_ranks(columns: Columns, needs: Needs, row_ends: list[int], stages: int) -> list[int]:
    """Return the indices of the actions: run each rank until it must wait, resume it when that part is done."""
    positions, count = [0, *row_ends[:-1]], len(columns.rank)
    producers = [column.tolist() for column in needs.maker[needs.parts].T]
    one, two, three = producers
    done = bytearray(count + 2)  # the last but one is for a missing action
    done[-1] = 1  # the last one is for no dependency
    waiting: dict[int, list[int]] = {}  # action → ranks blocked on it
    turns: list[int] = []
    runnable = deque(range(len(row_ends)))
    while runnable:
        rank = runnable.popleft()
        action, end = positions[rank], row_ends[rank]
        while action < end and done[one[action]] and done[two[action]] and done[three[action]]:
            turns.append(action)
            done[action] = 1
            if action in waiting:
                runnable.extend(waiting.pop(action))
            action += 1
        positions[rank] = action
        if action < end:
            missing = next(other[action] for other in producers if not done[other[action]])
            waiting.setdefault(missing, []).append(rank)
    if len(turns) < count:
        raise _describe_deadlock(
            columns,
            needs,
            [action for action, end in zip(positions, row_ends, strict=True) if action < end],
            done,
            stages,
        )
    return turns


def _factorize(codes: Ints) -> tuple[Ints, Ints]:
    """Return the distinct codes in order of first occurrence, and for each code its index among them."""
    import numpy as np

    first = np.full(int(codes.max(initial=0)) + 1, len(codes))
    first[codes[::-1]] = np.arange(len(codes))[::-1]
    values = np.argsort(first)[: int((first < len(codes)).sum())]
    number = np.zeros_like(first)
    number[values] = np.arange(len(values))
    return values, number[codes]


def _describe_deadlock(columns: Columns, needs: Needs, stuck: list[int], done: bytearray, stages: int) -> UserError:
    """Describe the deadlock of a table; ``stuck``: the actions at which ranks wait."""

    def describe_wait(at: int) -> str:
        part = next(part for part in needs.parts[at].tolist() if not done[needs.maker[part]])
        return format_part(("FB"[part % 2], part // 2 % stages, part // 2 // stages))

    lines = sorted(f"rank {columns.rank[at]} at {columns.action(at)} waits for {describe_wait(at)}" for at in stuck)
    suffix = f" and {len(lines) - 3} more" if len(lines) > 3 else ""
    return UserError(f"deadlock: {', '.join(lines[:3])}{suffix}; reorder one of them")

"""A schedule with hundreds of micro-batches, from two short ones: past the warm-up every round takes the same time.

    end(m) = end(base) + rounds · (end(base + pp) - end(base)),   base = 3 pp + m mod pp

A schedule is a max-plus system: its rows are periodic once the slowest rank sets the pace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple

from fivefold.layout.names import ScheduleName
from fivefold.layout.schedule import play as play_table
from fivefold.layout.schedule import schedule
from fivefold.layout.schedule.order import Task
from fivefold.layout.schedule.table import Table
from fivefold.layout.spec import Layout


class Extrapolated(NamedTuple):
    """A schedule continued to its length: per rank when it ends, what it does how often, the stages it holds."""

    ends: list[float]
    busy: list[float]
    tasks: list[Mapping[Task, int]]
    held: tuple[tuple[int, ...], ...]


def extrapolate(layout: Layout, micro_batches: int, *, seconds: Callable[[Task], float], hop: float) -> Extrapolated:
    """The layout's schedule with these ``seconds`` per task, and ``hop`` between two stages."""
    known: dict[Task, float] = {}

    def once(task: Task) -> float:
        if task not in known:
            known[task] = seconds(task)
        return known[task]

    def played(count: int) -> tuple[Table, list[float], tuple[Mapping[Task, int], ...]]:
        table = schedule(layout.schedule, pp=layout.pp, v=layout.v, micro_batches=count)
        ends = list(play_table.play(table, seconds=once, hop_seconds=lambda *_: hop).rank_ends)
        return table, ends, _tasks(layout.schedule, layout.pp, layout.v, count)

    def busy(tasks: Mapping[Task, int]) -> float:
        return sum(times * known[task] for task, times in tasks.items())

    pp = layout.pp
    base = 3 * pp + micro_batches % pp
    if micro_batches <= base + pp:
        table, ends, tasks = played(micro_batches)
        return Extrapolated(ends, [busy(each) for each in tasks], list(tasks), table.rank_stages)
    (table, early, few), (_, late, many) = played(base), played(base + pp)
    rounds = (micro_batches - base) // pp
    # A rank that is the busiest sets the pace, but with uneven stages the others may not feel it so early.
    pace = max(busy(more) - busy(less) for less, more in zip(few, many, strict=True))
    ends = [first + rounds * max(second - first, pace) for first, second in zip(early, late, strict=True)]
    whole = [
        {task: less[task] + rounds * (times - less[task]) for task, times in more.items()}
        for less, more in zip(few, many, strict=True)
    ]
    return Extrapolated(ends, [busy(each) for each in whole], list(whole), table.rank_stages)


@lru_cache(maxsize=1024)
def _tasks(name: ScheduleName, pp: int, v: int, micro_batches: int) -> tuple[Mapping[Task, int], ...]:
    """How often each rank does what."""
    order = schedule(name, pp=pp, v=v, micro_batches=micro_batches).order
    rows: list[Counter[Task]] = [Counter() for _ in range(pp)]
    for turn in order.actions:
        rows[turn.rank][order.tasks[turn.task]] += 1
    return tuple(rows)

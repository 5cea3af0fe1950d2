"""Times of a schedule with hundreds of micro-batches, extrapolated from two short ones.

    end(m) = end(base) + rounds · (end(base + pp) - end(base)),   base = 3 pp + m mod pp

After the warm-up every round of pp micro-batches takes the same time: a schedule is a max-plus system, which becomes
periodic once the slowest rank sets the pace.
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
    """Per pipeline rank: seconds at its end, seconds busy, how often it runs each task, the stages it holds."""

    ends: list[float]
    busy: list[float]
    tasks: list[Mapping[Task, int]]
    held: tuple[tuple[int, ...], ...]


def extrapolate(layout: Layout, micro_batches: int, *, seconds: Callable[[Task], float], hop: float) -> Extrapolated:
    """Ends and work of the layout's schedule, with ``seconds(task)`` per action and ``hop`` seconds per message."""
    known: dict[Task, float] = {}

    def once(task: Task) -> float:
        if task not in known:
            known[task] = seconds(task)
        return known[task]

    def played(count: int) -> tuple[Table, list[float], tuple[Mapping[Task, int], ...]]:
        table = schedule(layout.schedule, pp=layout.pp, v=layout.v, micro_batches=count)
        ends = list(play_table.play(table, seconds=once, hop_seconds=lambda *_: hop, queues=True).rank_ends)
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
    # The busiest rank sets the pace; with uneven stages the two short schedules may be too short to show it.
    pace = max(busy(more) - busy(less) for less, more in zip(few, many, strict=True))
    ends = [first + rounds * max(second - first, pace) for first, second in zip(early, late, strict=True)]
    whole = [
        {task: less[task] + rounds * (times - less[task]) for task, times in more.items()}
        for less, more in zip(few, many, strict=True)
    ]
    return Extrapolated(ends, [busy(each) for each in whole], list(whole), table.rank_stages)


@lru_cache(maxsize=1024)
def _tasks(name: ScheduleName, pp: int, v: int, micro_batches: int) -> tuple[Mapping[Task, int], ...]:
    """How often each rank runs each task."""
    order = schedule(name, pp=pp, v=v, micro_batches=micro_batches).order
    rows: list[Counter[Task]] = [Counter() for _ in range(pp)]
    for turn in order.actions:
        rows[turn.rank][order.tasks[turn.task]] += 1
    return tuple(rows)

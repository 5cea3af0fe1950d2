"""Times of a schedule with hundreds of micro-batches, extrapolated from two short ones.

    end(m) = end(base) + rounds · (end(base + pp) - end(base)),   base = 3 pp + m mod pp

After the warm-up every round of pp micro-batches takes the same time: a schedule is a max-plus system, which becomes
periodic once the slowest rank sets the pace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from operator import itemgetter
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


class Rounds(NamedTuple):
    """What of ``extrapolate`` follows from the schedule alone.

    ``tables``: those to play, with how often each rank runs each task in them; ``rounds``: of pp micro-batches that
    follow the first; ``tasks``: all distinct ones; ``whole``: how often each rank runs each task in a step.
    """

    tables: list[tuple[Table, tuple[Mapping[Task, int], ...]]]
    rounds: int
    tasks: tuple[Task, ...]
    whole: list[Mapping[Task, int]]


def extrapolate(layout: Layout, micro_batches: int, *, seconds: Callable[[Task], float], hop: float) -> Extrapolated:
    """Ends and work of the layout's schedule, with ``seconds(task)`` per action and ``hop`` seconds per message."""
    asked = layout.schedule, layout.pp, layout.v, micro_batches
    found = rounds_of(*asked)
    ends, busy = _played(*asked, tuple(map(seconds, found.tasks)), hop)
    return Extrapolated(ends, busy, found.whole, found.tables[0][0].rank_stages)


@lru_cache(maxsize=2048)  # layouts of a search often differ in nothing that the schedule sees
def _played(
    name: ScheduleName, pp: int, v: int, micro_batches: int, durations: tuple[float, ...], hop: float
) -> tuple[list[float], list[float]]:  # fmt: skip
    """Seconds at the end of each rank and seconds busy; ``durations`` of the tasks of ``rounds_of``."""
    tables, rounds, tasks, whole = rounds_of(name, pp, v, micro_batches)
    known = dict(zip(tasks, durations, strict=True))

    def busy(tasks: Mapping[Task, int]) -> float:
        return sum(times * known[task] for task, times in tasks.items())

    ends = [
        list(play_table.play(table, seconds=known.__getitem__, hop_seconds=lambda *_: hop, queues=True).rank_ends)
        for table, _ in tables
    ]
    works = [busy(each) for each in whole]
    if not rounds:
        return ends[0], works
    (early, late), ((_, few), (_, many)) = ends, tables
    # The busiest rank sets the pace; with uneven stages the two short schedules may be too short to show it.
    pace = max(busy(more) - busy(less) for less, more in zip(few, many, strict=True))
    return [first + rounds * max(second - first, pace) for first, second in zip(early, late, strict=True)], works


@lru_cache(maxsize=1024)
def rounds_of(name: ScheduleName, pp: int, v: int, micro_batches: int) -> Rounds:
    """What is played of so many micro-batches, and what follows."""
    base = 3 * pp + micro_batches % pp
    short = micro_batches <= base + pp
    counts = (micro_batches,) if short else (base, base + pp)
    tables = [(schedule(name, pp=pp, v=v, micro_batches=count), _tasks(name, pp, v, count)) for count in counts]
    tasks = tuple(dict.fromkeys(task for table, _ in tables for task in table.order.tasks))
    if short:
        return Rounds(tables, 0, tasks, list(tables[0][1]))
    rounds = (micro_batches - base) // pp
    whole: list[Mapping[Task, int]] = [
        {task: less.get(task, 0) + rounds * (times - less.get(task, 0)) for task, times in more.items()}
        for less, more in zip(tables[0][1], tables[1][1], strict=True)
    ]
    return Rounds(tables, rounds, tasks, whole)


@lru_cache(maxsize=1024)
def _tasks(name: ScheduleName, pp: int, v: int, micro_batches: int) -> tuple[Mapping[Task, int], ...]:
    """How often each rank runs each task."""
    order = schedule(name, pp=pp, v=v, micro_batches=micro_batches).order
    rows: list[dict[Task, int]] = [{} for _ in range(pp)]
    for (rank, task), times in Counter(map(itemgetter(0, 1), order.actions)).items():
        rows[rank][order.tasks[task]] = times
    return tuple(rows)

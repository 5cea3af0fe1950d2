"""Times of a schedule with hundreds of micro-batches, extrapolated from two short ones.

    end(m) = end(base) + rounds · (end(base + pp) - end(base)),   base = 3 pp + m mod pp

After the warm-up every round of pp micro-batches takes the same time: a schedule is a max-plus system, which becomes
periodic once the slowest rank sets the pace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from fivefold.layout.schedule import schedule
from fivefold.layout.schedule.order import Task
from fivefold.layout.schedule.pipeline_schedule import ScheduleName
from fivefold.layout.schedule.play import play
from fivefold.layout.schedule.table import Table
from fivefold.layout.spec import Layout


class Extrapolated(NamedTuple):
    """Per pipeline rank: seconds at its end, seconds busy, how often it runs each of ``distinct_tasks``, by
    index, the stages it holds, and the first rank with equal ones.
    """

    ends: list[float]
    busy: list[float]
    tasks: tuple[tuple[tuple[int, int], ...], ...]
    held: tuple[tuple[int, ...], ...]
    like: tuple[int, ...]


class AlikeTasks(NamedTuple):
    """The tasks of ``Rounds`` where some stages are equal: one of each that take equally long, the index among them of
    each of ``Rounds.tasks``, and ``Rounds.whole`` in these indices. ``like``: the first rank with equal stages.
    """

    some: tuple[Task, ...]
    place: tuple[int, ...]
    whole: tuple[tuple[tuple[int, int], ...], ...]
    like: tuple[int, ...]


class Rounds(NamedTuple):
    """What of ``extrapolate`` follows from the schedule alone.

    ``tables``: those to play, with how often each rank runs each task in them; ``rounds``: of pp micro-batches that
    follow the first; ``tasks``: all distinct ones; ``whole``: how often each rank runs each task in a step.
    """

    tables: list[tuple[Table, tuple[Mapping[Task, int], ...]]]
    rounds: int
    tasks: tuple[Task, ...]
    whole: list[Mapping[Task, int]]


def distinct_tasks(layout: Layout, micro_batches: int, alike: tuple[int, ...]) -> tuple[Task, ...]:
    """Return one task of each that take equally long; ``alike``: of each stage the first one that is as fast."""
    return alike_tasks(layout.schedule, layout.pp, layout.v, micro_batches, alike).some


def extrapolate(
    layout: Layout, micro_batches: int, *, seconds: Sequence[float], hop: float, alike: tuple[int, ...]
) -> Extrapolated:  # fmt: skip
    """Return ends and work of the layout's schedule, with the ``seconds`` of its ``distinct_tasks`` and ``hop`` seconds
    per message.
    """
    asked = layout.schedule, layout.pp, layout.v, micro_batches, alike
    found, tables = alike_tasks(*asked), rounds_of(*asked[:4]).tables
    ends, busy = _played(*asked, tuple(seconds), hop)
    return Extrapolated(ends, busy, found.whole, tables[0][0].rank_stages, found.like)


@lru_cache(maxsize=1024)
def alike_tasks(
    name: ScheduleName, pp: int, v: int, micro_batches: int, alike: tuple[int, ...]
) -> AlikeTasks:  # fmt: skip
    """Those of stages of which some are ``alike``."""
    tables, _, tasks, whole = rounds_of(name, pp, v, micro_batches)
    numbers: dict[Task, int] = {}
    some: list[Task] = []
    for task in tasks:
        same = task.on_stages(alike)
        if numbers.setdefault(same, len(some)) == len(some):
            some.append(same)
        numbers[task] = numbers[same]
    rows = []
    for each in whole:
        times: Counter[int] = Counter()
        for task, count in each.items():
            times[numbers[task]] += count
        rows.append(tuple(times.items()))
    held = [tuple(alike[stage] for stage in stages) for stages in tables[0][0].rank_stages]
    return AlikeTasks(
        tuple(some), tuple(numbers[task] for task in tasks), tuple(rows), tuple(held.index(each) for each in held)
    )


@lru_cache(maxsize=2048)  # layouts of a search often differ in nothing that the schedule sees
def _played(
    name: ScheduleName, pp: int, v: int, micro_batches: int, alike: tuple[int, ...], durations: tuple[float, ...],
    hop: float,
) -> tuple[list[float], list[float]]:  # fmt: skip
    """Seconds at the end of each rank and seconds busy; ``durations`` of some of the ``alike_tasks``."""
    tables, rounds, tasks, _ = rounds_of(name, pp, v, micro_batches)
    found = alike_tasks(name, pp, v, micro_batches, alike)
    known = {task: durations[place] for task, place in zip(tasks, found.place, strict=True)}

    def busy(tasks: Mapping[Task, int]) -> float:
        return sum([times * known[task] for task, times in tasks.items()])

    ends = [
        list(play(table, seconds=known.__getitem__, hop_seconds=lambda *_: hop, queues=True).rank_ends)
        for table, _ in tables
    ]
    works = [sum([times * durations[task] for task, times in row]) for row in found.whole]
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
    for (rank, task), times in Counter(zip(order.rank, order.task, strict=True)).items():
        rows[rank][order.tasks[task]] = times
    return tuple(rows)

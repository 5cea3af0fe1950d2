"""Times of a schedule with hundreds of micro-batches, extrapolated from two short ones.

    end(m) = end(base) + rounds · (end(base + pp) - end(base)),   base = 3 pp + m mod pp

After the warm-up every round of pp micro-batches takes the same time: a schedule is a max-plus system, which becomes
periodic once the slowest rank sets the pace. With a reference (DPO) each table begins with a forward of every
micro-batch, so that a round is longer by pp of these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from fivefold.layout.schedule import schedule
from fivefold.layout.schedule.order import Task
from fivefold.layout.schedule.pipeline_schedule import ScheduleName
from fivefold.layout.schedule.simulation import simulate_schedule
from fivefold.layout.schedule.table import Table
from fivefold.layout.spec import Layout


class Extrapolated(NamedTuple):
    """The extrapolated times and work of each pipeline rank.

    They are its end in seconds, its busy seconds, how often it runs each of ``list_distinct_tasks`` (by index), the
    stages it holds, and the first rank with equal stages (``first_equal_ranks``).
    """

    ends: list[float]
    busy: list[float]
    task_counts: tuple[tuple[tuple[int, int], ...], ...]
    rank_stages: tuple[tuple[int, ...], ...]
    first_equal_ranks: tuple[int, ...]


class DistinctTasks(NamedTuple):
    """The tasks of ``Rounds`` with equal tasks joined, if some stages are equal.

    ``tasks``: one task of each group that takes equally long; ``task_index``: the index of each of ``Rounds.tasks``
    among them; ``task_counts``: ``Rounds.task_counts`` in these indices; ``first_equal_ranks``: the first rank with
    equal stages.
    """

    tasks: tuple[Task, ...]
    task_index: tuple[int, ...]
    task_counts: tuple[tuple[tuple[int, int], ...], ...]
    first_equal_ranks: tuple[int, ...]


class Rounds(NamedTuple):
    """The part of ``extrapolate`` that depends only on the schedule.

    ``tables``: the tables to simulate, with how often each rank runs each task in them; ``rounds``: further rounds of
    pp micro-batches; ``tasks``: all distinct tasks; ``task_counts``: how often each rank runs each task in a step.
    """

    tables: list[tuple[Table, tuple[Mapping[Task, int], ...]]]
    rounds: int
    tasks: tuple[Task, ...]
    task_counts: list[Mapping[Task, int]]


def list_distinct_tasks(
    layout: Layout, micro_batches: int, first_equal_stages: tuple[int, ...], *, has_reference: bool = False
) -> tuple[Task, ...]:
    """Return one task of each group of equal duration.

    ``first_equal_stages``: for each stage the first one of equal speed; ``has_reference``: DPO's runs first.
    """
    schedule_key = layout.schedule, layout.pp, layout.v, micro_batches, has_reference
    return join_equal_tasks(*schedule_key, first_equal_stages).tasks


def extrapolate(
    layout: Layout,
    micro_batches: int,
    *,
    seconds: Sequence[float],
    hop_seconds: float,
    first_equal_stages: tuple[int, ...],
    has_reference: bool = False,
) -> Extrapolated:
    """Return ends and work of the layout's schedule.

    ``seconds``: the seconds of its ``list_distinct_tasks``; ``hop_seconds``: seconds per message.
    """
    schedule_key = layout.schedule, layout.pp, layout.v, micro_batches, has_reference
    distinct = join_equal_tasks(*schedule_key, first_equal_stages)
    tables = split_rounds(*schedule_key).tables
    ends, busy = _simulate(*schedule_key, first_equal_stages, tuple(seconds), hop_seconds)
    return Extrapolated(ends, busy, distinct.task_counts, tables[0][0].rank_stages, distinct.first_equal_ranks)


@lru_cache(maxsize=1024)
def join_equal_tasks(
    name: ScheduleName, pp: int, v: int, micro_batches: int, has_reference: bool, first_equal_stages: tuple[int, ...]
) -> DistinctTasks:
    """Return the tasks of a schedule with those of equal stages (``first_equal_stages``) joined."""
    tables, _, tasks, counts_by_rank = split_rounds(name, pp, v, micro_batches, has_reference)
    number_of_task: dict[Task, int] = {}
    distinct: list[Task] = []
    for task in tasks:
        equal_task = task.with_stages(first_equal_stages)
        if number_of_task.setdefault(equal_task, len(distinct)) == len(distinct):
            distinct.append(equal_task)
        number_of_task[task] = number_of_task[equal_task]
    rows = []
    for task_counts in counts_by_rank:
        times: Counter[int] = Counter()
        for task, count in task_counts.items():
            times[number_of_task[task]] += count
        rows.append(tuple(times.items()))
    equal_stages_of_ranks = [
        tuple(first_equal_stages[stage] for stage in stages) for stages in tables[0][0].rank_stages
    ]
    return DistinctTasks(
        tuple(distinct),
        tuple(number_of_task[task] for task in tasks),
        tuple(rows),
        tuple(map(equal_stages_of_ranks.index, equal_stages_of_ranks)),
    )


@lru_cache(maxsize=2048)  # layouts of a search often differ in nothing that the schedule depends on
def _simulate(
    name: ScheduleName,
    pp: int,
    v: int,
    micro_batches: int,
    has_reference: bool,
    first_equal_stages: tuple[int, ...],
    durations: tuple[float, ...],
    hop: float,
) -> tuple[list[float], list[float]]:
    """Return the end of each rank and its busy seconds.

    ``durations``: the seconds of each distinct task, in the order of ``join_equal_tasks``.
    """
    tables, rounds, tasks, _ = split_rounds(name, pp, v, micro_batches, has_reference)
    distinct = join_equal_tasks(name, pp, v, micro_batches, has_reference, first_equal_stages)
    seconds_by_task = {task: durations[place] for task, place in zip(tasks, distinct.task_index, strict=True)}

    def sum_busy_seconds(tasks: Mapping[Task, int]) -> float:
        return sum([times * seconds_by_task[task] for task, times in tasks.items()])

    ends = [
        list(
            simulate_schedule(
                table, seconds=seconds_by_task.__getitem__, hop_seconds=lambda *_: hop, queues=True
            ).rank_ends
        )
        for table, _ in tables
    ]
    works = [sum([times * durations[task] for task, times in row]) for row in distinct.task_counts]
    if not rounds:
        return ends[0], works
    (first_ends, second_ends), ((_, first_tasks), (_, second_tasks)) = ends, tables
    # The busiest rank sets the pace; with uneven stages the two short schedules may be too short to show it.
    pace = max(
        sum_busy_seconds(more_rounds) - sum_busy_seconds(fewer_rounds)
        for fewer_rounds, more_rounds in zip(first_tasks, second_tasks, strict=True)
    )
    return [
        first + rounds * max(second - first, pace) for first, second in zip(first_ends, second_ends, strict=True)
    ], works


@lru_cache(maxsize=1024)
def split_rounds(name: ScheduleName, pp: int, v: int, micro_batches: int, has_reference: bool = False) -> Rounds:
    """Return the tables that are simulated for ``micro_batches``, and the number of rounds that follow."""
    base = 3 * pp + micro_batches % pp
    is_short = micro_batches <= base + pp
    counts = (micro_batches,) if is_short else (base, base + pp)
    key = name, pp, v, has_reference
    tables = [(build_step_table(*key, count), _count_tasks(*key, count)) for count in counts]
    tasks = tuple(dict.fromkeys(task for table, _ in tables for task in table.order.tasks))
    if is_short:
        return Rounds(tables, 0, tasks, list(tables[0][1]))
    rounds = (micro_batches - base) // pp
    step_tasks: list[Mapping[Task, int]] = [
        {task: less.get(task, 0) + rounds * (times - less.get(task, 0)) for task, times in more.items()}
        for less, more in zip(tables[0][1], tables[1][1], strict=True)
    ]
    return Rounds(tables, rounds, tasks, step_tasks)


@lru_cache(maxsize=1024)
def build_step_table(name: ScheduleName, pp: int, v: int, has_reference: bool, micro_batches: int) -> Table:
    """Return the table of a step; ``has_reference``: DPO's runs all micro-batches first."""
    table = schedule(name, pp=pp, v=v, micro_batches=micro_batches)
    return table.prepend_forwards() if has_reference else table


@lru_cache(maxsize=1024)
def _count_tasks(
    name: ScheduleName, pp: int, v: int, has_reference: bool, micro_batches: int
) -> tuple[Mapping[Task, int], ...]:
    """Return how often each rank runs each task."""
    import numpy as np

    order = build_step_table(name, pp, v, has_reference, micro_batches).order
    rows: list[dict[Task, int]] = [{} for _ in range(pp)]
    codes = order.rank * len(order.tasks) + order.task
    _, first, counts = np.unique(codes, return_index=True, return_counts=True)
    by_first = np.argsort(first)  # tasks of a rank in the order in which it first runs them
    for index, times in zip(first[by_first].tolist(), counts[by_first].tolist(), strict=True):
        rows[order.rank[index]][order.tasks[order.task[index]]] = times
    return tuple(rows)

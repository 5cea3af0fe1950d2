"""Simulate a table: start and end of every action from given durations. ``simulate_schedules`` simulates many at once.

A rank runs its actions in order, each when its inputs have arrived: start = max(rank free, end of input + hop).
A hop delays the receiver but occupies no rank; a blocking send must be part of the durations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from fivefold.layout.schedule.action import Action
from fivefold.layout.schedule.order import Order, Task
from fivefold.layout.schedule.table import Table

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]


class ActionSpan(NamedTuple):
    """An action with its start and end, in the unit of the durations, from the start of the first rank."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class SimulatedSchedule:
    """A simulated table: ``ends`` by action and ``durations`` by task of ``table.order``, and the end of each rank."""

    table: Table
    ends: tuple[float, ...]
    durations: tuple[float, ...]
    rank_ends: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Return the duration of the table: from the start of the first rank to the end of the last."""
        return max(self.ends)

    @cached_property
    def spans(self) -> tuple[tuple[ActionSpan, ...], ...]:
        """Return the spans of each rank, in the order of ``table.rows``."""
        rows: list[list[ActionSpan]] = [[] for _ in self.table.rows]
        order = self.table.order
        for rank, task, end in zip(order.rank.tolist(), order.task.tolist(), self.ends, strict=True):
            row = rows[rank]
            row.append(ActionSpan(self.table.rows[rank][len(row)], end - self.durations[task], end))
        return tuple(map(tuple, rows))

    @cached_property
    def busy_seconds(self) -> tuple[float, ...]:
        """Return the seconds that each rank computes; ``seconds`` minus these is its bubble."""
        busy_seconds = [0.0] * self.table.pp
        order = self.table.order
        for rank, task in zip(order.rank.tolist(), order.task.tolist(), strict=True):
            busy_seconds[rank] += self.durations[task]
        return tuple(busy_seconds)


def simulate_schedule(
    table: Table,
    *,
    seconds: Callable[[Task], float],
    hop_seconds: Callable[[int, int], float] = lambda *_: 0.0,
    queues: bool = False,
) -> SimulatedSchedule:
    """Simulate ``table``. Calls ``seconds`` once per task and ``hop_seconds`` once per pair of ranks (from, to).

    ``queues``: a link carries one message at a time, each after the receiver has posted its receive, an action ahead.
    This matters only if a hop is longer than an action.

    Takes about 0.2 µs per action after the first call, which computes ``table.order``; less with many ranks.
    """
    order = table.order
    durations = tuple(map(seconds, order.tasks))
    delays = [hop_seconds(*hop) for hop in order.hops]
    queued = queues and bool(delays) and max(delays) > min(durations)
    if order.wave_starts is not None and not queued:
        return _simulate_waves(table, durations, delays)
    rank_free_seconds = [0.0] * table.pp
    starts = [0.0] * table.pp
    links = [0.0] * len(delays)
    ends: list[float] = []
    append = ends.append
    for rank, task, first, first_hop, second, second_hop in order.actions:
        start = rank_free_seconds[rank]
        if queued:  # a message starts when it is sent, its link is free, and the receiver's previous action has begun
            receive_posted = starts[rank]
            for source, hop in ((first, first_hop), (second, second_hop)):
                if source >= 0:
                    links[hop] = max(ends[source], links[hop], receive_posted) + delays[hop]
                    start = max(start, links[hop])
            starts[rank] = start
        elif first >= 0:
            arrival = ends[first] + delays[first_hop]
            if arrival > start:  # not max(): a call in the innermost loop costs a third of it
                start = arrival
            if second >= 0:
                arrival = ends[second] + delays[second_hop]
                if arrival > start:
                    start = arrival
        rank_free_seconds[rank] = end = start + durations[task]
        append(end)
    return SimulatedSchedule(table, tuple(ends), durations, tuple(rank_free_seconds))


def _simulate_waves(table: Table, durations: tuple[float, ...], delays: list[float]) -> SimulatedSchedule:
    """Simulate a table whose order is one of waves, as ``simulate_schedule`` without queues."""
    import numpy as np

    order = table.order
    action_seconds = np.array(durations)[order.task]
    hop_seconds = np.array([*delays, 0.0])
    first_seconds, second_seconds = hop_seconds[order.first_hop], hop_seconds[order.second_hop]
    rank_free_seconds = np.zeros(table.pp)
    ends = np.full(len(order.rank) + 1, -np.inf)  # the last one is for no dependency
    for start, end in pairwise(order.wave_starts or ()):
        ranks = order.rank[start:end]
        begin = np.maximum(rank_free_seconds[ranks], ends[order.first[start:end]] + first_seconds[start:end])
        begin = np.maximum(begin, ends[order.second[start:end]] + second_seconds[start:end])
        begin += action_seconds[start:end]
        rank_free_seconds[ranks] = ends[start:end] = begin
    return SimulatedSchedule(table, tuple(ends[:-1].tolist()), durations, tuple(rank_free_seconds.tolist()))


class Waves(NamedTuple):
    """Columns of all actions, wave by wave, and within a wave by rank.

    A wave is a set of actions on different ranks that can be simulated together, because none waits for another one of
    them. The times at which the results of a wave arrive are kept in a block of rows.

    ``first`` and ``second``: the rows of the arrivals that an action waits for, or ``NO_INPUT``; ``rows``: how many
    there are. ``starts``: the first action of each wave, and the number of actions; ``blocks``: the first row of the
    arrivals of each wave; ``all_ranks``: whether every rank runs an action of the wave; ``both``: whether any of them
    waits for two others.
    """

    rank: Ints
    task: Ints
    first: Ints
    second: Ints
    rows: int
    starts: list[int]
    blocks: list[int]
    all_ranks: list[bool]
    both: list[bool]


NO_INPUT = 0  # the row of arrivals that is read where an action waits for no other


def divide_into_waves(order: Order, *, pp: int) -> Waves:
    """Divide the actions of ``order`` into as few waves as possible."""
    import numpy as np

    wave_numbers = np.array(_list_waves(order, pp=pp))
    index = np.lexsort((order.rank, wave_numbers))
    starts = np.searchsorted(wave_numbers[index], np.arange(wave_numbers.max() + 2))
    last_wave = wave_numbers.copy()  # that waits for an action
    for dependency in (order.first, order.second):
        waits = dependency >= 0
        np.maximum.at(last_wave, dependency[waits], wave_numbers[waits])
    last_of_wave = np.maximum.reduceat(last_wave[index], starts[:-1])
    blocks = NO_INPUT + 1 + pp * _assign_blocks(last_of_wave.tolist())
    sizes = np.diff(starts)
    row_of_action = np.full(len(index) + 1, NO_INPUT)  # -1, no input, reads the last
    row_of_action[index] = np.repeat(blocks - starts[:-1], sizes) + np.arange(len(index))
    first, second = row_of_action[order.first[index]], row_of_action[order.second[index]]
    return Waves(
        order.rank[index],
        order.task[index],
        first,
        second,
        int(blocks.max()) + pp,
        starts.tolist(),
        blocks.tolist(),
        (sizes == pp).tolist(),
        np.logical_or.reduceat(second != NO_INPUT, starts[:-1]).tolist(),
    )


def _list_waves(order: Order, *, pp: int) -> list[int]:
    """Return the number of the wave of each action."""
    if order.wave_starts is not None:
        return [wave for wave, (start, end) in enumerate(pairwise(order.wave_starts)) for _ in range(start, end)]
    wave_of, next_free_wave = list[int](), [0] * pp
    for rank, _, first, _, second, _ in order.actions:
        wave = next_free_wave[rank]
        if first >= 0:
            wave = max(wave, wave_of[first] + 1)
            if second >= 0:
                wave = max(wave, wave_of[second] + 1)
        wave_of.append(wave)
        next_free_wave[rank] = wave + 1
    return wave_of


def _assign_blocks(last_waves: list[int]) -> Ints:
    """Return the number of each wave's block; ``last_waves``: the last wave that waits for an action of it.

    A block is used again from that wave on, which reads before it writes.
    """
    import numpy as np

    blocks, free_blocks, n_blocks = list[int](), list[int](), 0
    freed: list[list[int]] = [[] for _ in last_waves]
    for wave, last_wave in enumerate(last_waves):
        free_blocks += freed[wave]
        if not free_blocks:
            free_blocks.append(n_blocks)
            n_blocks += 1
        blocks.append(free_blocks.pop())
        if wave + 1 < len(last_waves):
            freed[max(last_wave, wave + 1)].append(blocks[-1])
    return np.array(blocks)


def simulate_schedules(waves: Waves, seconds: Floats, hop: Floats, *, pp: int) -> Floats:
    """Return the end of each rank in seconds, [pp, n], as ``simulate_schedule`` without queues.

    With queues no rank ends earlier, so these are lower bounds.

    ``seconds``: duration of each task [tasks, n]; ``hop``: duration of a message between ranks [n].
    """
    import numpy as np

    rank_free_seconds = np.zeros((pp, len(hop)))
    arrivals = np.full((waves.rows, len(hop)), -np.inf)
    for (start, end), block, all_ranks, both in zip(
        pairwise(waves.starts), waves.blocks, waves.all_ranks, waves.both, strict=True
    ):
        ends = rank_free_seconds if all_ranks else rank_free_seconds.take(waves.rank[start:end], axis=0)
        np.maximum(ends, arrivals.take(waves.first[start:end], axis=0), out=ends)
        if both:
            np.maximum(ends, arrivals.take(waves.second[start:end], axis=0), out=ends)
        ends += seconds.take(waves.task[start:end], axis=0)
        if not all_ranks:
            rank_free_seconds[waves.rank[start:end]] = ends
        np.add(ends, hop, out=arrivals[block : block + end - start])
    return rank_free_seconds

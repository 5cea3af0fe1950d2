"""Simulate one table with many sets of durations at once: in waves of actions that do not wait for one another.

A wave is a numpy operation over [its actions, durations], so hundreds of sets take as long as ten in ``play``.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from fivefold.layout.schedule.order import Order

if TYPE_CHECKING:  # schedules load without numpy, which is imported where arrays are made
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]


class Waves(NamedTuple):
    """Columns of all actions, wave by wave.

    ``first`` and ``second`` as in ``Order``, but with the last index instead of -1. ``starts``: the first action of
    each wave, and the number of actions; ``both``: whether any action of the wave waits for two others.
    """

    rank: Ints
    task: Ints
    first: Ints
    second: Ints
    starts: list[int]
    both: list[bool]


def divide_into_waves(order: Order, *, pp: int) -> Waves:
    """Divide the actions of ``order`` into as few waves as possible."""
    import numpy as np

    wave_of, next_free_wave = list[int](), [0] * pp
    for rank, _, first, _, second, _ in order.actions:
        wave = next_free_wave[rank]
        if first >= 0:
            wave = max(wave, wave_of[first] + 1)
            if second >= 0:
                wave = max(wave, wave_of[second] + 1)
        wave_of.append(wave)
        next_free_wave[rank] = wave + 1
    wave_numbers = np.array(wave_of)
    index = np.argsort(wave_numbers, kind="stable")
    column_index = np.append(np.argsort(index), len(index))  # index of an action in the columns; -1: the end
    columns = (order.rank, order.task, order.first, order.second)
    ranks, tasks, first_waits, second_waits = (column[index] for column in columns)
    starts = np.searchsorted(wave_numbers[index], np.arange(wave_numbers.max() + 2)).tolist()
    both = [bool((second_waits[start:end] >= 0).any()) for start, end in pairwise(starts)]
    return Waves(ranks, tasks, column_index[first_waits], column_index[second_waits], starts, both)


def play_many(waves: Waves, seconds: Floats, hop: Floats, *, pp: int) -> Floats:
    """Return the end of each rank in seconds, [pp, n], as ``play`` without queues, so never later than with them.

    ``seconds``: duration of each task [tasks, n]; ``hop``: duration of a message between ranks [n].
    """
    import numpy as np

    rank_free_seconds = np.zeros((pp, len(hop)))
    ends = np.full((len(waves.rank) + 1, len(hop)), -np.inf)
    for (start, end), both in zip(pairwise(waves.starts), waves.both, strict=True):
        ranks = waves.rank[start:end]
        begin = np.maximum(rank_free_seconds[ranks], ends[waves.first[start:end]] + hop)
        if both:
            begin = np.maximum(begin, ends[waves.second[start:end]] + hop)
        begin += seconds[waves.task[start:end]]
        rank_free_seconds[ranks] = ends[start:end] = begin
    return rank_free_seconds

"""A schedule with hundreds of micro-batches, from two short ones: past the warm-up every round takes the same time.

    end(m) = end(base) + rounds · (end(base + pp) - end(base)),   base = 3 pp + m mod pp

A schedule is a max-plus system: its rows are periodic once the slowest rank sets the pace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fivefold.layout.schedule import play as play_table
from fivefold.layout.schedule import schedule
from fivefold.layout.schedule.order import Task
from fivefold.layout.schedule.play import Played
from fivefold.layout.schedule.table import Table
from fivefold.layout.spec import Layout


class Continued(NamedTuple):
    """A schedule continued to its length: per rank when it ends, how long it works, the stages it holds."""

    ends: list[float]
    busy: list[float]
    held: tuple[tuple[int, ...], ...]
    sending: float = 0.0  # seconds in which every rank is busy with hops


def continued(layout: Layout, micro_batches: int, *, seconds: Callable[[Task], float], hop: float) -> Continued:
    """The layout's schedule with these ``seconds`` per task, and ``hop`` between two stages."""

    def played(count: int) -> tuple[Played, list[float]]:
        table = schedule(layout.schedule, pp=layout.pp, v=layout.v, micro_batches=count)
        done = play_table.play(table, seconds=seconds, hop_seconds=lambda *_: hop)
        return done, _ends(table, done)

    pp = layout.pp
    base = 3 * pp + micro_batches % pp
    if micro_batches <= base + pp:
        done, ends = played(micro_batches)
        return Continued(ends, list(done.busy), done.table.held)
    (short, early), (long, late) = played(base), played(base + pp)
    rounds = (micro_batches - base) / pp
    # A rank that is the busiest sets the pace, but with uneven stages the others may not feel it so early.
    pace = max(second - first for first, second in zip(short.busy, long.busy, strict=True))
    ends = [first + rounds * max(second - first, pace) for first, second in zip(early, late, strict=True)]
    busy = [first + rounds * (second - first) for first, second in zip(short.busy, long.busy, strict=True)]
    return Continued(ends, busy, short.table.held)


def _ends(table: Table, played: Played) -> list[float]:
    ends = [0.0] * table.pp
    for turn, end in zip(table.order.turns, played.ends, strict=True):
        ends[turn.rank] = end
    return ends

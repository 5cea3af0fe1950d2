"""What lives on a pipeline rank beside each of its actions: known from the schedule's table alone.

    F 1.2   others kept until B: (1, 2) · until W: (0, 0) · sums born: (0, 1) · messages in flight: 1

Rows are posted for one action ahead, and what is sent lives until its taker has done with it (``layout/schedule/mail``).
Only those are listed that no other of the same kind exceeds in every place: the fullest moment is in one of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from fivefold.layout.schedule import schedule
from fivefold.layout.schedule.action import Action, Part
from fivefold.layout.schedule.order import Task
from fivefold.layout.schedule.play import play
from fivefold.layout.schedule.table import Table
from fivefold.layout.spec import ScheduleName

Pass = Literal["F", "B", "BW", "W"]


class Stretch(NamedTuple):
    """A pass of one micro-batch through a stage. ``first``: no gradient of the stage lives yet, nor are its weights
    known to be current; ``last``: after it gradients are reduced.
    """

    kind: Pass
    stage: int
    first: bool
    last: bool


class Flight(NamedTuple):
    """A stretch and what lives beside it, per stage held: other micro-batches until their B and until their W, whether
    sums of gradients live (0 or 1) and whether they are reduced; and messages of one stream each.
    """

    stretch: Stretch
    until_backward: tuple[int, ...]
    until_weight: tuple[int, ...]
    born: tuple[int, ...]
    reduced: tuple[int, ...]
    messages: int


@lru_cache(maxsize=1024)
def flights(name: ScheduleName, pp: int, v: int, micro_batches: int) -> tuple[tuple[Flight, ...], ...]:
    """Of every rank those among which its fullest moment is."""
    if pp == 1:
        return (tuple(_alone(micro_batches)),)
    table = schedule(name, pp=pp, v=v, micro_batches=micro_batches)
    sent = _sent(table)
    return tuple(_highest(_row(table, rank, sent[rank])) for rank in range(pp))


def _alone(micro_batches: int) -> Iterator[Flight]:
    """The first micro-batch, the second, which is like all others, and the last."""
    for index in sorted({0, min(1, micro_batches - 1), micro_batches - 1}):
        for kind in ("F", "BW"):
            last = index == micro_batches - 1 and kind == "BW"
            yield Flight(Stretch(kind, 0, index == 0, last), (0,), (0,), (int(index > 0),), (0,), 0)


def _row(table: Table, rank: int, sent: Sequence[int]) -> Iterator[Flight]:
    """Every pass of a rank in order; under FB the forward comes first."""
    held, row = table.held[rank], table.rows[rank]
    place = {stage: at for at, stage in enumerate(held)}
    final = {part: at for at, action in enumerate(row) for part in _passes(action)}
    last = {(kind, stage): max(i for (k, s, i) in final if (k, s) == (kind, stage)) for kind, stage, _ in final}
    last = {key: max(at for (k, s, _), at in final.items() if (k, s) == key) for key in last}
    kept, late, born, done = ([0] * len(held) for _ in range(4))
    here = 0  # streams between two stages of this rank
    for at, action in enumerate(row):
        coming = _remote(table, rank, row[at + 1]) if at + 1 < len(row) else 0
        passes = _passes(action)
        for number, (kind, stage, micro_batch) in enumerate(passes):
            mine = place[stage]
            if kind in ("B", "BW"):
                kept[mine] -= 1
            if kind == "W":
                late[mine] -= 1
            here -= _arrives_here(table, rank, kind, stage, micro_batch)
            waits = sum(_is_remote(table, rank, part) for part in _entries(table, passes[number + 1 :]))
            first = {"F": not born[mine] and not kept[mine]}.get(kind, not born[mine])
            ends = kind in ("BW", "W") and last[kind, stage] == at and not _later(last, stage, kind, at)
            yield Flight(
                Stretch(kind, stage, first, ends), tuple(kept), tuple(late), tuple(born), tuple(done),
                coming + waits + sent[at] + here + _sent_before(table, rank, passes[:number]),
            )  # fmt: skip
            kept[mine] += kind == "F"
            late[mine] += kind == "B"
            born[mine] = int(born[mine] or kind != "F")
            done[mine] = int(ends)
            here += _stays_here(table, rank, kind, stage, micro_batch)

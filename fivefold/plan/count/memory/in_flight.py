"""What lives on a pipeline rank beside each pass of a micro-batch through a stage: known from the schedule alone.

    F of stage 1   others kept until B: (1, 2) · until W: (0, 0) · sums born: (0, 1) · reduced: (0, 0) · on the way: 1

Receives are posted one action ahead, and what is sent lives until its taker has done with it (``schedule/p2p.py``).
Listed are only those that no other of the same kind exceeds in every place: the fullest moment is in one of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivefold.layout.names import ScheduleName
from fivefold.layout.schedule import schedule
from fivefold.layout.schedule.action import Action, parts
from fivefold.layout.schedule.order import Task
from fivefold.layout.schedule.play import play
from fivefold.layout.schedule.table import Table

Kind = Literal["F", "B", "BW", "W"]
Pass = tuple[Kind, int, int]  # stage, micro-batch


class LivePass(NamedTuple):
    """A pass and what lives beside it: ``counts`` are, for each stage held, other micro-batches until their B and until
    their W, whether sums of gradients live, those too that only W makes, and whether they are reduced; and last streams
    between stages of this rank when the pass has ended, and all that are on their way meanwhile.

    ``first``: of the stage no gradient lives yet (F: it may have to gather; W: none that it makes); ``last``: its
    gradients are reduced, under B those that are not put off.
    """

    kind: Kind
    stage: int
    first: bool
    last: bool
    counts: tuple[int, ...]


class LivePasses(NamedTuple):
    """Of every rank, in order where there is no pipeline; and as columns: their counts, ranks, and places among the
    ``distinct`` (kind, stage, first, last).
    """

    rows: tuple[tuple[LivePass, ...], ...]
    counts: NDArray[np.int64]
    rank: NDArray[np.int64]
    distinct: tuple[tuple[Kind, int, bool, bool], ...]
    place: NDArray[np.int64]


def in_order(table: Table, rank: int) -> Iterator[LivePass]:
    """Every pass of a rank of a pipeline."""
    return _row(table, rank, list(_sent(table))[rank])


@lru_cache(maxsize=1024)
def live_passes(name: ScheduleName, pp: int, v: int, micro_batches: int) -> LivePasses:
    """Of a schedule."""
    if pp == 1:
        rows: tuple[tuple[LivePass, ...], ...] = (tuple(_alone(micro_batches)),)
    else:
        table = schedule(name, pp=pp, v=v, micro_batches=micro_batches)
        rows = tuple(_highest(_row(table, rank, sent)) for rank, sent in enumerate(_sent(table)))
    every = [live_pass for row in rows for live_pass in row]
    distinct = tuple(dict.fromkeys(live_pass[:4] for live_pass in every))
    places = {each: place for place, each in enumerate(distinct)}
    counts, place = (np.array(column) for column in (
        [live_pass.counts for live_pass in every], [places[live_pass[:4]] for live_pass in every],
    ))  # fmt: skip
    return LivePasses(rows, counts, np.repeat(np.arange(len(rows)), [len(row) for row in rows]), distinct, place)


def _alone(micro_batches: int) -> Iterator[LivePass]:
    """The first micro-batch, the second, which is like all others, and the last."""
    for index in sorted({0, min(1, micro_batches - 1), micro_batches - 1}):
        counts = (0, 0, int(index > 0), int(index > 0), 0, 0, 0)
        yield LivePass("F", 0, index == 0, False, counts)
        yield LivePass("BW", 0, index == 0, index == micro_batches - 1, counts)


def _row(table: Table, rank: int, sent: Sequence[int]) -> Iterator[LivePass]:
    """Every pass of a rank in order; ``sent``: its messages under way at each action."""
    held, row = table.rank_stages[rank], [_passes(action) for action in table.rows[rank]]
    place = {stage: at for at, stage in enumerate(held)}
    left = Counter((kind == "B", stage) for action in row for kind, stage, _ in action if kind != "F")
    until_b, until_w, born, made, reduced, begun = ([0] * len(held) for _ in range(6))
    here = 0  # streams from a stage of this rank to another
    for at, action in enumerate(row):
        ahead = sum(_entry(table, each) not in (None, rank) for each in (row[at + 1] if at + 1 < len(row) else ()))
        gone = 0
        for number, (kind, stage, i) in enumerate(action):
            mine, entry, target = place[stage], _entry(table, (kind, stage, i)), _exit(table, (kind, stage, i))
            here -= entry == rank
            until_b[mine] -= kind in ("B", "BW")
            until_w[mine] -= kind == "W"
            left[kind == "B", stage] -= kind != "F"
            waits = sum(_entry(table, each) not in (None, rank) for each in action[number + 1 :])
            first = not {"F": begun, "W": made}.get(kind, born)[mine]
            messages, stays = ahead + waits + sent[at] + gone + here, here + (target == rank)
            last = kind != "F" and not left[kind == "B", stage]
            yield LivePass(kind, stage, first, last, (*until_b, *until_w, *born, *made, *reduced, stays, messages))
            begun[mine] = 1
            until_b[mine] += kind == "F"
            until_w[mine] += kind == "B"
            born[mine] |= kind != "F"
            made[mine] |= kind in ("W", "BW")
            reduced[mine] |= last and kind != "B"
            here = stays
            gone += target not in (None, rank)


def _passes(action: Action) -> tuple[Pass, ...]:
    """One after another."""
    kind, stage, i, backward_stage, backward_i = action
    return (("F", stage, i), ("BW", backward_stage, backward_i)) if kind == "FB" else ((kind, stage, i),)


def _entry(table: Table, each: Pass) -> int | None:
    """The rank from which a pass gets a stream, or its gradient."""
    kind, stage, i = each
    return _rank(table, i, {"F": stage - 1, "W": -1}.get(kind, stage + 1))


def _exit(table: Table, each: Pass) -> int | None:
    """The rank that gets one from it."""
    kind, stage, i = each
    return _rank(table, i, {"F": stage + 1, "W": -1}.get(kind, stage - 1))


def _rank(table: Table, micro_batch: int, stage: int) -> int | None:
    return table.paths[micro_batch][stage] if 0 <= stage < table.stages else None


def _sent(table: Table) -> Iterator[list[int]]:
    """Per rank and action its own messages whose takers have not done with them, if F, B and W take one unit each."""
    spans = play(table, seconds=_units).spans
    ends = {part: span.end for row in spans for span in row for part in parts(span.action)}
    for rank, row in enumerate(spans):
        under_way: list[float] = []
        counts = []
        for span in row:
            under_way = [end for end in under_way if end > span.start]
            counts.append(len(under_way))
            for kind, stage, i in _passes(span.action):
                if _exit(table, (kind, stage, i)) not in (None, rank):
                    under_way.append(ends["F", stage + 1, i] if kind == "F" else ends["B", stage - 1, i])
        yield counts


def _units(task: Task) -> float:
    return {"BW": 2.0, "FB": 3.0}.get(task.kind, 1.0)


def _highest(found: Iterable[LivePass]) -> tuple[LivePass, ...]:
    """In the order of stages those that no other exceeds."""
    kinds: dict[tuple[int, Kind], list[LivePass]] = {}
    for live_pass in dict.fromkeys(found):
        kinds.setdefault((live_pass.stage, live_pass.kind), []).append(live_pass)
    return tuple(live_pass for _, alike in sorted(kinds.items()) for live_pass in _unexceeded(alike))


def _unexceeded(alike: list[LivePass]) -> Iterator[LivePass]:
    """Gradients that are reduced take no more than their sums, and a backward that brings them to life no more than one
    that finds them.
    """
    counts = np.array([live_pass.counts for live_pass in alike])
    held = counts.shape[1] // 5
    counts[:, 4 * held : 5 * held] *= -1
    ends = np.array([(live_pass.first, live_pass.last) for live_pass in alike])
    plain: NDArray[np.bool_] = ~np.asarray(ends.any(axis=1)) & (alike[0].kind != "F")
    kept: list[int] = []
    open_ = np.lexsort((~plain, -counts.sum(axis=1)))  # none exceeds one before it
    while len(open_):
        best = int(open_[0])
        kept.append(best)
        same = (ends[open_] == ends[best]).all(axis=1) | (plain[best] & ~ends[open_, 1])
        open_ = open_[~np.asarray(same & (counts[open_] <= counts[best]).all(axis=1))]
    return (alike[at] for at in sorted(kept))

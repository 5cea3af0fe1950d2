"""Counts of what lives on a pipeline rank during each pass (F, B, BW or W of a stage), from the schedule alone.

    F of stage 1   others kept until B: (1, 2) · until W: (0, 0) · with sums: (0, 1) · reduced: (0, 0) · messages: 1

Receives are posted one action ahead; a sent tensor lives until its receiver is done with it (``schedule/p2p.py``).
Passes whose counts another pass of the same kind exceeds everywhere are left out: they cannot be the peak.
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
# Which passes may leave a reduction of gradients under way: none, the last backward of a stage, every backward.
Reduced = Literal["never", "last", "each"]
# Whether the head's weights stay gathered from F to B of the last stage: no; they do; and so does a table it shares.
Heads = Literal["", "own", "tied"]


class Before(NamedTuple):
    """The pass just before another on its rank, which may have left a reduction of gradients under way."""

    kind: Kind
    stage: int
    last: bool


class LivePass(NamedTuple):
    """A pass and what lives beside it. ``counts`` has for each stage of the rank: other micro-batches between F and B;
    between B and W; whether gradient sums live; whether those live that only W makes; whether they are reduced; whether
    weights, or the head's, stay gathered from an F to a B. Then streams between stages of this rank after the pass, and
    all streams sent or received during it; with ``buffers`` of every micro-batch, gradients of inputs made so far, less
    those of this pass.

    ``first``: the stage has no gradient yet (F: it may have to gather; W: none of those that W makes); ``last``: no
    more come after this pass (B: of those that are not deferred to W). ``before``: None if it left nothing under way.
    ``held``: an F has left the stage's weights gathered.
    """

    kind: Kind
    stage: int
    first: bool
    last: bool
    before: Before | None
    held: bool
    counts: tuple[int, ...]


class LivePasses(NamedTuple):
    """Passes of every rank: as ``rows`` per rank (in time order only without a pipeline), and as columns: their counts,
    their rank, and their index into ``distinct``, the distinct (kind, stage, first, last, before, held).
    """

    rows: tuple[tuple[LivePass, ...], ...]
    counts: NDArray[np.int64]
    rank: NDArray[np.int64]
    distinct: tuple[tuple[Kind, int, bool, bool, Before | None, bool], ...]
    place: NDArray[np.int64]


def in_order(
    table: Table, rank: int, reduced: Reduced, *, keeps: bool = False, buffers: bool = False, heads: Heads = ""
) -> Iterator[LivePass]:
    """Every pass of one pipeline rank, in time order; ``keeps``: weights stay gathered from an F to a B; ``buffers``:
    what is received lives throughout, in others' account.
    """
    found = _row(table, rank, list(_sent_and_live(table))[rank], keeps, heads)
    return _under_way(_inputs_kept(found, table, rank) if buffers else found, reduced)


@lru_cache(maxsize=1024)
def live_passes(
    name: ScheduleName, pp: int, v: int, micro_batches: int, reduced: Reduced = "never", *, keeps: bool = False,
    buffers: bool = False, heads: Heads = "",
) -> LivePasses:  # fmt: skip
    """The passes of a schedule that can be the peak of a rank."""
    if pp == 1:
        rows: tuple[tuple[LivePass, ...], ...] = (tuple(_under_way(_without_pipeline(micro_batches, keeps), reduced)),)
    else:
        table = schedule(name, pp=pp, v=v, micro_batches=micro_batches)
        found = (_row(table, rank, sent, keeps, heads) for rank, sent in enumerate(_sent_and_live(table)))
        rows = tuple(
            _highest(_under_way(_inputs_kept(each, table, rank) if buffers else each, reduced))
            for rank, each in enumerate(found)
        )
    every = [live_pass for row in rows for live_pass in row]
    distinct = tuple(dict.fromkeys(live_pass[:6] for live_pass in every))
    places = {each: place for place, each in enumerate(distinct)}
    counts, place = (np.array(column) for column in (
        [live_pass.counts for live_pass in every], [places[live_pass[:6]] for live_pass in every],
    ))  # fmt: skip
    return LivePasses(rows, counts, np.repeat(np.arange(len(rows)), [len(row) for row in rows]), distinct, place)


def _under_way(found: Iterable[LivePass], reduced: Reduced) -> Iterator[LivePass]:
    """Passes in time order, each with the one before it if that may have left a reduction under way."""
    before: Before | None = None
    for live_pass in found:
        yield live_pass if before is None else live_pass._replace(before=before)
        kind, stage, _, last, *_ = live_pass
        leaves = kind != "F" and (reduced == "each" or (reduced == "last" and last))
        before = Before(kind, stage, last) if leaves else None


def _without_pipeline(micro_batches: int, keeps: bool) -> Iterator[LivePass]:
    """The passes without a pipeline: of the first micro-batch, the second, which is like all others, and the last."""
    for index in sorted({0, min(1, micro_batches - 1), micro_batches - 1}):
        counts = (0, 0, int(index > 0), int(index > 0), 0, 0, 0, 0)
        yield LivePass("F", 0, index == 0, False, None, False, counts)
        yield LivePass("BW", 0, index == 0, index == micro_batches - 1, None, keeps, counts)


def _row(table: Table, rank: int, sent: Sequence[int], keeps: bool, heads: Heads) -> Iterator[LivePass]:
    """Every pass of a rank in time order; ``sent``: its sent messages that still live at each action."""
    held, row = table.rank_stages[rank], [_passes(action) for action in table.rows[rank]]
    place = {stage: at for at, stage in enumerate(held)}
    left = Counter((kind == "B", stage) for action in row for kind, stage, _ in action if kind != "F")
    until_b, until_w, born, made, reduced, begun, whole = ([0] * len(held) for _ in range(7))
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
            others = whole if kind == "W" else [int(each != mine and some) for each, some in enumerate(whole)]
            if heads == "tied" and (kind, stage) == ("F", 0) and not keeps:
                others = [0] * len(held)  # the table, which it gathers itself
            counts = (*until_b, *until_w, *born, *made, *reduced, *others, stays, messages)
            yield LivePass(kind, stage, first, last, None, keeps and bool(whole[mine]) and kind != "W", counts)
            begun[mine] = 1
            stays_whole = keeps or (heads != "" and stage == table.stages - 1)
            whole[mine] = int(stays_whole and kind == "F") if kind != "W" else whole[mine]
            until_b[mine] += kind == "F"
            until_w[mine] += kind == "B"
            born[mine] |= kind != "F"
            made[mine] |= kind in ("W", "BW")
            reduced[mine] |= last and kind != "B"
            here = stays
            gone += target not in (None, rank)


def _inputs_kept(found: Iterable[LivePass], table: Table, rank: int) -> Iterator[LivePass]:
    """The passes with what all backwards before have left in place of messages under way: gradients of inputs, and on
    a rank of several stages outputs sent, which are waited for at the end of the step. Less what a pass itself counts
    of its buffers: its input and, in a backward, the gradient of its output.
    """
    made, several = 0, len(table.rank_stages[rank]) > 1
    sends = [several and _exit(table, ("F", stage, 0)) not in (None, rank) for stage in range(table.stages)]
    for live_pass in found:
        kind, stage = live_pass.kind, live_pass.stage
        own = (kind != "W" and stage > 0) + (kind in ("B", "BW") and stage < table.stages - 1)
        yield live_pass._replace(counts=(*live_pass.counts[:-2], 0, made - own))
        made += ((stage > 0) + sends[stage]) * (kind in ("B", "BW"))


def _passes(action: Action) -> tuple[Pass, ...]:
    """The passes of an action; FB runs F, then BW."""
    kind, stage, i, backward_stage, backward_i = action
    return (("F", stage, i), ("BW", backward_stage, backward_i)) if kind == "FB" else ((kind, stage, i),)


def _entry(table: Table, each: Pass) -> int | None:
    """The rank that sends a pass its input stream, or its output's gradient; None: none does."""
    kind, stage, i = each
    return _rank(table, i, {"F": stage - 1, "W": -1}.get(kind, stage + 1))


def _exit(table: Table, each: Pass) -> int | None:
    """The rank that receives a pass's result; None: none does."""
    kind, stage, i = each
    return _rank(table, i, {"F": stage + 1, "W": -1}.get(kind, stage - 1))


def _rank(table: Table, micro_batch: int, stage: int) -> int | None:
    return table.paths[micro_batch][stage] if 0 <= stage < table.stages else None


def _sent_and_live(table: Table) -> Iterator[list[int]]:
    """Per rank, for each action, its sent messages that receivers still need; F, B and W take one unit of time."""
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
    """The passes that no other of the same stage and kind exceeds, ordered by stage and kind."""
    kinds: dict[tuple[int, Kind], list[LivePass]] = {}
    for live_pass in dict.fromkeys(found):
        kinds.setdefault((live_pass.stage, live_pass.kind), []).append(live_pass)
    return tuple(live_pass for _, alike in sorted(kinds.items()) for live_pass in _unexceeded(alike))


def _unexceeded(alike: list[LivePass]) -> Iterator[LivePass]:
    """Passes whose counts no other exceeds. Reduced gradients count negative, as they are no larger than their sums; a
    first backward, which allocates its sums, is exceeded by one that finds them allocated.
    """
    counts = np.array([live_pass.counts for live_pass in alike])
    held = counts.shape[1] // 6
    counts[:, 4 * held : 5 * held] *= -1
    places: dict[object, int] = {}
    ends = np.array([
        (live_pass.first, live_pass.last, places.setdefault((live_pass.before, live_pass.held), len(places)))
        for live_pass in alike
    ])  # fmt: skip
    plain: NDArray[np.bool_] = ~np.asarray(ends[:, :2].any(axis=1)) & (alike[0].kind != "F")
    kept: list[int] = []
    open_ = np.lexsort((~plain, -counts.sum(axis=1)))  # none exceeds one before it
    while len(open_):
        best = int(open_[0])
        kept.append(best)
        same = (ends[open_] == ends[best])[:, :2].all(axis=1) | (plain[best] & (ends[open_, 1] == 0))
        same &= ends[open_, 2] == ends[best, 2]
        open_ = open_[~np.asarray(same & (counts[open_] <= counts[best]).all(axis=1))]
    return (alike[at] for at in sorted(kept))

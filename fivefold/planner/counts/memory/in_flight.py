"""Counts of what lives on a pipeline rank during each pass (F, B, BW or W of a stage), from the schedule alone.

    F of stage 1   others kept until B: (1, 2) · until W: (0, 0) · with sums: (0, 1) · reduced: (0, 0) · messages: 1

Passes whose counts another pass of the same kind exceeds everywhere are left out: they cannot be the peak.
An action of a schedule may be two passes, and streams between stages live during each:

    action   F0.2   F0.3+BW1.1   BW0.0        passes   F0.2   F0.3   BW1.1   BW0.0

Receives are posted one action ahead; a sent tensor lives until its receiver is done with it, where F, B and W take one
unit of time each (``schedule/p2p.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivefold.layout.schedule import schedule
from fivefold.layout.schedule.columns import BW, FB, KINDS, B, F, W, needs_of
from fivefold.layout.schedule.order import Task
from fivefold.layout.schedule.pipeline_schedule import ScheduleName
from fivefold.layout.schedule.play import play
from fivefold.layout.schedule.table import Table

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


class PassStreams(NamedTuple):
    """One entry per pass, rank by rank in time order; an FB is F, then BW. ``kind``: an index into ``columns.KINDS``.
    ``stays``: streams from a stage of the rank to another after the pass; ``messages``: all that live during it.
    """

    rank: Ints
    kind: Ints
    stage: Ints
    stays: Ints
    messages: Ints


def pass_streams(table: Table) -> PassStreams:
    """All passes of a table."""
    columns, stages = table.columns, table.stages
    both = columns.kind == FB
    action = np.repeat(np.arange(len(both)), 1 + both)
    later = np.zeros(len(action), bool)  # the second pass of its action
    later[1:] = action[1:] == action[:-1]
    kind = np.where(both[action], np.where(later, BW, F), columns.kind[action])
    stage = np.where(later, columns.backward_stage[action], columns.stage[action])
    micro_batch = np.where(later, columns.backward_micro_batch[action], columns.micro_batch[action])
    rank, ahead = columns.rank[action], kind == F
    paths = np.full((table.micro_batches, stages + 2), -1)  # none before the first stage and after the last
    paths[:, 1:-1] = table.paths
    source = np.where(kind == W, -1, paths[micro_batch, stage + np.where(ahead, 0, 2)])
    target = np.where(kind == W, -1, paths[micro_batch, stage + np.where(ahead, 2, 0)])
    comes, goes = (source >= 0) & (source != rank), (target >= 0) & (target != rank)
    part = 2 * (micro_batch * stages + stage) + np.where(ahead, 2, -1)
    under_way = _under_way(table, action[goes], part[goes])
    # those of the next action of the rank, and those of a later pass of the same action
    posted = np.append(np.bincount(action, weights=comes, minlength=len(both)).astype(np.int64), 0)
    same_rank = np.append(columns.rank[1:] == columns.rank[:-1], False)
    coming = np.where(same_rank, posted[1:], 0)[action] + np.append(comes[1:] & later[1:], False)
    gone = np.append(False, goes[:-1]) & later  # sent by the pass before of the same action
    change = (target == rank).astype(np.int64) - (source == rank)
    stays = np.cumsum(change)
    first = np.searchsorted(rank, rank)  # of the passes of its rank
    stays -= (stays - change)[first]
    here = stays - (target == rank)
    return PassStreams(rank, kind, stage, stays, coming + under_way[action] + gone + here)


def _under_way(table: Table, action: Ints, part: Ints) -> Ints:
    """For each action of a table the messages that its rank has sent before and that receivers still need; ``action``
    sends a message, to the action that makes ``part``.
    """
    columns, order = table.columns, table.order
    kinds = np.array([_units(Task(kind, 0, 0)) for kind in KINDS])
    ends = np.array(play(table, seconds=_units).ends)[order.places]
    end = float(ends.max(initial=0.0)) + 1
    starts = ends - kinds[columns.kind] + columns.rank * end
    receiver = needs_of(columns, stages=table.stages).maker[part]
    until = np.searchsorted(starts, ends[receiver] + columns.rank[action] * end)
    begins, stops = (np.bincount(at, minlength=len(ends) + 1) for at in (action + 1, np.maximum(until, action + 1)))
    return np.asarray(np.cumsum(begins - stops)[:-1])


def _units(task: Task) -> float:
    return {"BW": 2.0, "FB": 3.0}.get(task.kind, 1.0)


Kind = Literal["F", "B", "BW", "W"]
# Which passes may leave a reduction of gradients under way: none, the last backward of a stage, every backward.
Reduced = Literal["never", "last", "each"]
# Whether the head's weights stay gathered from F to B of the last stage: no; they do; and so does a table it shares.
Heads = Literal["", "own", "tied"]
COUNTED_AT_ONCE = 2**19  # counts of a kind, of as many ranks as have so few


class Before(NamedTuple):
    """The pass just before another on its rank, which may have left a reduction of gradients under way."""

    kind: Kind
    stage: int
    last: bool


class PassKind(NamedTuple):
    """What of a pass matters to its own peak. ``first``: the stage has no gradient yet (F: it may have to gather; W:
    none of those that W makes); ``last``: no more come after this pass (B: of those that are not deferred to W).
    ``before``: None if it left nothing under way. ``held``: an F has left the stage's weights gathered.
    """

    kind: Kind
    stage: int
    first: bool
    last: bool
    before: Before | None
    held: bool


class LivePass(NamedTuple):
    """A pass and what lives beside it. ``counts`` has for each stage of the rank: other micro-batches between F and B;
    between B and W; whether gradient sums live; whether those live that only W makes; whether they are reduced; whether
    weights, or the head's, stay gathered from an F to a B. Then streams between stages of this rank after the pass, and
    all streams sent or received during it; with ``buffers`` of every micro-batch, gradients of inputs made so far, less
    those of this pass.
    """

    own: PassKind
    counts: tuple[int, ...]


class Rules(NamedTuple):
    """What of a layout changes which passes are told apart. ``keeps``: weights stay gathered from an F to a B;
    ``buffers``: what is received lives throughout, in others' account.
    """

    reduced: Reduced = "never"
    keeps: bool = False
    buffers: bool = False
    heads: Heads = ""


class LivePasses(NamedTuple):
    """Passes of every rank as columns: their counts, their rank (in order), and their index into ``distinct``."""

    counts: Ints
    rank: Ints
    distinct: tuple[PassKind, ...]
    place: Ints

    def row(self, rank: int) -> Iterator[LivePass]:
        """The passes of one rank, in time order only without a pipeline or if all are here."""
        first, end = np.searchsorted(self.rank, (rank, rank + 1)).tolist()
        for counts, place in zip(self.counts[first:end].tolist(), self.place[first:end].tolist(), strict=True):
            yield LivePass(self.distinct[place], tuple(counts))


def in_order(table: Table, rank: int, rules: Rules) -> Iterator[LivePass]:
    """Every pass of one pipeline rank, in time order."""
    return next(_counted(table, rules, range(rank, rank + 1))).listed(table.stages).row(rank)


@lru_cache(maxsize=1024)
def live_passes(name: ScheduleName, pp: int, v: int, micro_batches: int, rules: Rules) -> LivePasses:
    """The passes of a schedule that can be the peak of a rank."""
    if pp == 1:
        return _without_pipeline(micro_batches, rules)
    table = schedule(name, pp=pp, v=v, micro_batches=micro_batches)
    parts = [found.highest() for found in _counted(table, rules, range(pp))]
    columns = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Counted._make(columns).listed(table.stages)


@lru_cache(maxsize=1024)
def alike_passes(
    name: ScheduleName, pp: int, v: int, micro_batches: int, rules: Rules, kinds: tuple[int, ...]
) -> tuple[list[int], Ints]:  # fmt: skip
    """Of the kinds of ``live_passes`` one of each that differ where stages of one of ``kinds`` are equal: indices into
    ``distinct``, and for every pass its index among these.
    """
    found = live_passes(name, pp, v, micro_batches, rules)
    numbers: dict[object, int] = {}
    every = []
    for kind, stage, first, last, before, held in found.distinct:
        ahead = before and (before.kind, kinds[before.stage], before.last, before.stage == stage)
        every.append(numbers.setdefault((kind, kinds[stage], first, last, ahead, held), len(numbers)))
    return [every.index(number) for number in range(len(numbers))], np.array(every)[found.place]


def _without_pipeline(micro_batches: int, rules: Rules) -> LivePasses:
    """The passes without a pipeline: of the first micro-batch, the second, which is like all others, and the last."""
    kinds, rows, before = list[PassKind](), list[list[int]](), None
    for index in sorted({0, min(1, micro_batches - 1), micro_batches - 1}):
        last = index == micro_batches - 1
        rows += [[0, 0, int(index > 0), int(index > 0), 0, 0, 0, 0]] * 2
        kinds.append(PassKind("F", 0, index == 0, False, before, False))
        kinds.append(PassKind("BW", 0, index == 0, last, None, rules.keeps))
        before = Before("BW", 0, last) if rules.reduced == "each" or (rules.reduced == "last" and last) else None
    distinct = tuple(dict.fromkeys(kinds))
    return LivePasses(
        np.array(rows), np.zeros(len(rows), np.int64), distinct, np.array([distinct.index(kind) for kind in kinds])
    )


class Counted(NamedTuple):
    """Passes as columns, rank by rank in time order. ``before``: 0 for None, else one more than its number."""

    rank: Ints
    kind: Ints
    stage: Ints
    first: Bools
    last: Bools
    before: Ints
    held: Bools
    counts: Ints

    def highest(self) -> Counted:
        """The passes that no other of their rank, stage and kind exceeds, ordered by these. Reduced gradients count
        negative, as they are no larger than their sums; a first backward, which allocates its sums, is exceeded by one
        that finds them allocated.
        """
        held, alike = self.counts.shape[1] // 6, self.before * 2 + self.held
        counts = self.counts.copy()
        counts[:, 4 * held : 5 * held] *= -1
        group = ((self.rank * (self.stage.max() + 1) + self.stage) * len(KINDS) + self.kind) * (alike.max() + 1) + alike
        plain, ends = ~(self.first | self.last) & (self.kind != F), self.first * 2 + self.last
        open_ = np.lexsort((~plain, -counts.sum(axis=1), group))  # none exceeds one before it
        kept = []
        while len(open_):
            starts = np.flatnonzero(np.append(True, group[open_[1:]] != group[open_[:-1]]))
            best = open_[starts]
            kept.append(best)
            above = np.repeat(best, np.diff(np.append(starts, len(open_))))
            same = (ends[open_] == ends[above]) | (plain[above] & ~self.last[open_])
            open_ = open_[~(same & (counts[open_] <= counts[above]).all(axis=1))]
        every = np.concatenate(kept)
        order = every[np.lexsort((every, self.kind[every], self.stage[every], self.rank[every]))]
        return Counted._make(column[order] for column in self)

    def listed(self, stages: int) -> LivePasses:
        """The same with the distinct kinds of passes."""
        code = self.kind * stages + self.stage
        code = ((code * 2 + self.first) * 2 + self.last) * 2 + self.held
        code = code * (int(self.before.max()) + 1) + self.before
        _, some, place = np.unique(code, return_index=True, return_inverse=True)
        columns = (column[some].tolist() for column in self[1:7])
        distinct = tuple(
            PassKind(_named(kind), stage, first, last, _before(before, stages), held)
            for kind, stage, first, last, before, held in zip(*columns, strict=True)
        )
        return LivePasses(self.counts, self.rank, distinct, place)


def _named(kind: int) -> Kind:
    return ("B", "BW", "F", "W")[kind]


def _before(number: int, stages: int) -> Before | None:
    place, last = divmod(number - 1, 2)
    return Before(_named(place // stages), place % stages, bool(last)) if number else None


def _counted(table: Table, rules: Rules, ranks: range) -> Iterator[Counted]:
    """The passes of ``ranks``, of some ranks at a time."""
    streams, width = pass_streams(table), len(table.rank_stages[0])
    starts = np.searchsorted(streams.rank, np.arange(table.pp + 1)).tolist()
    begin = ranks.start
    for rank in ranks:
        if rank + 1 == ranks.stop or (starts[rank + 2] - starts[begin]) * width > COUNTED_AT_ONCE:
            some = slice(starts[begin], starts[rank + 1])
            yield _count(table, rules, PassStreams._make(column[some] for column in streams))
            begin = rank + 1


def _count(table: Table, rules: Rules, passes: PassStreams) -> Counted:
    """The passes of some ranks."""
    rank, kind, stage, stays, messages = passes
    held = np.array(table.rank_stages)
    mine = held[rank] == stage[:, None]  # of the stages of its rank its own
    start = np.searchsorted(rank, rank)  # the first pass of its rank
    end = np.searchsorted(rank, rank, side="right") - 1

    def before(some: Bools) -> Ints:
        """By stage of the rank how many passes of ``some`` came before each."""
        here = mine & some[:, None]
        count = np.cumsum(here, axis=0, dtype=np.int32) - here
        return np.asarray(count - count[start])

    forward, backward, late = kind == F, (kind == B) | (kind == BW), kind == W
    apart, sums = before(kind == B), before(late | (kind == BW))  # sums: that W, or BW, makes
    ahead, both = before(forward), before(backward)
    weights = before(late)
    own_b, own_w = mine & backward[:, None], mine & late[:, None]
    until_b, until_w = ahead - both - own_b, apart - weights - own_w
    born, made = (both + weights) > 0, sums > 0
    at_b, at_w = apart + (mine & (kind == B)[:, None]), sums + (mine & (late | (kind == BW))[:, None])
    left = np.where((kind == B)[:, None], at_b[end] - at_b, at_w[end] - at_w)
    last = ~forward & (left[mine] == 0)
    reduced = before(last & (kind != B)) > 0
    begun = (ahead + both + weights) > 0
    first = ~np.where(forward, begun[mine], np.where(late, made[mine], born[mine]))
    whole = _gathered(table, rules, passes, mine, held[rank], start)
    others = whole & ~(mine & ~late[:, None])
    if rules.heads == "tied" and not rules.keeps:
        others[forward & (stage == 0)] = False  # the table, which it gathers itself
    if rules.buffers:
        stays, messages = np.zeros_like(stays), _inputs_kept(table, passes, start)
    leaves = ~forward & {"never": np.zeros_like(last), "last": last, "each": np.ones_like(last)}[rules.reduced]
    number = np.where(leaves, 1 + (kind * table.stages + stage) * 2 + last, 0)
    return Counted(
        rank, kind, stage, first, last,
        np.where(start == np.arange(len(rank)), 0, np.append(0, number[:-1])),
        whole[mine] & (~late if rules.keeps else forward),
        np.column_stack([until_b, until_w, born, made, reduced, others, stays, messages]).astype(np.int64),
    )  # fmt: skip


def _gathered(table: Table, rules: Rules, passes: PassStreams, mine: Bools, held: Ints, start: Ints) -> Bools:
    """By stage of the rank whether an F has left its weights gathered: the last of its F, B and BW was an F."""
    if not rules.keeps and not rules.heads:
        return np.zeros_like(mine)
    changes = np.where(passes.kind == W, 0, 2 * np.arange(1, len(mine) + 1) + (passes.kind == F))
    latest = np.maximum.accumulate(mine * changes[:, None], axis=0)
    latest = np.concatenate([np.zeros_like(latest[:1]), latest[:-1]])
    found = (latest % 2 == 1) & (latest // 2 > start[:, None])
    return np.asarray(found if rules.keeps else found & (held == table.stages - 1))


def _inputs_kept(table: Table, passes: PassStreams, start: Ints) -> Ints:
    """What all backwards before have left in place of messages under way: gradients of inputs, and on a rank of several
    stages outputs sent, which are waited for at the end of the step. Less what a pass itself counts of its buffers: its
    input and, in a backward, the gradient of its output.
    """
    rank, kind, stage, *_ = passes
    backward, path = (kind == B) | (kind == BW), np.array([*table.paths[0], -1])
    sends = (path[stage + 1] != rank) & (stage + 1 < table.stages) & (len(table.rank_stages[0]) > 1)
    own = ((kind != W) & (stage > 0)).astype(np.int64) + (backward & (stage < table.stages - 1))
    left = ((stage > 0).astype(np.int64) + sends) * backward
    made = np.cumsum(left) - left
    return np.asarray(made - made[start] - own)

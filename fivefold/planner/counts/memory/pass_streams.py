"""The passes of a schedule as arrays, and the streams between stages that live during each: received, sent, kept here.

    action   F0.2   F0.3+BW1.1   BW0.0        passes   F0.2   F0.3   BW1.1   BW0.0

Receives are posted one action ahead; a sent tensor lives until its receiver is done with it, where F, B and W take one
unit of time each (``schedule/p2p.py``).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivefold.layout.schedule.columns import BW, FB, KINDS, F, W, needs_of
from fivefold.layout.schedule.order import Task
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

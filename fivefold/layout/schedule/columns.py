"""The actions of a table as arrays, row by row, for computations over tens of thousands of them at once.

    rank         0  0  0  0  1  1  1  1
    kind         F  F  BW BW F  BW F  BW      an index into ``KINDS``
    micro_batch  0  1  0  1  0  0  1  1

A part (F or B of a stage and micro-batch) is a number: 2 (micro-batch · stages + stage), and one more for B.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING, NamedTuple

from fivefold.layout.schedule.action import Action, Kind

if TYPE_CHECKING:  # schedules load without numpy, which is imported where arrays are made
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

Row = tuple[Action, ...]

KINDS: tuple[Kind, ...] = ("B", "BW", "F", "W", "FB")  # in alphabetical order, except FB, which is two passes
B, BW, F, W, FB = range(len(KINDS))
CODES = {kind: code for code, kind in enumerate(KINDS)}


class Columns(NamedTuple):
    """One entry per action, rank by rank in the order of its row; fields as in ``Action``."""

    rank: Ints
    kind: Ints
    stage: Ints
    micro_batch: Ints
    backward_stage: Ints
    backward_micro_batch: Ints

    def action(self, at: int) -> Action:
        """Return the action at an index."""
        kind, *numbers = (int(column[at]) for column in self[1:])
        return Action(KINDS[kind], *numbers)


class Passes(NamedTuple):
    """Passes of one kind on every rank, with the key by which they are ordered among the passes of the rank."""

    kind: Kind
    key: Ints
    stage: Ints
    micro_batch: Ints


class Needs(NamedTuple):
    """Dependencies of all actions.

    ``parts``: the parts for which an action waits, [actions, 3]; -1 for none. ``maker``: the action that produces each
    part; its last entry is -1, so that part -1 has no producer, and ``len(parts)`` stands for a missing action.
    """

    parts: Ints
    maker: Ints


def build_columns(rows: Sequence[Row]) -> Columns:
    """Return the actions of ``rows`` as arrays."""
    import numpy as np

    kinds, *numbers = zip(*chain.from_iterable(rows), strict=True) if any(rows) else ((),) * 5
    rank = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    kind = np.array([CODES[kind] for kind in kinds], np.int64)
    return Columns(rank, kind, *(np.array(column, np.int64) for column in numbers))


def build_rows(columns: Columns, *, pp: int) -> tuple[Row, ...]:
    """Return the actions of each of ``pp`` ranks as records."""
    import numpy as np

    kinds = map(KINDS.__getitem__, columns.kind.tolist())
    actions = list(map(Action, kinds, *(column.tolist() for column in columns[2:])))
    ends = np.searchsorted(columns.rank, np.arange(pp), side="right").tolist()
    return tuple(tuple(actions[start:end]) for start, end in pairwise([0, *ends]))


def merge_passes(passes: Sequence[Passes], *, pp: int) -> Columns:
    """Return the columns of a table whose ranks run passes in the order of their keys; equal ones in the given order.

    All arrays are [pp, n] or broadcast to it.
    """
    import numpy as np

    def concatenate(columns: Iterable[Ints | int]) -> Ints:
        """Return arrays [pp, n] of all passes as one."""
        shapes = [(pp, run.key.shape[-1]) for run in passes]
        return np.concatenate([*map(np.broadcast_to, columns, shapes)], axis=1)

    turns = np.argsort(concatenate(run.key for run in passes), axis=1, kind="stable")
    kind, stage, micro_batch = (
        np.take_along_axis(concatenate(values), turns, axis=1).ravel()
        for values in (
            (CODES[run.kind] for run in passes),
            (run.stage for run in passes),
            (run.micro_batch for run in passes),
        )
    )
    rank, none = np.repeat(np.arange(pp), turns.shape[1]), np.full(turns.size, -1)
    return Columns(rank, kind, stage, micro_batch, none, none)


def build_dependencies(columns: Columns, *, stages: int) -> Needs:
    """Return the dependencies of all actions, as ``action.list_dependencies`` has them; no action waits for a W."""
    import numpy as np

    _, kind, stage, micro_batch, backward_stage, backward_micro_batch = columns
    is_pair, indices = kind == FB, np.arange(len(kind))
    runs_f = (kind == F) | is_pair
    runs_b = (kind == B) | (kind == BW) | is_pair
    forward = 2 * (micro_batch * stages + stage)
    backward = np.where(is_pair, 2 * (backward_micro_batch * stages + backward_stage), forward)
    has_next_stage = np.where(is_pair, backward_stage, stage) + 1 < stages
    maker = np.full(max(forward.max(initial=0), backward.max(initial=0)) + 5, len(indices))
    maker[-1] = -1
    maker[forward[runs_f]], maker[backward[runs_b] + 1] = indices[runs_f], indices[runs_b]
    parts = np.stack(
        [
            np.where(runs_f & (stage > 0), forward - 2, -1),
            np.where(runs_b, backward, np.where(kind == W, forward + 1, -1)),
            np.where(runs_b & has_next_stage, backward + 3, -1),
        ],
        axis=1,
    )
    return Needs(parts, maker)

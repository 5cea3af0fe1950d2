"""The actions of a table as arrays, row by row: what is worked out for tens of thousands of them at once.

    rank         0  0  0  0  1  1  1  1
    kind         F  F  BW BW F  BW F  BW      an index into ``KINDS``
    micro_batch  0  1  0  1  0  0  1  1

A part (F or B of a stage and micro-batch) is a number: 2 (micro-batch · stages + stage), and one more for B.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from fivefold.layout.schedule.action import Action, Kind

if TYPE_CHECKING:  # schedules load without numpy, which is imported where arrays are made
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

Row = tuple[Action, ...]

KINDS: tuple[Kind, ...] = ("B", "BW", "F", "W", "FB")  # in the order of the alphabet, but for FB, which is two passes
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
        """The action at an index."""
        kind, *numbers = (int(column[at]) for column in self[1:])
        return Action(KINDS[kind], *numbers)


class Needs(NamedTuple):
    """Per action the parts for which it waits, [actions, 3], -1 for none; and the action that makes each part, -1 in
    place of the last, so that part -1 has none. ``len(parts)`` stands for an action that is missing.
    """

    parts: Ints
    maker: Ints


def columns_of(rows: Sequence[Row]) -> Columns:
    """The actions of ``rows`` as arrays."""
    import numpy as np

    kinds, *numbers = zip(*chain.from_iterable(rows), strict=True) if any(rows) else ((),) * 5
    rank = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    kind = np.array([CODES[kind] for kind in kinds], np.int64)
    return Columns(rank, kind, *(np.array(column, np.int64) for column in numbers))


def needs_of(columns: Columns, *, stages: int) -> Needs:
    """What ``action.needs`` and ``action.parts`` say, of all actions at once; W makes nothing for which others wait."""
    import numpy as np

    _, kind, stage, micro_batch, backward_stage, backward_micro_batch = columns
    both, at = kind == FB, np.arange(len(kind))
    runs_f, runs_b = (kind == F) | both, (kind == B) | (kind == BW) | both
    forward = 2 * (micro_batch * stages + stage)
    back = np.where(both, 2 * (backward_micro_batch * stages + backward_stage), forward)
    behind = np.where(both, backward_stage, stage) + 1 < stages
    maker = np.full(max(forward.max(initial=0), back.max(initial=0)) + 5, len(at))
    maker[-1] = -1
    maker[forward[runs_f]], maker[back[runs_b] + 1] = at[runs_f], at[runs_b]
    parts = np.stack([
        np.where(runs_f & (stage > 0), forward - 2, -1),
        np.where(runs_b, back, np.where(kind == W, forward + 1, -1)),
        np.where(runs_b & behind, back + 3, -1),
    ], axis=1)  # fmt: skip
    return Needs(parts, maker)

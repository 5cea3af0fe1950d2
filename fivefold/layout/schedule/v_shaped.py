"""ZB-V, DualPipe and DualPipeV: two stages per rank, one near the beginning of the model and one near its end.

    ZB-V, DualPipeV   rank r holds stages r and 2·pp-1-r: a micro-batch goes down the ranks and back up
    DualPipe          rank r holds stages r and pp-1-r; micro-batches enter at both ends; every weight exists twice
The bubble of ZB-V is 0 for F = B = W, with the memory of 1F1B; on the least busy rank that of DualPipe is
(pp/2-1)(FB+B-2W) and that of DualPipeV (pp-1)(FB+B-2W) for F = B, with 2·n+1 live stage activations, n = ranks from one
end to where the directions meet.
Sources: Qi et al., arXiv:2401.10241 §6; DeepSeek-V3, arXiv:2412.19437 §3.2.1 and deepseek-ai/DualPipe.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from fivefold.layout.schedule.action import Action
from fivefold.layout.schedule.columns import Row
from fivefold.layout.schedule.table import Table

Pair = tuple[int, int]  # one value per stage of a rank: 0 is the near stage, 1 the far one


def generate_zbv(*, pp: int, micro_batches: int) -> Table:
    """Generate ZB-V: warm-up, then F, B, W of near and far stage in turn; at the end B before W."""
    rows = []
    for rank in range(pp):
        ranks_to_bottom = pp - rank  # ranks from here to the bottom of the V
        turns = ["F0"] * (2 * ranks_to_bottom - 1) + ["F1", "F0"] * rank + ["F1", "B1", "W1"] * ranks_to_bottom
        turns += ["F0", "B0", "W0", "F1", "B1", "W1"] * (micro_batches - pp)
        turns += ["B0", "B1"] * rank + ["B0", "W0"] * ranks_to_bottom + ["W1", "W0"] * rank
        rows.append(_number_actions(turns, stages=(rank, 2 * pp - 1 - rank), first=(0, 0), count=micro_batches))
    return Table.from_rows("zbv", rows, _list_v_path(pp, micro_batches))


def generate_dualpipev(*, pp: int, micro_batches: int) -> Table:
    """Generate DualPipeV: DualPipe folded in the middle, with half the ranks for the same stages."""
    rows = [
        _number_actions(
            _list_dualpipe_phases(rank, ranks=pp, count=micro_batches),
            stages=(rank, 2 * pp - 1 - rank),
            first=(0, 0),
            count=micro_batches,
        )
        for rank in range(pp)
    ]
    return Table.from_rows("dualpipev", rows, _list_v_path(pp, micro_batches))


def generate_dualpipe(*, pp: int, micro_batches: int) -> Table:
    """Generate DualPipe: half of the micro-batches enters at rank 0, the other half at the last rank."""
    half = micro_batches // 2
    rows = []
    for rank in range(pp):
        near = min(rank, pp - 1 - rank)
        first = (0, half) if near == rank else (half, 0)
        actions = _list_dualpipe_phases(near, ranks=pp // 2, count=half)
        rows.append(_number_actions(actions, stages=(near, pp - 1 - near), first=first, count=half))
    path = tuple(range(pp))
    return Table.from_rows("dualpipe", rows, (path,) * half + (path[::-1],) * half)


def _list_v_path(pp: int, micro_batches: int) -> tuple[tuple[int, ...], ...]:
    return ((*range(pp), *reversed(range(pp))),) * micro_batches


def _list_dualpipe_phases(near: int, *, ranks: int, count: int) -> list[str]:
    """Return the eight phases of DualPipe, ``near`` ranks from the end; ``count``: micro-batches, >= 2·ranks."""
    ranks_to_middle = ranks - 1 - near
    actions = ["F0"] * (2 * ranks_to_middle) + ["F0", "F1"] * (near + 1) + ["B1", "W1", "F1"] * ranks_to_middle
    middle = ["F0+BW1", "F1+BW0"] * (count - 2 * ranks + near + 1)
    if ranks_to_middle == 0:
        middle[:1] = ["F0", "BW1"]  # where the directions meet there is nothing to overlap yet
    actions += middle + ["BW1", "F1+BW0"] * ranks_to_middle
    tail = ["BW1", "BW0"] * (near + 1)
    split = [action.replace("BW", "B") for action in tail[near + 1 :]]
    deferred = [action.replace("B", "W") for action in split] + ["W0"] * ranks_to_middle
    actions += tail[: near + 1] + split
    actions += [action for weight in deferred[:ranks_to_middle] for action in (weight, "B0")] + deferred[
        ranks_to_middle:
    ]
    return actions


def _number_actions(actions: Iterable[str], *, stages: Pair, first: Pair, count: int) -> Row:
    """Turn the turns ("F0": F of the near stage) into actions from micro-batch ``first``.

    Those beyond ``count`` are dropped.

    F and B count up; W takes the oldest micro-batch whose B has run without W.
    """
    forward, backward = list(first), list(first)
    deferred: tuple[deque[int], deque[int]] = (deque(), deque())
    row: list[Action] = []
    for action in actions:
        kind, position = action[:-1], int(action[-1])
        stage = stages[position]
        if kind == "W":
            if deferred[position]:
                row.append(Action("W", stage, deferred[position].popleft()))
        elif kind == "F":
            if forward[position] < first[position] + count:
                row.append(Action("F", stage, forward[position]))
                forward[position] += 1
        elif backward[position] < first[position] + count:
            micro_batch = backward[position]
            backward[position] += 1
            if kind == "B":
                row.append(Action("B", stage, micro_batch))
                deferred[position].append(micro_batch)
            elif kind == "BW":
                row.append(Action("BW", stage, micro_batch))
            else:
                row.append(Action("FB", stages[1 - position], forward[1 - position], stage, micro_batch))
                forward[1 - position] += 1
    return tuple(row)

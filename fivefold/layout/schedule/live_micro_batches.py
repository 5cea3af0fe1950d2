"""Counts the micro-batches whose activations are live on a rank during each action, from the table alone.

Activations live from F until the end of B; those that the weight gradient needs live on until the end of W.
A count is a vector: micro-batches between F and B of each stage on the rank, then those between B and W of each.
"""

from __future__ import annotations

from collections.abc import Sequence

from fivefold.layout.schedule.action import Action

Count = tuple[int, ...]


def live_micro_batches(row: Sequence[Action], *, held: Sequence[int]) -> tuple[Count, ...]:
    """The count during each action of a rank that holds the stages ``held``; each has 2 · len(held) entries."""
    place = {stage: i for i, stage in enumerate(held)}
    later = len(held)
    now = [0] * (2 * later)
    counts: list[Count] = []
    for kind, stage, _, backward_stage, _ in row:
        if kind in ("F", "FB"):
            now[place[stage]] += 1
        counts.append(tuple(now))
        if kind in ("B", "BW"):
            now[place[stage]] -= 1
        elif kind == "FB":
            now[place[backward_stage]] -= 1
        if kind == "B":
            now[place[stage] + later] += 1
        elif kind == "W":
            now[place[stage] + later] -= 1
    return tuple(counts)


def highest(counts: Sequence[Count]) -> tuple[Count, ...]:
    """The counts that no other dominates in all entries; one of them is the peak, whatever bytes a micro-batch has."""
    distinct = set(counts)
    return tuple(
        one
        for one in sorted(distinct)
        if not any(other != one and all(map(int.__ge__, other, one)) for other in distinct)
    )

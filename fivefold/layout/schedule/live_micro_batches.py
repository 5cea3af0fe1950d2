"""How many activations are alive on a rank while each of its actions runs: known from the table alone.

A forward keeps them until B ends; what the weight gradient needs is kept on until W ends.
A count is a vector: micro-batches between F and B for each stage held, then those between B and W for each.
"""

from __future__ import annotations

from collections.abc import Sequence

from fivefold.layout.schedule.action import Action

Count = tuple[int, ...]


def live_micro_batches(row: Sequence[Action], *, held: Sequence[int]) -> tuple[Count, ...]:
    """The count during each action of a rank that holds the stages ``held``; length 2 · stages held."""
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
    """Those that no other exceeds in every place: one of them is the peak, whatever a micro-batch weighs."""
    distinct = set(counts)
    return tuple(
        one
        for one in sorted(distinct)
        if not any(other != one and all(map(int.__ge__, other, one)) for other in distinct)
    )

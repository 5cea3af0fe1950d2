"""Micro-batches that are live on a pipeline rank during each of its actions, counted one action after another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from fivefold.layout.schedule.action import list_parts
from fivefold.layout.schedule.table import Table


def count_live(table: Table, rank: int) -> Iterator[tuple[Counter[int], Counter[int]]]:
    """Count by stage the micro-batches between F and the end of B, and those between B and the end of W."""
    passed, owed = Counter[int](), Counter[int]()
    for action in table.rows[rank]:
        passed.update(stage for kind, stage, _ in list_parts(action) if kind == "F")
        yield passed.copy(), owed.copy()
        for kind, stage, _ in list_parts(action):
            if kind == "B":
                passed[stage] -= 1
            owed[stage] += {"B": 1, "W": -1}.get(kind, 0)


def peaks(table: Table, *, until_backward: Sequence[int], until_weight: Sequence[int]) -> tuple[int, ...]:
    """Return the most live bytes of each rank, where a micro-batch of each stage keeps given bytes until B and W."""
    return tuple(
        max(
            sum(number * until_backward[stage] for stage, number in passed.items())
            + sum(number * until_weight[stage] for stage, number in owed.items())
            for passed, owed in count_live(table, rank)
        )
        for rank in range(table.pp)
    )

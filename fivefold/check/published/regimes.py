"""What the scores teach: the error to expect of a class of runs, as the table that ``predict`` reads.

error = mean over sources of the mean absolute error of their cases: a source of 900 rows counts as much as one of 20.
Classes of fewer than five cases are left to the wider ones that hold them; held-out rows teach nothing.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

from fivefold.check.published.score import Quantity, Score, grouped
from fivefold.plan.price.errors import TABLE, Regime
from fivefold.record import Record

FEWEST_CASES = 5


class Expected(Record):
    """One row of the table; "*" stands for any."""

    chip: str
    shape: str
    kind: str
    quantity: Quantity
    sources: int
    cases: int
    error: float


def learn(scores: Iterable[Score]) -> tuple[Expected, ...]:
    """The table, the widest classes first."""
    classes: defaultdict[tuple[Regime, Quantity], list[Score]] = defaultdict(list)
    for score in scores:
        if score.quantity in ("time", "peak") and not score.held_out:
            for wider in Regime(score.chip, score.shape, score.kind).wider():
                classes[wider, score.quantity].append(score)
    rows = [
        Expected(
            **regime._asdict(),
            quantity=quantity,
            sources=len({score.source for score in found}),
            cases=len(found),
            error=round(fmean(_mean_error(group) for group in grouped(found, by=lambda score: score.source)), 3),
        )
        for (regime, quantity), found in classes.items()
        if len(found) >= FEWEST_CASES
    ]
    return tuple(sorted(rows, key=lambda row: (row.quantity, row.chip, row.shape, row.kind)))


def _mean_error(scores: Iterable[Score]) -> float:
    return fmean(abs(score.error) for score in scores)


def write(rows: Iterable[Expected], path: Path = TABLE) -> None:
    """Replace the table at ``path``."""
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, fieldnames=list(Expected.model_fields), lineterminator="\n")
        table.writeheader()
        table.writerows(row.model_dump() for row in rows)

"""What the scores teach: the table of ratios that ``predict`` reads, and how often a source unseen falls inside.

    coverage of source s = share of its runs inside the interval that was learned on all other sources alone

Ratios are measured over predicted, by constants set without the run's source. Of a class that one source measured the
table keeps ``KEPT`` ratios, evenly spaced in their order; runs that are held out teach nothing.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.published.score import Coverage, Score, grouped
from fivefold.planner.time.errors import TABLE, Cell, Quantity, RunClass, expected
from fivefold.step import Interval

KEPT = 9


def learn(scores: Iterable[Score]) -> tuple[Cell, ...]:
    """The table, in order."""
    told = [score for score in _of_steps(scores) if not score.held_out]
    found = []
    for group in grouped(told, by=lambda score: (score.quantity, score.source, score.of)):
        quantity: Quantity = "time" if group[0].quantity == "time" else "peak"
        first, ratios = group[0], sorted(score.measured / score.without for score in group)
        few = min(KEPT, len(ratios))
        kept = tuple(round(ratios[int((at + 0.5) * len(ratios) / few)], 3) for at in range(few))
        ranks = max(score.ranks for score in group)
        found.append(Cell(quantity, first.source, first.of, len(group), ranks, kept))
    return tuple(sorted(found))


def coverage(scores: Iterable[Score]) -> tuple[Coverage, ...]:
    """Of every source, by what all others teach."""
    told = _of_steps(scores)
    cells = learn(told)
    return tuple(_covered(group, cells) for group in grouped(told, by=lambda score: (score.quantity, score.source)))


def _of_steps(scores: Iterable[Score]) -> list[Score]:
    return [score for score in scores if score.quantity in ("time", "peak") and score.software]


def _covered(scores: Sequence[Score], cells: Iterable[Cell]) -> Coverage:
    first = scores[0]
    others = [cell for cell in cells if cell.quantity == first.quantity and cell.source != first.source]
    known: dict[RunClass, Interval | None] = {}
    inside = []
    for score in scores:
        if score.of not in known:
            known[score.of] = expected(1.0, of=score.of, ranks=score.ranks, cells=others)
        found, ratio = known[score.of], score.measured / score.without
        if found is not None:
            inside.append((found.low_50 <= ratio <= found.high_50, found.low_90 <= ratio <= found.high_90))
    half, most = (fmean(each) if each else 0.0 for each in zip(*inside, strict=True)) if inside else (0.0, 0.0)
    return Coverage(first.source, first.quantity, len(inside), half, most)


def write(cells: Iterable[Cell], path: Path = TABLE) -> None:
    """Replace the table at ``path``."""
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("quantity", "source", *RunClass._fields, "rows", "ranks", "ratios"))
        for cell in cells:
            ratios = " ".join(f"{ratio:g}" for ratio in cell.ratios)
            table.writerow((cell.quantity, cell.source, *cell.of, cell.rows, cell.ranks, ratios))

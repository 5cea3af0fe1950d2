"""Learn the table of ratios that ``predict`` reads, and measure the coverage of its intervals on unseen sources.

    coverage of source s = share of its runs inside the interval that was learned on all other sources alone

Ratios are measured over predicted, by constants set without the run's source. Of time and of each counter of memory
there is a row per source and class, with up to ``KEPT`` of its ratios, evenly spaced in their order. Held-out runs are
not used.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.published.score import Coverage, Score, group_by
from fivefold.planner.time.errors import (
    TABLE,
    ErrorCell,
    Quantity,
    RunClass,
    estimate_interval,
    select_cells,
)
from fivefold.step import Interval

KEPT = 9


def learn(scores: Iterable[Score]) -> tuple[ErrorCell, ...]:
    """Return the table, in order."""
    learned = []
    usable = [score for score in scores if not score.held_out]
    for quantity, group in _group_by_quantity(usable, by=lambda score: (score.source, score.run_class)):
        first = group[0]
        ratios = sorted(score.measured / score.predicted_without_source for score in group)
        n_kept = min(KEPT, len(ratios))
        kept = tuple(round(ratios[int((at + 0.5) * len(ratios) / n_kept)], 3) for at in range(n_kept))
        ranks = max(score.ranks for score in group)
        learned.append(ErrorCell(quantity, first.source, first.run_class, len(group), ranks, kept))
    return tuple(sorted(learned))


def coverage(scores: Iterable[Score]) -> tuple[Coverage, ...]:
    """Return the coverage of every source and counter by the intervals learned on all other sources."""
    scores = list(scores)
    cells = learn(scores)
    groups = _group_by_quantity(scores, by=lambda score: score.source)
    return tuple(_measure_coverage(quantity, group, cells) for quantity, group in groups)


def _group_by_quantity(
    scores: Iterable[Score], *, by: Callable[[Score], object]
) -> Iterator[tuple[Quantity, list[Score]]]:
    """Yield groups of scores of one quantity that has an interval, and that agree in ``by``."""
    for group in group_by(scores, by=lambda score: (score.learned_quantity, by(score))):
        if (quantity := group[0].learned_quantity) is not None:
            yield quantity, group


def _measure_coverage(quantity: Quantity, scores: Sequence[Score], cells: Iterable[ErrorCell]) -> Coverage:
    """Return the share of a source's rows within the intervals that all other sources give."""
    source = scores[0].source
    others = select_cells(quantity, [cell for cell in cells if cell.source != source])
    known: dict[RunClass, Interval | None] = {}
    inside = []
    for score in scores:
        if score.run_class not in known:
            known[score.run_class] = estimate_interval(1.0, of=score.run_class, ranks=score.ranks, cells=others)
        cell = known[score.run_class]
        ratio = score.measured / score.predicted_without_source
        if cell is not None:
            inside.append((cell.low_50 <= ratio <= cell.high_50, cell.low_90 <= ratio <= cell.high_90))
    half, most = (fmean(flags) if flags else 0.0 for flags in zip(*inside, strict=True)) if inside else (0.0, 0.0)
    return Coverage(source, quantity, len(inside), half, most)


def write(cells: Iterable[ErrorCell], path: Path = TABLE) -> None:
    """Replace the table at ``path``."""
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("quantity", "source", *RunClass._fields, "rows", "ranks", "ratios"))
        for cell in cells:
            ratios = " ".join(f"{ratio:g}" for ratio in cell.ratios)
            table.writerow((cell.quantity, cell.source, *cell.of, cell.rows, cell.ranks, ratios))

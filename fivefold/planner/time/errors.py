"""Expected intervals of step time and peak memory, from the errors of the planner on comparable published runs.

    ratio = measured / predicted, by constants set without the source (benchmarks/published/leave_one_source_out.py)
    weight of a source = SIMILAR_SOURCE_WEIGHT ^ (features in which its nearest runs differ), split among its runs by
        similarity
    interval = quantiles of the weighted ratios, with ``DOUBT`` added (the weight of a source not seen yet)

``errors.csv`` is written by ``python -m benchmarks.published --learn``: a row per source and class.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from math import exp, log
from pathlib import Path
from typing import Literal, NamedTuple

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.step import Interval

TABLE = Path(__file__).with_name("errors.csv")
SIMILAR_SOURCE_WEIGHT = 0.8  # weight of a source whose runs differ in one feature
DOUBT = 2.0  # weight, in sources, of widely spread ratios
SPREAD = 2.0  # factor by which those ratios' logarithms lie farther from the median
LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
Quantity = Literal["time", "peak"]


class RunClass(NamedTuple):
    """The features of a run; runs with equal features are expected to have similar errors."""

    generation: str  # of the chip
    nodes: str  # one, many
    kind: str  # dense, experts
    precision: str  # 16 bits, fp8, fp4, fp32
    software: str  # the stack's family
    recomputed: str  # nothing, some, all

    def count_differences(self, other: RunClass) -> int:
        """Return the number of features in which two classes differ."""
        return sum(ours != theirs for ours, theirs in zip(self, other, strict=True))


class ErrorCell(NamedTuple):
    """The measurements of one source for one class: ratios in order, of ``rows`` runs on up to ``ranks`` ranks."""

    quantity: Quantity
    source: str
    of: RunClass
    rows: int
    ranks: int
    ratios: tuple[float, ...]


def run_class(*, model: Model, machine: Machine, layout: Layout, job: Job) -> RunClass:
    """Return the class of a run."""
    chip, compute = machine.chip, job.precision.compute
    return RunClass(
        generation=chip.generation or chip.name,
        nodes="one" if layout.world <= machine.ranks_per_node else "many",
        kind="experts" if model.moe else "dense",
        precision="16 bits" if compute in ("bf16", "fp16") else compute,
        software=job.stack.family,
        recomputed="nothing" if layout.ac == "none" else "all" if layout.ac == "full" else "some",
    )


def estimate_run_interval(
    predicted: float, quantity: Quantity, *, of: RunClass, machine: Machine, ranks: int, path: Path = TABLE
) -> Interval | None:
    """Return ``estimate_interval`` for a run on ``ranks`` ranks of ``machine``; None on CPUs (none is published)."""
    return estimate_interval(predicted, of=of, ranks=ranks, cells=read(quantity, path)) if machine.has_gpus else None


def estimate_interval(predicted: float, *, of: RunClass, ranks: int, cells: Sequence[ErrorCell]) -> Interval | None:
    """Return the interval to expect for the value ``predicted``; None if no comparable run was published."""
    if not cells:
        return None
    points = sorted(weigh_ratios(of, cells))
    low, lower, middle, upper, high = (predicted * exp(find_quantile(points, level)) for level in LEVELS)
    same_class = [cell for cell in cells if not of.count_differences(cell.of)]
    total_weight = sum(weight for _, weight in points)
    error = sum(weight * abs(exp(-ratio) - 1) for ratio, weight in points) / total_weight
    return Interval(
        low_90=low,
        low_50=lower,
        middle=middle,
        high_50=upper,
        high_90=high,
        error=error,
        sources=len({cell.source for cell in same_class}),
        runs=sum(cell.rows for cell in same_class),
        outside=tuple(_list_outside_features(of, ranks, cells)),
    )


def weigh_ratios(of: RunClass, cells: Sequence[ErrorCell]) -> Iterator[tuple[float, float]]:
    """Yield (ln ratio, weight) of every ratio, and again with a wider spread and a small weight: for new sources."""
    sources: dict[str, list[tuple[ErrorCell, float]]] = {}
    for cell in cells:
        sources.setdefault(cell.source, []).append((cell, SIMILAR_SOURCE_WEIGHT ** of.count_differences(cell.of)))
    all_ratios = []
    for weighted_cells in sources.values():
        source_weight = max(weight for _, weight in weighted_cells)
        total = sum(weight * cell.rows for cell, weight in weighted_cells)
        for cell, weight in weighted_cells:
            share = weight * cell.rows / total / len(cell.ratios)
            rows = sum(cell_of_source.rows for cell_of_source, _ in weighted_cells)
            for ratio in cell.ratios:
                yield log(ratio), source_weight * share
                all_ratios.append((log(ratio), cell.rows / rows / len(cell.ratios)))
    all_ratios.sort()
    median = find_quantile(all_ratios, 0.5)
    total_weight = sum(weight for _, weight in all_ratios)
    yield from ((median + SPREAD * (ratio - median), DOUBT * weight / total_weight) for ratio, weight in all_ratios)


def find_quantile(points: Sequence[tuple[float, float]], level: float) -> float:
    """Return the value at ``level`` of ordered weighted values.

    It is interpolated between the two whose midpoints enclose it.
    """
    total_weight = sum(weight for _, weight in points)
    weight_below, previous = 0.0, None
    for value, weight in points:
        level_of_value = (weight_below + weight / 2) / total_weight
        if level_of_value >= level:
            if previous is None:
                return value
            previous_value, previous_level = previous
            return previous_value + (value - previous_value) * (level - previous_level) / (
                level_of_value - previous_level
            )
        weight_below, previous = weight_below + weight, (value, level_of_value)
    return points[-1][0]


def _list_outside_features(of: RunClass, ranks: int, cells: Sequence[ErrorCell]) -> Iterator[str]:
    """Yield the features in which the run lies outside all measurements."""
    for field, feature in of._asdict().items():
        if all(getattr(cell.of, field) != feature for cell in cells):
            yield f"GPUs of the {feature} generation" if field == "generation" else f"{field} {feature}"
    max_ranks = max((cell.ranks for cell in cells if cell.of.generation == of.generation), default=0)
    if max_ranks and ranks > max_ranks:
        yield f"{ranks:,} GPUs of the {of.generation} generation, where at most {max_ranks:,} were measured"
    pairs = ((cell.of.precision, cell.of.kind) for cell in cells if cell.of.generation == of.generation)
    if max_ranks and (of.precision, of.kind) not in set(pairs):
        yield f"{of.kind} in {of.precision} on GPUs of the {of.generation} generation"


@lru_cache(maxsize=4)
def read(quantity: Quantity, path: Path = TABLE) -> tuple[ErrorCell, ...]:
    """Return the table's cells of one quantity; empty without the file."""
    if not path.exists():
        return ()
    with path.open(encoding="utf-8", newline="") as file:
        return tuple(_list_cells(row for row in csv.DictReader(file) if row["quantity"] == quantity))


def _list_cells(rows: Iterable[dict[str, str]]) -> Iterator[ErrorCell]:
    for row in rows:
        yield ErrorCell(
            quantity=row["quantity"],  # type: ignore[arg-type]
            source=row["source"],
            of=RunClass(*(row[field] for field in RunClass._fields)),
            rows=int(row["rows"]),
            ranks=int(row["ranks"]),
            ratios=tuple(float(ratio) for ratio in row["ratios"].split()),
        )

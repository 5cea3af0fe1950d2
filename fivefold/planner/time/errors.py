"""What comparable published runs measured where the planner said 1: intervals by class, with the bias in them.

    ratio = measured / predicted, by constants set without the run's source (benchmarks/published/left_out.py)
    weight of a source = ALIKE ^ (features in which its nearest runs differ), shared by its runs as they are alike
    interval = quantiles of the weighted ratios, after ``DOUBT`` (the weight of a source that nobody has seen yet)

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
ALIKE = 0.8  # what a source counts for whose runs differ in one feature
DOUBT = 2.0  # sources' worth of ratios all over the place
SPREAD = 2.0  # of those: the logarithms of all ratios, so many times as far from their middle
LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
Quantity = Literal["time", "peak"]


class RunClass(NamedTuple):
    """Features by which runs err alike."""

    generation: str  # of the chip
    nodes: str  # one, many
    kind: str  # dense, experts
    precision: str  # 16 bits, fp8, fp4, fp32
    software: str  # the stack's family
    recomputed: str  # nothing, some, all

    def differing(self, other: RunClass) -> int:
        """In how many features two classes differ."""
        return sum(ours != theirs for ours, theirs in zip(self, other, strict=True))


class Cell(NamedTuple):
    """What one source measured of one class: ratios in order, of ``rows`` runs on up to ``ranks`` ranks."""

    quantity: Quantity
    source: str
    of: RunClass
    rows: int
    ranks: int
    ratios: tuple[float, ...]


def run_class(*, model: Model, machine: Machine, layout: Layout, job: Job) -> RunClass:
    """The class of a run."""
    chip, compute = machine.chip, job.precision.compute
    return RunClass(
        generation=chip.generation or chip.name,
        nodes="one" if layout.world <= machine.ranks_per_node else "many",
        kind="experts" if model.moe else "dense",
        precision="16 bits" if compute in ("bf16", "fp16") else compute,
        software=job.stack.family,
        recomputed="nothing" if layout.ac == "none" else "all" if layout.ac == "full" else "some",
    )


def expected_interval(
    predicted: float, quantity: Quantity, *, of: RunClass, machine: Machine, ranks: int, path: Path = TABLE
) -> Interval | None:
    """``expected`` of a run on so many ranks of ``machine``; None on CPUs, of which nothing is published."""
    return expected(predicted, of=of, ranks=ranks, cells=read(quantity, path)) if machine.backend == "nccl" else None


def expected(predicted: float, *, of: RunClass, ranks: int, cells: Sequence[Cell]) -> Interval | None:
    """What to expect where ``predicted`` is predicted; None where nothing of the kind was published."""
    if not cells:
        return None
    points = sorted(weighted_ratios(of, cells))
    low, lower, middle, upper, high = (predicted * exp(quantile(points, level)) for level in LEVELS)
    alike = [cell for cell in cells if not of.differing(cell.of)]
    whole = sum(weight for _, weight in points)
    error = sum(weight * abs(exp(-ratio) - 1) for ratio, weight in points) / whole
    return Interval(
        low_90=low, low_50=lower, middle=middle, high_50=upper, high_90=high, error=error,
        sources=len({cell.source for cell in alike}), runs=sum(cell.rows for cell in alike),
        outside=tuple(_outside(of, ranks, cells)),
    )  # fmt: skip


def weighted_ratios(of: RunClass, cells: Sequence[Cell]) -> Iterator[tuple[float, float]]:
    """Yield (ln ratio, weight) of every ratio, and of the doubt."""
    sources: dict[str, list[tuple[Cell, float]]] = {}
    for cell in cells:
        sources.setdefault(cell.source, []).append((cell, ALIKE ** of.differing(cell.of)))
    every = []
    for found in sources.values():
        most, total = max(weight for _, weight in found), sum(weight * cell.rows for cell, weight in found)
        for cell, weight in found:
            share = weight * cell.rows / total / len(cell.ratios)
            rows = sum(each.rows for each, _ in found)
            for ratio in cell.ratios:
                yield log(ratio), most * share
                every.append((log(ratio), cell.rows / rows / len(cell.ratios)))
    every.sort()
    middle, whole = quantile(every, 0.5), sum(weight for _, weight in every)
    yield from ((middle + SPREAD * (ratio - middle), DOUBT * weight / whole) for ratio, weight in every)


def quantile(points: Sequence[tuple[float, float]], level: float) -> float:
    """Return the value at ``level`` of values in order with weights: between the two whose middles enclose it."""
    whole = sum(weight for _, weight in points)
    below, last = 0.0, None
    for value, weight in points:
        at = (below + weight / 2) / whole
        if at >= level:
            if last is None:
                return value
            before, where = last
            return before + (value - before) * (level - where) / (at - where)
        below, last = below + weight, (value, at)
    return points[-1][0]


def _outside(of: RunClass, ranks: int, cells: Sequence[Cell]) -> Iterator[str]:
    """In what the run lies outside of all that was measured."""
    for field, ours in of._asdict().items():
        if all(getattr(cell.of, field) != ours for cell in cells):
            yield f"{field} {ours}"
    most = max((cell.ranks for cell in cells if cell.of.generation == of.generation), default=0)
    if most and ranks > most:
        yield f"{ranks:,} ranks of {of.generation}, of which {most:,} at most were measured"
    pairs = ((cell.of.precision, cell.of.kind) for cell in cells if cell.of.generation == of.generation)
    if most and (of.precision, of.kind) not in set(pairs):
        yield f"{of.kind} in {of.precision} on {of.generation}"


@lru_cache(maxsize=4)
def read(quantity: Quantity, path: Path = TABLE) -> tuple[Cell, ...]:
    """The table's cells of one quantity; empty without the file."""
    if not path.exists():
        return ()
    with path.open(encoding="utf-8", newline="") as file:
        return tuple(_cells(row for row in csv.DictReader(file) if row["quantity"] == quantity))


def _cells(rows: Iterable[dict[str, str]]) -> Iterator[Cell]:
    for row in rows:
        yield Cell(
            quantity=row["quantity"],  # type: ignore[arg-type]
            source=row["source"],
            of=RunClass(*(row[field] for field in RunClass._fields)),
            rows=int(row["rows"]),
            ranks=int(row["ranks"]),
            ratios=tuple(float(ratio) for ratio in row["ratios"].split()),
        )

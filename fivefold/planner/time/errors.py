"""Expected intervals of step time and memory, from the errors of the planner on comparable published runs.

    ratio = measured / predicted, by constants set without the source (benchmarks/published/leave_one_source_out.py)
    ln(ratio of a run) = middle + deviation of its source + deviation within the source
    weight of a source = SIMILAR_SOURCE_WEIGHT ^ (features in which its nearest runs differ), split among its runs by
        similarity

A run to predict belongs to a source not seen yet. Its ln(ratio) has the prediction interval of a meta-analysis with
random effects (Higgins, Thompson and Spiegelhalter 2009, doi:10.1111/j.1467-985X.2008.00552.x, section 4):

    middle ± t · √(between · (1 + 1/sources) + within)

with Student's t, whose degrees of freedom are the effective number of sources less one, and the variances *between*
sources and *within* one (decision 052). Each counter of memory has sources of its own. One with fewer than
``MIN_SOURCES`` has those of the counter that it contains too (``select_cells``).

``errors.csv`` is written by ``python -m benchmarks.published --learn``: a row per source and class.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from math import exp, log, sqrt
from pathlib import Path
from statistics import NormalDist
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.step import Interval

TABLE = Path(__file__).with_name("errors.csv")
SIMILAR_SOURCE_WEIGHT = 0.8  # weight of a source whose runs differ in one feature
LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
Quantity = Literal["time", "allocated", "reserved", "driver"]
MIN_SOURCES = 3  # two have one degree of freedom: Student's t for nine tenths is 6.3, of three it is 2.9
# The driver's bytes contain those that the allocator reserves, and these the tensors.
CONTAINED: Mapping[Quantity, Quantity] = MappingProxyType({"driver": "reserved", "reserved": "allocated"})


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


class ErrorDistribution(NamedTuple):
    """The distribution of ln(measured / predicted) of a new source's run: Student's t, shifted and scaled."""

    middle: float
    scale: float
    freedom: float  # degrees of freedom

    def find_quantile(self, level: float) -> float:
        """Return the value that the logarithm of the ratio stays below with probability ``level``.

        Student's quantile by its expansion around the normal one (Abramowitz and Stegun, 26.7.5).
        """
        z, n = NormalDist().inv_cdf(level), self.freedom
        square = z * z
        widening = (
            1
            + (square + 1) / (4 * n)
            + (5 * square**2 + 16 * square + 3) / (96 * n**2)
            + (3 * square**3 + 19 * square**2 + 17 * square - 15) / (384 * n**3)
        )
        return self.middle + self.scale * z * widening


class WeightedSource(NamedTuple):
    """The errors of one source for a class of runs: of ln(ratio), and the mean of |predicted / measured - 1|."""

    weight: float
    mean: float
    variance: float
    error: float


def run_class(*, model: Model, machine: Machine, layout: Layout, job: Job) -> RunClass:
    """Return the class of a run."""
    chip, recipe = machine.chip, job.precision
    return RunClass(
        generation=chip.generation or chip.name,
        nodes="one" if layout.world <= machine.ranks_per_node else "many",
        kind="experts" if model.moe else "dense",
        precision="16 bits" if recipe.number_format.operand_bits == 16 else recipe.compute,
        software=job.stack.family,
        recomputed="nothing" if layout.ac == "none" else "all" if layout.ac == "full" else "some",
    )


def estimate_run_interval(
    predicted: float, quantity: Quantity, *, of: RunClass, machine: Machine, ranks: int, path: Path = TABLE
) -> Interval | None:
    """Return ``estimate_interval`` for a run on ``ranks`` ranks of ``machine``; None on CPUs (none is published)."""
    if not machine.has_gpus:
        return None
    interval = _read_interval(quantity, of, ranks, path)
    return interval and _scale_interval(interval, predicted)


@lru_cache(maxsize=256)
def _read_interval(quantity: Quantity, of: RunClass, ranks: int, path: Path) -> Interval | None:
    """Return the interval of a predicted value of 1: each estimate of a run asks for that of its class."""
    return estimate_interval(1.0, of=of, ranks=ranks, cells=read_comparable(quantity, path))


def _scale_interval(interval: Interval, predicted: float) -> Interval:
    levels = ("low_90", "low_50", "middle", "high_50", "high_90")
    return interval.replace(**{level: predicted * getattr(interval, level) for level in levels})


def estimate_interval(predicted: float, *, of: RunClass, ranks: int, cells: Sequence[ErrorCell]) -> Interval | None:
    """Return the interval to expect for the value ``predicted``; None if fewer than two sources were published."""
    distribution = estimate_distribution(of, cells)
    if distribution is None:
        return None
    low, lower, middle, upper, high = (predicted * exp(distribution.find_quantile(level)) for level in LEVELS)
    same_class = [cell for cell in cells if not of.count_differences(cell.of)]
    sources = weigh_sources(of, cells)
    return Interval(
        low_90=low,
        low_50=lower,
        middle=middle,
        high_50=upper,
        high_90=high,
        error=_average([(source.error, source.weight) for source in sources]),
        sources=len({cell.source for cell in same_class}),
        runs=sum(cell.rows for cell in same_class),
        outside=tuple(_list_outside_features(of, ranks, cells)),
    )


def estimate_distribution(of: RunClass, cells: Iterable[ErrorCell]) -> ErrorDistribution | None:
    """Return the distribution of ln(ratio) of a run of the class ``of``; None if fewer than two sources are known."""
    sources = weigh_sources(of, cells)
    if len(sources) < 2:
        return None
    weights = [source.weight for source in sources]
    effective = sum(weights) ** 2 / sum(weight * weight for weight in weights)  # Kish's effective number
    middle = _average([(source.mean, source.weight) for source in sources])
    spread = _average([((source.mean - middle) ** 2, source.weight) for source in sources])
    between = spread * effective / (effective - 1)
    within = _average([(source.variance, source.weight) for source in sources])
    scale = sqrt(between * (1 + 1 / effective) + within)
    return ErrorDistribution(middle, scale, freedom=max(1.0, effective - 1))


def weigh_sources(of: RunClass, cells: Iterable[ErrorCell]) -> list[WeightedSource]:
    """Return what each source says of the class ``of``: its runs that are more similar count more."""
    cells_of_source: dict[str, list[ErrorCell]] = {}
    for cell in cells:
        cells_of_source.setdefault(cell.source, []).append(cell)
    return [_weigh_source(of, cells) for cells in cells_of_source.values()]


def _weigh_source(of: RunClass, cells: Sequence[ErrorCell]) -> WeightedSource:
    """Return mean, variance and error of a source's log ratios, weighted by similarity to the run ``of``."""
    similarities = [SIMILAR_SOURCE_WEIGHT ** of.count_differences(cell.of) for cell in cells]
    points = [
        (log(ratio), similarity * cell.rows / len(cell.ratios))
        for cell, similarity in zip(cells, similarities, strict=True)
        for ratio in cell.ratios
    ]
    mean = _average(points)
    return WeightedSource(
        weight=max(similarities),
        mean=mean,
        variance=_average([((value - mean) ** 2, weight) for value, weight in points]),
        error=_average([(abs(exp(-value) - 1), weight) for value, weight in points]),
    )


def _average(points: Sequence[tuple[float, float]]) -> float:
    """Return the mean of weighted values."""
    return sum(value * weight for value, weight in points) / sum(weight for _, weight in points)


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


@lru_cache(maxsize=8)
def read(quantity: Quantity, path: Path = TABLE) -> tuple[ErrorCell, ...]:
    """Return the table's cells of one quantity; empty without the file."""
    if not path.exists():
        return ()
    with path.open(encoding="utf-8", newline="") as file:
        return tuple(_list_cells(row for row in csv.DictReader(file) if row["quantity"] == quantity))


def read_comparable(quantity: Quantity, path: Path = TABLE) -> tuple[ErrorCell, ...]:
    """Return the cells of the table that say how far predictions of ``quantity`` are off."""
    return select_cells(quantity, tuple(chain.from_iterable(read(counter, path) for counter in get_args(Quantity))))


def select_cells(quantity: Quantity, cells: Sequence[ErrorCell]) -> tuple[ErrorCell, ...]:
    """Return the cells of ``quantity``; with fewer than ``MIN_SOURCES`` sources also those of what it contains."""
    own = tuple(cell for cell in cells if cell.quantity == quantity)
    contained = CONTAINED.get(quantity)
    if contained is None or len({cell.source for cell in own}) >= MIN_SOURCES:
        return own
    return (*select_cells(contained, cells), *own)


def _list_cells(rows: Iterable[dict[str, str]]) -> Iterator[ErrorCell]:
    """Yield the errors of published runs by source and class, as the table of errors has them."""
    for row in rows:
        yield ErrorCell(
            quantity=row["quantity"],  # type: ignore[arg-type]
            source=row["source"],
            of=RunClass(*(row[field] for field in RunClass._fields)),
            rows=int(row["rows"]),
            ranks=int(row["ranks"]),
            ratios=tuple(float(ratio) for ratio in row["ratios"].split()),
        )

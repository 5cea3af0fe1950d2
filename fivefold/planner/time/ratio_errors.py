"""Estimate the error of a predicted ratio of two speeds: errors that two runs share cancel in their ratio.

    error of a pair = ln(predicted ratio / measured ratio), of two published runs of one source that differ in one thing
    half-width of an interval = √(Σ over the kinds of difference of (quantile of |error| of that kind)²)

Each source of a kind has the same weight, and ``DOUBT`` further ones have the mean errors of all kinds.
``ratio_errors.csv`` is written by ``python -m benchmarks.published --learn-ratios``: a row per kind and source.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from math import exp, hypot, log
from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple

from fivefold.adapter import Adapter
from fivefold.job import Job, Recipe
from fivefold.layout.spec import Layout
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.results.comparison import SpeedRatio

TABLE = Path(__file__).with_name("ratio_errors.csv")
Difference = Literal[
    "layout", "micro-batch", "recomputation", "precision", "ranks", "sequence", "batch", "chip", "chip and layout",
    "software", "adapter", "model", "settings",
]  # fmt: skip
DOUBT = 2.0  # weight, in sources, of the errors of all kinds
LEVELS = (0.5, 0.9)  # shares of the pairs inside the two intervals


class RunFacts(NamedTuple):
    """The facts of a run that a comparison with another is about."""

    on_gpus: bool
    model: Model
    chip: str
    ranks: int
    sequence: int
    batch: int
    precision: Recipe
    software: str
    adapter: Adapter | None
    settings: Job  # its other fields and those of its stack; the fields above are the same in all
    micro_batch: int
    recomputation: str
    layout: Layout  # without its replicas, micro-batch and recomputation


class KindErrors(NamedTuple):
    """The errors of one kind of difference in one source: quantiles of |error| at ``LEVELS``."""

    kind: Difference
    source: str
    pairs: int
    half: float
    most: float


def describe_run(model: Model, machine: Machine, layout: Layout, job: Job) -> RunFacts:
    """Return the facts of a run."""
    return RunFacts(
        on_gpus=machine.has_gpus,
        model=model,
        chip=machine.chip.name,
        ranks=layout.world,
        sequence=job.sequence,
        batch=job.global_batch,
        precision=job.precision,
        software=f"{job.stack.name} {job.stack.version}",
        adapter=job.adapter,
        settings=_strip_settings(job),
        micro_batch=layout.mbs,
        recomputation=layout.ac,
        layout=_drop_policies(layout),
    )


@lru_cache(maxsize=64)
def _strip_settings(job: Job) -> Job:
    """Return the job with the same sequence, batch, precision, adapter and software name as every other."""
    stack = job.stack.replace(name="", version="", family="")
    return job.replace(adapter=None, sequence=1, global_batch=1, precision="bf16", stack=stack)


COMPARED: Mapping[Difference, str] = {  # fields of ``RunFacts``
    "model": "model", "ranks": "ranks", "sequence": "sequence", "batch": "batch", "precision": "precision",
    "adapter": "adapter", "software": "software", "settings": "settings", "layout": "layout",
    "micro-batch": "micro_batch", "recomputation": "recomputation",
}  # fmt: skip


def find_differences(first: RunFacts, second: RunFacts) -> frozenset[Difference]:
    """Return the kinds of difference between two runs; empty if they are equal.

    A batch that grows with ranks or sequences is no difference of its own. Of two layouts with other degrees, the
    micro-batch and the recomputation are part of that difference.
    """
    kinds = {kind for kind, field in COMPARED.items() if getattr(first, field) != getattr(second, field)}
    if kinds & {"ranks", "sequence"}:
        kinds -= {"batch"}
    if "software" in kinds:
        kinds -= {"settings"}
    if "layout" in kinds:
        kinds -= {"micro-batch", "recomputation"}
    if first.chip != second.chip:
        in_layout = kinds & {"layout", "micro-batch", "recomputation"}
        kinds = (kinds - in_layout) | {"chip and layout" if in_layout else "chip"}
    return frozenset(kinds)


def _drop_policies(layout: Layout) -> Layout:
    """Return the layout with one replica, one sequence per micro-batch and no recomputation, for comparison only."""
    return layout.model_copy(update={"dp": 1, "mbs": 1, "ac": "none"})


@cache
def read_errors(path: Path = TABLE) -> tuple[KindErrors, ...]:
    """Return the rows of the table."""
    with path.open(encoding="utf-8", newline="") as file:
        return tuple(
            KindErrors(row["kind"], row["source"], int(row["pairs"]), float(row["half"]), float(row["most"]))  # type: ignore[arg-type]
            for row in csv.DictReader(file)
        )


def estimate_ratio_errors(kinds: Iterable[Difference], errors: Sequence[KindErrors]) -> tuple[float, float] | None:
    """Return the half-widths in ln of the intervals of ``LEVELS``; None if some kind was never measured.

    ``DOUBT`` sources with the mean errors of all kinds stand for sources not seen yet.
    """
    half, most = 0.0, 0.0
    for kind in kinds:
        sources = [row for row in errors if row.kind == kind]
        if not sources:
            return None
        total = len(sources) + DOUBT
        half = hypot(half, (sum(row.half for row in sources) + DOUBT * fmean(row.half for row in errors)) / total)
        most = hypot(most, (sum(row.most for row in sources) + DOUBT * fmean(row.most for row in errors)) / total)
    return half, most


@cache
def _look_up_published_errors(kinds: frozenset[Difference]) -> tuple[float, float] | None:
    """Return ``estimate_ratio_errors`` by the table of published pairs."""
    return estimate_ratio_errors(sorted(kinds), read_errors())


def estimate_speed_ratio(first: RunFacts, second: RunFacts, speeds: tuple[float, float]) -> SpeedRatio | None:
    """Return the speed of the first run over that of the second, from predicted ``speeds``, with its intervals.

    None on CPUs, or if the runs differ in something in which no two published runs of a source differ.
    """
    kinds = find_differences(first, second)
    widths = _look_up_published_errors(kinds) if first.on_gpus and second.on_gpus else None
    if widths is None:
        return None
    half, most = widths
    middle = log(speeds[0] / speeds[1])
    return SpeedRatio(
        ratio=exp(middle),
        low_90=exp(middle - most),
        low_50=exp(middle - half),
        high_50=exp(middle + half),
        high_90=exp(middle + most),
        differences=tuple(sorted(kinds)),
    )

"""Score differences: pairs of published runs of one source that differ in one thing.

    ratio = seconds per token and GPU of the second run / those of the first
    error = ln(predicted ratio / measured ratio), so that errors that both predictions share cancel

The second run of a pair is the one with fewer bits, more ranks, larger micro-batches, more recomputation, a faster
chip, longer sequences, a larger batch, or more model-parallel ranks. A kind's errors are averaged over its sources.
Runs of two releases of a software differ in it as well, whatever else they differ in, and are no pair; so are runs of
two sites, unless they differ in their chip, which a site has one of.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from math import ceil, log
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

from benchmarks.published.case import Case
from benchmarks.published.score import Score, group_by
from benchmarks.published.table import KindSummary, SourceErrors
from fivefold.layout.spec import Layout
from fivefold.planner.time.ratio_errors import (
    LEVELS,
    TABLE,
    Difference,
    KindErrors,
    RunFacts,
    describe_run,
    estimate_ratio_errors,
    find_differences,
)
from fivefold.record import Record

MIN_DIFFERENCE = 0.03  # measured differences below this have no sign to predict
KINDS = get_args(Difference)
CHIP_KINDS = ("chip", "chip and layout")


class Pair(Record):
    """Two runs of ``source`` that differ in one thing."""

    source: str
    kind: Difference
    first: str
    second: str
    predicted: float  # ln of the ratio
    measured: float  # ln of the ratio
    left_out: float  # ln of the ratio, predicted by constants set without the source
    held_out: bool  # whether one of the two runs is held out

    @property
    def error(self) -> float:
        """Return ln(predicted ratio / measured ratio)."""
        return self.predicted - self.measured

    @property
    def error_left_out(self) -> float:
        """Return ln(predicted ratio / measured ratio), by constants set without the source."""
        return self.left_out - self.measured


def pair_runs(scores: Iterable[Score], cases: Mapping[tuple[str, str], Case]) -> tuple[Pair, ...]:
    """Return all pairs of measured step times of one source that differ in one thing."""
    runs = [score for score in scores if score.quantity == "time" and (score.source, score.row) in cases]
    by_source = group_by(runs, by=lambda score: score.source)
    return tuple(
        pair
        for group in by_source
        for of_release in group_by(group, by=lambda score: cases[score.source, score.row].release)
        for pair in _pair(of_release, cases)
    )


def _number_facts(facts: Mapping[str, RunFacts]) -> dict[str, RunFacts]:
    """Return the facts of each row with a number for each distinct value, as numbers compare faster than records."""
    values: list[dict[Any, int]] = [{} for _ in RunFacts._fields]
    return {
        row: RunFacts._make(numbers.setdefault(value, len(numbers)) for numbers, value in zip(values, run, strict=True))
        for row, run in facts.items()
    }


def _pair(scores: Sequence[Score], cases: Mapping[tuple[str, str], Case]) -> Iterator[Pair]:
    """Yield the pairs of runs of one release that differ in one thing, in the order of that kind."""
    described = [(score, cases[score.source, score.row]) for score in scores]
    facts = _number_facts(
        {score.row: describe_run(case.model, case.machine, case.layout, case.job) for score, case in described}
    )
    for one, other in combinations(described, 2):
        kinds = find_differences(facts[one[0].row], facts[other[0].row])
        if len(kinds) != 1:
            continue
        (kind,) = kinds
        if one[1].site != other[1].site and kind not in CHIP_KINDS:
            continue
        (first, before), (second, after) = sorted((one, other), key=lambda run: (_rank(kind, run[1]), run[0].row))
        work = log(_gpu_share(after) / _gpu_share(before))
        yield Pair(
            source=first.source,
            kind=kind,
            first=first.row,
            second=second.row,
            predicted=log(second.predicted / first.predicted) + work,
            measured=log(second.measured / first.measured) + work,
            left_out=log(second.predicted_without_source / first.predicted_without_source) + work,
            held_out=first.held_out or second.held_out,
        )


def _gpu_share(case: Case) -> float:
    """Return the GPUs per token of a step, which turn seconds of a step into seconds per token and GPU."""
    return case.layout.world / case.job.tokens_per_step


def _rank(kind: Difference, case: Case) -> Any:
    """Return where a run stands in the order of its kind."""
    layout, job, chip = case.layout, case.job, case.machine.chip
    orders: dict[Difference, Any] = {
        "precision": -job.precision.weights_bytes - {"fp8": 8, "fp4": 4}.get(job.precision.compute, 16),
        "ranks": layout.world,
        "micro-batch": layout.mbs,
        "recomputation": _estimate_recomputation(layout),
        "chip": max(chip.peak_flops.values()),
        "chip and layout": max(chip.peak_flops.values()),
        "sequence": job.sequence,
        "batch": job.global_batch,
        "layout": (layout.tp * layout.cp * layout.pp, str(layout)),
        "software": job.stack.name,
        "model": case.model.active_parameters,
        "adapter": 0,
        "settings": 0,
    }
    return orders[kind]


def _estimate_recomputation(layout: Layout) -> float:
    """Return roughly how much is recomputed, to order two runs."""
    if "layer" in layout.recomputed_operations:
        return 1 / layout.recompute_every
    return 0.01 * len(layout.recomputed_operations)


def summarize_pairs(pairs: Iterable[Pair]) -> tuple[KindSummary, ...]:
    """Return the errors of each kind, in the order of ``KINDS``."""
    listed = list(pairs)
    by_kind = {kind: [pair for pair in listed if pair.kind == kind] for kind in KINDS}
    return tuple(_summarize(kind, of_kind, listed) for kind, of_kind in by_kind.items() if of_kind)


def summarize_sources(pairs: Sequence[Pair]) -> tuple[SourceErrors, ...]:
    """Return the errors of each kind in each source, in the order of ``KINDS``; the largest of a kind first."""
    rows = []
    for kind in KINDS:
        groups = group_by((pair for pair in pairs if pair.kind == kind), by=lambda pair: pair.source)
        means = [fmean(abs(pair.error_left_out) for pair in group) for group in groups]
        for mean, group in sorted(zip(means, groups, strict=True), key=lambda entry: -entry[0]):
            worst = max(group, key=lambda pair: abs(pair.error_left_out))
            rows.append(
                SourceErrors(
                    kind=kind,
                    source=worst.source,
                    pairs=len(group),
                    bias=fmean(pair.error_left_out for pair in group),
                    mean=mean,
                    share=mean / sum(means) if mean else 0.0,
                    worst=(worst.first, worst.second),
                    worst_error=worst.error_left_out,
                )
            )
    return tuple(rows)


def _summarize(kind: Difference, pairs: Sequence[Pair], all_pairs: Sequence[Pair]) -> KindSummary:
    """Return the errors of pairs that differ in one kind, and how many lie within their intervals."""
    sources = group_by(pairs, by=lambda pair: pair.source)
    clear = [pair for pair in pairs if abs(pair.measured) > MIN_DIFFERENCE]
    coverage = list(_cover(kind, sources, all_pairs))
    return KindSummary(
        kind=kind,
        pairs=len(pairs),
        sources=len(sources),
        bias=fmean(fmean(pair.error for pair in group) for group in sources),
        mean=fmean(fmean(abs(pair.error) for pair in group) for group in sources),
        left_out=fmean(fmean(abs(pair.error_left_out) for pair in group) for group in sources),
        right_sign=fmean(pair.predicted * pair.measured > 0 for pair in clear) if clear else None,
        half=fmean(half for half, _ in coverage) if coverage else None,
        most=fmean(most for _, most in coverage) if coverage else None,
    )


def _cover(
    kind: Difference, sources: Sequence[Sequence[Pair]], all_pairs: Sequence[Pair]
) -> Iterator[tuple[float, float]]:
    """Yield, for each source, the share of its pairs inside the two intervals that the other sources teach."""
    for group in sources:
        others = learn_ratios(pair for pair in all_pairs if pair.source != group[0].source)
        widths = estimate_ratio_errors([kind], others)
        if widths is not None:
            half, most = (fmean(abs(pair.error_left_out) <= width for pair in group) for width in widths)
            yield half, most


def learn_ratios(pairs: Iterable[Pair]) -> tuple[KindErrors, ...]:
    """Return the table of errors that ``compare`` reads; pairs with a run that is held out teach nothing."""
    groups = group_by((pair for pair in pairs if not pair.held_out), by=lambda pair: (pair.kind, pair.source))
    return tuple(sorted(KindErrors(group[0].kind, group[0].source, len(group), *_quantiles(group)) for group in groups))


def _quantiles(pairs: Sequence[Pair]) -> Iterator[float]:
    """Yield |error| at ``LEVELS``: the smallest that so large a share of the pairs does not exceed."""
    errors = sorted(abs(pair.error_left_out) for pair in pairs)
    yield from (round(errors[ceil(level * len(errors)) - 1], 4) for level in LEVELS)


def write_ratios(errors: Iterable[KindErrors], path: Path = TABLE) -> None:
    """Replace the table at ``path``."""
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(KindErrors._fields)
        table.writerows(errors)

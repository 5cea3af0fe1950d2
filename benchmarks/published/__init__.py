"""Predictions against published runs: one of ``readers`` per source turns rows into cases, ``run`` scores them.

Every row is a case or is excluded with the rule that says so: a fact that is missing, a cell that is not read, a layout
that the planner refuses; never its error. Which constants were set on which source:
docs/explanation/how-a-step-costs/constants.md.

case · cells · convert · exclusions   a published run; cells of a row as our nouns; what readers share; what is left out
score · ratios            errors and rankings; errors of the ratio of two runs
intervals · tune  errors and rankings; what to expect by class; a machine calibrated on measured steps
constants · leave_one_source_out      the registry of constants; each source scored with those that were set without it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from math import ceil
from statistics import fmean
from textwrap import fill
from typing import TYPE_CHECKING

from benchmarks.published.case import Case, Excluded, Message
from benchmarks.published.intervals import coverage
from benchmarks.published.ratios import Pair, pair_runs, summarize_pairs
from benchmarks.published.score import PredictedFigures, Score, score, score_message, summarise
from benchmarks.published.table import KindSummary, Summary, markdown
from fivefold.errors import UserError
from fivefold.planner.time.ratio_errors import Difference
from fivefold.record import Record
from fivefold.spelling import make_unknown_name_error

if TYPE_CHECKING:
    from benchmarks.published.leave_one_source_out import FactorFit
    from benchmarks.published.tune import TuningCase

Reader = Callable[[], Iterator[Case | Message | Excluded]]

SOURCES = (  # a module each, with ``cases()``
    "korthikanti2022",
    "megatron2021",
    "megascale",
    "llama3_table4",
    "deepseek_v3",
    "bloom_prequel",
    "vtrain",
    "zero_bubble",
    "simumax_b200",
    "ultrascale_playbook",
    "kempnerforge",
    "torchtitan",
    "llm_foundry",
    "nemo_perf",
    "dgxc_benchmarking",
    "megatron_bridge_perf",
    "megatron_bridge_memory",
    "finetune_memory",
    "misc_throughput",
    "prime_rl",
    "nanotron_bench",
    "paddlenlp",
    "flagperf",
    "xtuner",
    "megatron_moe_zoo",
    "nemo_automodel",
    "mosaicgpt",
    "fms_acceleration",
    "aleph_alpha",
    "mlperf",
    "gipfelsturm",
    "qwen3_layouts",
    "vectorlm",
    "lumen",
    "cluster_tests",
    "modalities",
    "megatron_kwai",
    "vocabulary_parallelism",
    "gpu_recipes",
    "nccl_logs",
    "nccl_efa",
)


class Refusal(Record):
    """A row that is not scored, and the rule that says so."""

    source: str
    row: str
    rule: str


class Report(Record):
    """All that was scored and all that was not."""

    scores: tuple[Score, ...]
    summaries: tuple[Summary, ...]
    pairs: tuple[Pair, ...]
    ratios: tuple[KindSummary, ...]
    excluded: tuple[Refusal, ...]


def reader(source: str) -> Reader:
    """Return the reader of one source; a ``UserError`` names the nearest where there is none."""
    if source not in SOURCES:
        raise make_unknown_name_error(source, list(SOURCES), kind="source")
    cases: Reader = import_module(f"{__name__}.readers.{source}").cases
    return cases


def cases_of(sources: Iterable[str] = SOURCES) -> Iterator[Case]:
    """Yield every case that a fit may see."""
    for case in (case for source in sources for case in reader(source)() if isinstance(case, Case)):
        if not (case.held_out or case.composed):
            yield case


def predict_case(case: Case) -> tuple[PredictedFigures, TuningCase]:
    """Return the predicted figures of a case, and what of them no machine changes.

    A full ``Step`` would also have traffic, operations and intervals. Raises ``UserError`` if the layout is not legal.
    """
    from benchmarks.published.tune import TuningCase, time_step
    from fivefold.planner.predict import get_planner

    plan = get_planner(case.model, case.machine, case.job)
    estimate = plan.estimate(case.layout)
    again = TuningCase(case, plan.counts, estimate.ranks)
    first = estimate.ranks[0]
    totals = plan.allocator_totals(case.layout, estimate.ranks)
    figures = PredictedFigures(
        step_seconds=time_step(again, case.machine) if case.listed else estimate.step_time.seconds,
        peak_bytes=estimate.peak_bytes,
        states_bytes=first.parameters_bytes + first.gradients_bytes + first.optimizer_bytes,
        activations_bytes=first.activations_bytes,
        reserved_bytes=totals.reserved_bytes if totals else None,
        driver_bytes=totals.driver_bytes if totals else None,
    )
    return figures, again


def run(sources: Iterable[str] = SOURCES, *, fits: Iterable[FactorFit] | None = None) -> Report:
    """Predict every case of ``sources`` and score it; ``fits``: constants found without a source, else as stored."""
    from benchmarks.published import leave_one_source_out  # only here: readers need no planner

    scores: list[Score] = []
    cases: dict[tuple[str, str], Case] = {}
    excluded: list[Refusal] = []
    known = tuple(leave_one_source_out.read() if fits is None else fits)
    for source in sources:
        without = leave_one_source_out.factors_without(source, known)
        for case in reader(source)():
            if isinstance(case, Excluded):
                excluded.append(Refusal(**case._asdict()))
                continue
            if isinstance(case, Message):
                scores.append(score_message(case))
                continue
            try:
                figures, again = predict_case(case)
            except UserError as refused:
                excluded.append(Refusal(source=case.source, row=case.row, rule=str(refused)))
            else:
                cases[case.source, case.row] = case
                scores += score(case, figures, leave_one_source_out.predictions(again, without))
                excluded += [
                    Refusal(source=case.source, row=f"{case.row} {quantity}", rule=f"{quantity}: {rule}")
                    for quantity, rule in case.left_out
                ]
    covered = coverage(scores) if set(sources) == set(SOURCES) else ()
    pairs = pair_runs(scores, cases)
    return Report(
        scores=tuple(scores),
        summaries=summarise(scores, covered),
        pairs=pairs,
        ratios=summarize_pairs(pairs),
        excluded=tuple(excluded),
    )


def table_markdown(report: Report) -> str:
    """Return the summaries as a Markdown table, for docs/explanation/how-a-step-costs/published.md."""
    return markdown(report.summaries)


HEADLINE_RATIOS: dict[Difference, str] = {
    "precision": "precision",
    "micro-batch": "micro-batch",
    "ranks": "number of GPUs",
    "chip": "chip",
    "layout": "layout",
}


def headline(report: Report) -> str:
    """Return the tables in a sentence per quantity, for the README.

    In the mean, and in the errors of ratios, sources have equal weights; otherwise runs have.
    """
    lines = []
    for quantity, name in (("time", "step times"), ("peak", "peaks of memory")):
        entries = [entry for entry in report.scores if entry.quantity == quantity]
        errors = sorted(abs(entry.predicted / entry.measured - 1) for entry in entries)
        half, most = (errors[ceil(share * len(errors)) - 1] for share in (0.5, 0.9))
        sources = dict.fromkeys(entry.source for entry in entries)
        mean = fmean(
            fmean(abs(entry.predicted / entry.measured - 1) for entry in entries if entry.source == source)
            for source in sources
        )
        lines.append(
            f"- **{len(entries):,} {name} of {len(sources)} sources**: half within {half:.1%}, nine tenths within "
            f"{most:.0%}; the mean error of a source is {mean:.0%}."
        )
    means = {row.kind: row.mean for row in report.ratios}
    of_kinds = ", ".join(f"{means[kind]:.0%} for another {name}" for kind, name in HEADLINE_RATIOS.items())
    lines.append(
        f"- **{sum(row.pairs for row in report.ratios):,} pairs of runs that differ in one thing**: the mean error of "
        f"the ratio of their step times is {of_kinds}."
    )
    return "".join(fill(line, width=120, subsequent_indent="  ") + "\n" for line in lines)

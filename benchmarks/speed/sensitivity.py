"""Measure how much the published score depends on each constant of the cost model.

    python -m benchmarks.speed.sensitivity [NAME]    each constant, or one, on all sources
    python -m benchmarks.speed.sensitivity --own     those that were set on a source, on that source alone

Every constant of docs/explanation/how-a-step-costs/constants.md is lowered and raised by 20 %, one at a time. The
error is the mean over sources of their mean absolute (and signed) errors over all runs with a printed time, so a source
of 900 rows counts as much as one of 20. Every third row of llm-foundry and dgxc is used. Counts and memory do not
depend on these constants and are computed once.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from statistics import fmean
from typing import NamedTuple

from benchmarks.published import SOURCES, cases_of, reader
from benchmarks.published.case import Case
from benchmarks.published.constants import CONSTANTS
from benchmarks.published.leave_one_source_out import step_seconds
from benchmarks.published.tune import TuningCase, prepare_runs

THINNED = {"llm_foundry": 3, "dgxc_benchmarking": 3}


class Errors(NamedTuple):
    """Over sources: mean of absolute errors, and of signed ones."""

    mean: float
    bias: float


def runs() -> dict[str, list[TuningCase]]:
    """Return the cases with a measured time, by source."""
    by_source = {}
    for source in SOURCES:
        if cases := [case for case in cases_of([source]) if case.step_seconds]:
            by_source[source] = prepare_runs(cases[:: THINNED.get(source, 1)])
    return by_source


def errors(by_source: dict[str, list[TuningCase]], factors: Mapping[str, float]) -> Errors:
    """Return the errors of all sources with constants multiplied by ``factors``."""
    means, biases = [], []
    for source_runs in by_source.values():
        source_errors = [step_seconds(run, factors) / (run.case.step_seconds or 1.0) - 1 for run in source_runs]
        means.append(fmean(map(abs, source_errors)))
        biases.append(fmean(source_errors))
    return Errors(fmean(means), fmean(biases))


OWN = {
    "launch_seconds": "vtrain",
    "host_device_exponent": "vtrain",
    'HOPPER_JOULE["bf16"]': "dgxc_benchmarking",
    'HOPPER_JOULE["fp8"]': "dgxc_benchmarking",
    'BLACKWELL_JOULE["bf16"]': "megatron_bridge_perf",
    'BLACKWELL_JOULE["fp8"]': "megatron_bridge_perf",
    'BLACKWELL_JOULE["fp4"]': "megatron_bridge_perf",
}  # by constant: the source; of vTrain what it composed of traces, every eighth


def print_source_errors() -> None:
    """Print a line of Markdown per constant that was set on a source.

    It has the source's mean error around its value.
    """
    by_source = runs()
    for constant in (entry for entry in CONSTANTS if entry.name in OWN):
        source = OWN[constant.name]
        composed = [case for case in reader(source)() if isinstance(case, Case) and case.composed]
        chosen = {source: prepare_runs(composed[::8]) or by_source[source]}
        cells = [f"{errors(chosen, {constant.name: factor}).mean:.1%}" for factor in (0.3, 0.8, 0.9, 1.0, 1.1, 1.2)]
        print(f"| `{constant.name}` | {source} | {len(chosen[source])} | {' | '.join(cells)} |", flush=True)


def main(only: tuple[str, ...] = ()) -> None:
    """Print a line of Markdown per constant."""
    by_source = runs()
    stock = errors(by_source, {})
    count = sum(map(len, by_source.values()))
    print(f"{len(by_source)} sources, {count} runs: mean {stock.mean:.2%}, bias {stock.bias:+.2%}", flush=True)
    for constant in CONSTANTS:
        if only and constant.name not in only:
            continue
        cells = []
        for factor in (0.8, 1.2):
            changed = errors(by_source, {constant.name: factor})
            cells.append(f"{100 * (changed.mean - stock.mean):+.2f} ({100 * (changed.bias - stock.bias):+.2f})")
        print(f"| `{constant.name}` | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    print_source_errors() if sys.argv[1:] == ["--own"] else main(tuple(sys.argv[1:]))

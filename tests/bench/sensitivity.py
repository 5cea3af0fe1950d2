"""How much of the published score hangs on each constant of the price model.

    python -m tests.bench.sensitivity [NAME]    each constant, or one, on all sources
    python -m tests.bench.sensitivity --own     those that were set on a source, on that source alone

Every constant of docs/how-a-step-costs/constants.md is taken a fifth lower and a fifth higher, alone. Of all runs with
a printed time the error is the mean over sources of their mean absolute (and signed) errors, a source of 900 rows
counting as much as one of 20; of vTrain every eighth row, of llm-foundry and dgxc every third. Counts and memory do
not depend on these constants and are made once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import fmean
from typing import Any, NamedTuple

from fivefold.check.published import SOURCES, reader
from fivefold.check.published.case import Case
from fivefold.check.published.tune import Run, prepared
from fivefold.machine.spec import Machine
from fivefold.plan.price.timeline import Timeline
from fivefold.plan.price.units import Units
from tests.bench.constants import CONSTANTS, Constant

THINNED = {"vtrain": 8, "llm_foundry": 3, "dgxc_benchmarking": 3}


class Errors(NamedTuple):
    """Over sources: mean of absolute errors, and of signed ones."""

    mean: float
    bias: float


def runs() -> dict[str, list[Run]]:
    """By source; cases with a time."""
    found = {}
    for source in SOURCES:
        cases = [case for case in reader(source)() if isinstance(case, Case) and case.step_seconds]
        if cases:
            found[source] = prepared(cases[:: THINNED.get(source, 1)])
    return found


def errors(by_source: dict[str, list[Run]], change: Callable[[Machine], Machine]) -> Errors:
    """Of all sources, on machines changed by ``change``."""
    means, biases = [], []
    for each in by_source.values():
        found = [_seconds(run, change) / (run.case.step_seconds or 1.0) - 1 for run in each]
        means.append(fmean(map(abs, found)))
        biases.append(fmean(found))
    return Errors(fmean(means), fmean(biases))


def _seconds(run: Run, change: Callable[[Machine], Machine]) -> float:
    return Timeline(Units(run.counts, change(run.case.machine))).step(run.case.layout, run.memory).seconds


@contextmanager
def scaled(constant: Constant, factor: float) -> Iterator[None]:
    """A module's constant times ``factor``, wherever it was imported to."""
    old = constant.value
    holders = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("fivefold.") and vars(module).get(constant.name) is old
    ]
    try:
        for module in holders:
            setattr(module, constant.name, (constant.scale or times)(old, factor))
        yield
    finally:
        for module in holders:
            setattr(module, constant.name, old)


def times(value: Any, factor: float) -> Any:
    """A number, or every number of a table, times ``factor``."""
    if isinstance(value, dict):
        return {key: times(each, factor) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(times(each, factor) for each in value)
    return value * factor


OWN = {
    "launch_seconds": ("vtrain", 8),
    "EVENNESS": ("vtrain", 8),
    'AMPERE_JOULE["bf16"]': ("korthikanti2022", 0),
    'HOPPER_JOULE["bf16"]': ("dgxc_benchmarking", 0),
    'HOPPER_JOULE["fp8"]': ("dgxc_benchmarking", 0),
    'BLACKWELL_JOULE["bf16"]': ("megatron_bridge_perf", 0),
    'BLACKWELL_JOULE["fp8"]': ("megatron_bridge_perf", 0),
    'BLACKWELL_JOULE["fp4"]': ("megatron_bridge_perf", 0),
    "MOE_KERNELS": ("megatron_bridge_perf", 0),
}  # by constant: the source, and the most ranks of the runs of it that it was set on (0: any)


def varied(by_source: dict[str, list[Run]], constant: Constant, factor: float) -> Errors:
    """With one constant times ``factor``."""
    change = constant.machine
    if change is not None:
        return errors(by_source, lambda machine: change(machine, factor))
    with scaled(constant, factor):
        return errors(by_source, lambda machine: machine)


def own() -> None:
    """Prints a line of Markdown per constant that was set on a source: that source's mean error around its value."""
    by_source = runs()
    for constant in (each for each in CONSTANTS if each.name in OWN):
        source, most = OWN[constant.name]
        chosen = {source: [run for run in by_source[source] if not most or run.case.machine.ranks <= most]}
        cells = [f"{varied(chosen, constant, factor).mean:.1%}" for factor in (0.3, 0.8, 0.9, 1.0, 1.1, 1.2)]
        print(f"| `{constant.name}` | {source} | {len(chosen[source])} | {' | '.join(cells)} |", flush=True)


def main(only: tuple[str, ...] = ()) -> None:
    """Prints a line of Markdown per constant."""
    by_source = runs()
    stock = errors(by_source, lambda machine: machine)
    count = sum(map(len, by_source.values()))
    print(f"{len(by_source)} sources, {count} runs: mean {stock.mean:.2%}, bias {stock.bias:+.2%}", flush=True)
    for constant in CONSTANTS:
        if only and constant.name not in only:
            continue
        cells = []
        for factor in (0.8, 1.2):
            found = varied(by_source, constant, factor)
            cells.append(f"{100 * (found.mean - stock.mean):+.2f} ({100 * (found.bias - stock.bias):+.2f})")
        print(f"| `{constant.name}` | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    own() if sys.argv[1:] == ["--own"] else main(tuple(sys.argv[1:]))

"""Leave one source out: every constant that was set on a source is set again without it, then that source is scored.

    fit of source s: minimise  mean over the other sources of mean of h(ln(predicted / measured))
                               + PRIOR_WEIGHT · sum over constants of (ln(factor / middle) / half-width)²
    over the constants set on s, each within its bounds; of a source at most ``MAX_RUNS_PER_SOURCE`` runs
    h: Huber's loss, e² / (2 OUTLIER_ERROR) up to ``OUTLIER_ERROR``, from there e - OUTLIER_ERROR / 2
    middle, half-width: of the logarithms of the bounds

The second term is a prior, a normal distribution over each constant's documented range: where the runs hardly
distinguish two solutions, the fit stays near what the constant's source says (decision 050). Constant by constant a
grid between the bounds, which closes in twice in a second round; no randomness. Bounds and sources: ``constants.py``;
what was found: ``leave_one_source_out.csv``.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Literal

from benchmarks.published.case import Case
from benchmarks.published.constants import (
    CONSTANTS,
    MEMORY_CONSTANTS,
    Constant,
    apply_to_machine,
    scale_allocator,
    scale_constants,
)
from benchmarks.published.tune import TuningCase, prepare_runs, time_step
from fivefold.planner.counts.memory.allocator import estimate_allocator_totals
from fivefold.record import Record

TABLE = Path(__file__).with_name("leave_one_source_out.csv")
MAX_RUNS_PER_SOURCE = 40  # runs of one source in the objective
GRID = 5
CLOSER = (0, 2)  # how often the grid closes in, by round
OUTLIER_ERROR = 0.1
PRIOR_WEIGHT = 0.008  # by cross-validation over sources: decision 050
NO_MOVE = 1e-9

Quantity = Literal["time", "peak"]
Factors = Mapping[str, float]
Progress = Callable[[str, int, int], None]
Known = dict[tuple[Quantity, frozenset[tuple[str, float]]], dict[int, float]]  # errors by constants, of runs by id


class FactorFit(Record):
    """A constant's factor that was found without a source."""

    source: str
    constant: str
    factor: float
    runs: int  # of other sources that it moves


def sample_runs(cases: Sequence[Case]) -> list[TuningCase]:
    """Return up to ``MAX_RUNS_PER_SOURCE`` evenly spaced cases of a source, with their counts."""
    return prepare_runs(cases[:: max(1, -(-len(cases) // MAX_RUNS_PER_SOURCE))])


def step_seconds(run: TuningCase, factors: Factors) -> float:
    """Return the predicted step with constants times ``factors``."""
    return time_step(run, apply_to_machine(run.case.machine, factors), scale_constants(factors))


def peak_bytes(run: TuningCase, factors: Factors) -> float:
    """Return the predicted peak as its source counts it, with constants times ``factors``."""
    if run.case.memory == "allocated":
        return max(rank.peak_bytes for rank in run.memory)
    case = run.case
    totals = estimate_allocator_totals(run.counts, case.machine, case.layout, run.memory, scale_allocator(factors))
    return totals.driver_bytes if run.case.memory == "driver" else totals.reserved_bytes


def predictions(run: TuningCase, factors: Factors) -> dict[str, float]:
    """Return the predictions of a case's measured quantities with changed constants; empty without a change."""
    if not factors:
        return {}
    seconds: dict[str, float] = {"time": step_seconds(run, factors)} if _get_measured(run, "time") else {}
    return seconds | ({"peak": peak_bytes(run, factors)} if _get_measured(run, "peak") else {})


class LeftOutProblem:
    """The fit of the constants of ``source`` without that source: the runs of all other sources."""

    def __init__(self, source: str, others: Mapping[str, Sequence[TuningCase]], known: Known | None = None) -> None:
        """Initialize the fit with the runs of ``others``, by source.

        Runs of ``source`` itself are not used. ``known``: filled with every error, for the problems of other sources on
        the same runs.
        """
        self.known = {} if known is None else known
        self.runs = [(name, run) for name, runs in others.items() if name != source for run in runs]
        self.time = [constant for constant in CONSTANTS if not constant.is_independent_of(source)]
        self.memory = [constant for constant in MEMORY_CONSTANTS if not constant.is_independent_of(source)]
        self.factors = {constant.name: _middle(constant) for constant in (*self.time, *self.memory)}
        self.source = source

    def solve(self) -> tuple[FactorFit, ...]:
        """Return a factor for each constant."""
        return (*self._descend("time", self.time), *self._descend("peak", self.memory))

    def _descend(self, quantity: Quantity, constants: Sequence[Constant]) -> Iterator[FactorFit]:
        """Yield each constant in turn at the best of its grid, then of a closer one; in rounds."""
        measured = [index for index, (_, run) in enumerate(self.runs) if _get_measured(run, quantity)]
        moved = {entry.name: self._find_affected_runs(entry, quantity, measured) for entry in constants}
        errors = self._errors(quantity, measured)
        for closer in CLOSER:
            for constant in (entry for entry in constants if moved[entry.name]):
                low, high = constant.factors
                for _ in range(1 + closer):
                    tried = []
                    for factor in _grid(constant, low, high):
                        self.factors[constant.name] = factor
                        changed = errors | self._errors(quantity, moved[constant.name])
                        objective = self._mean_loss(changed) + PRIOR_WEIGHT * _squared_distance(constant, factor)
                        tried.append((objective, factor, changed))
                    _, best, errors = min(tried, key=lambda trial: trial[:2])
                    self.factors[constant.name] = best
                    gap = (high / low) ** (1 / (GRID - 1))
                    low, high = max(low, best / gap), min(high, best * gap)
        for constant in constants:
            factor = round(self.factors[constant.name], 4)
            yield FactorFit(source=self.source, constant=constant.name, factor=factor, runs=len(moved[constant.name]))

    def _find_affected_runs(self, constant: Constant, quantity: Quantity, among: Sequence[int]) -> list[int]:
        """Return the runs whose prediction differs between the constant's bounds."""
        middle, ends = self.factors[constant.name], []
        for end in constant.factors:
            self.factors[constant.name] = end
            ends.append(self._errors(quantity, among))
        self.factors[constant.name] = middle
        return [index for index in among if abs(ends[0][index] - ends[1][index]) > NO_MOVE]

    def _errors(self, quantity: Quantity, among: Sequence[int]) -> dict[int, float]:
        """Return ln(predicted / measured) by index of the run."""
        constants = self.time if quantity == "time" else self.memory
        factors = {
            constant.name: self.factors[constant.name] for constant in constants if self.factors[constant.name] != 1.0
        }
        known = self.known.setdefault((quantity, frozenset(factors.items())), {})
        runs = {index: self.runs[index][1] for index in among}
        known |= {id(run): _error(run, quantity, factors) for run in runs.values() if id(run) not in known}
        return {index: known[id(run)] for index, run in runs.items()}

    def _mean_loss(self, errors: Mapping[int, float]) -> float:
        """Return the mean over sources of the mean Huber loss of each one's errors."""
        losses: dict[str, list[float]] = {}
        for index, error in errors.items():
            losses.setdefault(self.runs[index][0], []).append(_huber_loss(error))
        return fmean(map(fmean, losses.values()))


def _huber_loss(error: float) -> float:
    size = abs(error)
    return size * size / (2 * OUTLIER_ERROR) if size < OUTLIER_ERROR else size - OUTLIER_ERROR / 2


def _squared_distance(constant: Constant, factor: float) -> float:
    """Return the squared distance of a factor from the middle of its bounds, in half-widths of their logarithms."""
    low, high = constant.factors
    half_width = log(high / low) / 2
    return (log(factor / _middle(constant)) / half_width) ** 2 if half_width else 0.0


def _get_measured(run: TuningCase, quantity: Quantity) -> float | None:
    if quantity == "time":
        return run.case.step_seconds
    return run.case.memory_bytes if run.case.quantity == "peak" else None


def _error(run: TuningCase, quantity: Quantity, factors: Factors) -> float:
    predicted = step_seconds(run, factors) if quantity == "time" else peak_bytes(run, factors)
    measured = _get_measured(run, quantity)
    assert measured is not None
    return log(predicted / measured)


def _middle(constant: Constant) -> float:
    low, high = constant.factors
    return float((low * high) ** 0.5)


def _grid(constant: Constant, low: float, high: float) -> list[float]:
    """Return factors from ``low`` to ``high``, evenly spaced in their logarithm, or those of whole numbers between."""
    grid = [exp(log(low) + (log(high) - log(low)) * at / (GRID - 1)) for at in range(GRID)]
    if not constant.is_integer:
        return grid
    return sorted({max(1, round(constant.value * factor)) / constant.value for factor in grid})


def read(path: Path = TABLE) -> tuple[FactorFit, ...]:
    """Return the fits that were written; none without the file."""
    if not path.exists():
        return ()
    with path.open(encoding="utf-8", newline="") as file:
        return tuple(FactorFit.model_validate(row) for row in csv.DictReader(file))


def write(fits: Iterable[FactorFit], path: Path = TABLE) -> None:
    """Replace the table at ``path``."""
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, fieldnames=list(FactorFit.model_fields), lineterminator="\n")
        table.writeheader()
        table.writerows(fit.model_dump() for fit in fits)


def refit(sources: Sequence[str], path: Path = TABLE, *, report: Progress | None = None) -> tuple[FactorFit, ...]:
    """Fit without each of ``sources`` and write ``path`` after each; those that it has already are kept."""
    from benchmarks.published import SOURCES, cases_of

    fits = read(path)
    missing = [source for source in sources if not any(fit.source == source for fit in fits)]
    cases = {name: [*cases_of([name])] for name in (SOURCES if missing else ())}
    others = {name: sample_runs(runs) for name, runs in cases.items() if runs}
    known: Known = {}
    for done, source in enumerate(missing):
        if report is not None:
            report(source, done, len(missing))
        if source in others:
            fits = tuple(
                sorted(
                    (*fits, *LeftOutProblem(source, others, known).solve()), key=lambda fit: SOURCES.index(fit.source)
                )
            )
            write(fits, path)
    return fits


def factors_without(source: str, fits: Iterable[FactorFit]) -> dict[str, float]:
    """Return for each constant the factor fitted without ``source``."""
    return {fit.constant: fit.factor for fit in fits if fit.source == source}

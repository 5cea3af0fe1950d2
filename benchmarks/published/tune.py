"""Calibrate a machine on steps that were measured on it: five numbers, each a fact of the machine.

matmuls per joule and peak share, memory bandwidth, the host's launch, attention, the near link: each times a factor.
Coordinate descent on the mean absolute error; a factor stays within 1/2 and 2. Measure half of
the runs, calibrate, and score the other half: that is how good a planner is after one afternoon on the machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

from benchmarks.published.case import Case
from benchmarks.published.listed_weights import ListedUnits, step_seconds
from fivefold.job import Job
from fivefold.machine.spec import Chip, Machine
from fivefold.model.spec import Model
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.memory.peak import RankMemory, count_rank_memory
from fivefold.planner.time.constants import PUBLISHED, Constants
from fivefold.planner.time.units import Units

STEPS = (1.3, 1.1, 1.03)  # of a factor, coarse to fine
LIMIT = 2.0


class MachineFactors(NamedTuple):
    """The factors by which the catalog figures of a machine are multiplied."""

    matmul: float = 1.0
    bandwidth: float = 1.0
    launch: float = 1.0
    attention: float = 1.0
    link: float = 1.0

    def apply(self, machine: Machine) -> Machine:
        """Return ``machine`` with its figures changed."""
        chip, (near, *far) = machine.chip, machine.links
        return machine.replace(
            chip=_chip(chip, self), links=(near.replace(sustained=min(1.0, near.sustained * self.link)), *far)
        )


def _chip(chip: Chip, factors: MachineFactors) -> Chip:
    """Return the chip with its efficiencies multiplied by ``factors``."""
    return chip.replace(
        matmul_share={dtype: share * factors.matmul for dtype, share in chip.matmul_share.items()},
        flops_per_joule={dtype: joule * factors.matmul for dtype, joule in chip.flops_per_joule.items()},
        bandwidth_share=chip.bandwidth_share * factors.bandwidth,
        launch_seconds=chip.launch_seconds * factors.launch,
        attention_share=chip.attention_share * factors.attention,
        attention_backward_share=chip.attention_backward_share * factors.attention,
    )


class TuningCase(NamedTuple):
    """A measured case with all of it that no machine changes."""

    case: Case
    counts: Counts
    memory: list[RankMemory]


def prepare_runs(cases: Iterable[Case]) -> list[TuningCase]:
    """Return every case with its counts; equal models and jobs are counted once."""
    known: dict[tuple[Model, Job], Counts] = {}
    runs = []
    for case in cases:
        counts = known.setdefault((case.model, case.job), Counts(case.model, case.job))
        runs.append(TuningCase(case, counts, count_rank_memory(counts, case.layout)))
    return runs


def tune(runs: Sequence[TuningCase]) -> MachineFactors:
    """Return the factors under which the measured step times of ``runs`` are predicted best."""
    factors, best = MachineFactors(), error(runs, MachineFactors())
    for step in STEPS:
        improved = True
        while improved:
            improved = False
            for field in MachineFactors._fields:
                for value in (getattr(factors, field) * step, getattr(factors, field) / step):
                    if not 1 / LIMIT <= value <= LIMIT:
                        continue
                    tried = factors._replace(**{field: value})
                    tuned_error = error(runs, tried)
                    if tuned_error < best:
                        factors, best, improved = tried, tuned_error, True
    return factors


def error(runs: Sequence[TuningCase], factors: MachineFactors) -> float:
    """Return mean absolute relative error of the step time."""
    return fmean(abs(seconds(run, factors) / (run.case.step_seconds or 1.0) - 1) for run in runs)


def seconds(run: TuningCase, factors: MachineFactors) -> float:
    """Return the predicted step on the changed machine."""
    return time_step(run, factors.apply(run.case.machine))


def time_step(run: TuningCase, machine: Machine, constants: Constants = PUBLISHED) -> float:
    """Return the predicted seconds of a run's step on another machine, by other constants."""
    units = (ListedUnits if run.case.listed else Units)(run.counts, machine, constants)
    return step_seconds(units, run.case.layout, run.memory)


class Halves(NamedTuple):
    """Mean absolute error of the step times of one chip's second half, stock and with factors from its first half."""

    chip: str
    runs: int
    stock: float
    tuned: float
    factors: MachineFactors


def halves(cases: Iterable[Case]) -> list[Halves]:
    """Return the scores per chip: every second run tunes, the others are scored."""
    chips: dict[str, list[TuningCase]] = {}
    for run in prepare_runs(case for case in cases if case.step_seconds):
        chips.setdefault(run.case.machine.chip.name, []).append(run)
    results = []
    for chip, runs in chips.items():
        learnt, held = runs[::2], runs[1::2]
        if held:
            factors = tune(learnt)
            results.append(Halves(chip, len(held), error(held, MachineFactors()), error(held, factors), factors))
    return results

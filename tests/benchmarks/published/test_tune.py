"""Calibration on measured steps finds the machine that made them."""

from __future__ import annotations

import pytest

from benchmarks.published import reader
from benchmarks.published.case import Case
from benchmarks.published.tune import MachineFactors, TuningCase, error, halves, prepare_runs, seconds, tune

SLOW = MachineFactors(matmul=0.7, launch=1.5)


@pytest.fixture(scope="module")
def runs() -> list[TuningCase]:
    """Every two hundredth."""
    return prepare_runs([case for case in reader("vtrain")() if isinstance(case, Case) and case.composed][::200])


@pytest.mark.slow
def test_a_slower_machine_is_found_from_its_steps(runs: list[TuningCase]) -> None:
    made = [run._replace(case=run.case._replace(step_seconds=seconds(run, SLOW))) for run in runs]
    result = tune(made)
    assert error(made, MachineFactors()) > 0.2
    assert error(made, result) < 0.02
    assert result.matmul < 0.9  # bandwidth takes its part of it: narrow layers cannot tell them apart
    assert result.launch == pytest.approx(SLOW.launch, rel=0.1)


@pytest.mark.slow
def test_machine_tuning_is_scored_on_the_half_of_the_runs_not_fitted(runs: list[TuningCase]) -> None:
    made = [run.case._replace(step_seconds=seconds(run, SLOW)) for run in runs]
    (one,) = halves(made)
    assert (one.chip, one.runs) == ("a100", len(runs) // 2)
    assert one.tuned < 0.05 < one.stock

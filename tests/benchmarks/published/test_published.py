"""The planner against the most exact of the published runs: Korthikanti et al. 2022, whose every fact is printed."""

from __future__ import annotations

import pytest

from benchmarks.published import Report, reader, run
from benchmarks.published.case import Case
from fivefold.planner.predict import predict


@pytest.fixture(scope="module")
def report() -> Report:
    return run(["korthikanti2022"])


@pytest.mark.parametrize(
    ("quantity", "cases", "most"),
    [("time", 4, 0.16), ("states", 3, 0.002), ("activations", 6, 0.03)],
)
def test_korthikanti_rows_are_predicted_within_the_bound(
    report: Report, quantity: str, cases: int, most: float
) -> None:
    (summary,) = [summary for summary in report.summaries if summary.quantity == quantity]
    assert summary.cases == cases
    assert abs(summary.worst) <= most


def test_flops_follow_the_convention_of_the_source() -> None:
    """Table 5: 175B has an MFU of 51.4 % of 312 TFLOP/s.

    Its HFU of 52.8 % counts attention's forward and backward once more for the repeated forward; we, the forward.
    """
    case = next(case for case in reader("korthikanti2022")() if case.row == "korthikanti2022-0009")
    assert isinstance(case, Case)
    assert case.step_seconds is not None
    work = predict(model=case.model, machine=case.machine, layout=case.layout, job=case.job).work
    available = case.step_seconds * 64 * 312e12
    assert work.model_flops_non_causal / available == pytest.approx(0.514, abs=0.0015)
    attention = 12 * case.job.global_batch * case.model.layers * case.job.sequence**2 * case.model.width
    assert work.hardware_flops - work.model_flops_non_causal == attention // 3
    assert (work.model_flops_non_causal + attention) / available == pytest.approx(0.528, abs=0.0015)

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import published
from benchmarks.published import Report, reader, run, table_markdown
from benchmarks.published.case import Case, Excluded
from benchmarks.published.score import PredictedFigures, Score, kendall, rank, score, summarise
from benchmarks.published.tune import TuningCase

CASES = {case.row: case for case in reader("simumax_b200")() if isinstance(case, Case)}
CASE = CASES["simumax_b200-0001"]


def make_figures(*, seconds: float, peak: int, reserved: int | None = None) -> PredictedFigures:
    return PredictedFigures(seconds, peak, 6, 40, reserved, reserved and reserved + 7)


def make_score(predicted: float, measured: float, *, rivals: str = "a", source: str = "s", chip: str = "b200") -> Score:
    return Score(
        source=source,
        row="r",
        chip=chip,
        layout="dp1",
        rivals=rivals,
        quantity="time",
        predicted=predicted,
        measured=measured,
    )


def test_a_case_is_scored_on_its_measured_quantities() -> None:
    case = CASE._replace(step_seconds=2.0, memory_bytes=100.0)
    time, peak = score(case, make_figures(seconds=1.5, peak=110))
    assert (time.quantity, time.error) == ("time", -0.25)
    assert (peak.quantity, peak.error) == ("peak", pytest.approx(0.1))
    assert (time.chip, time.ranks, time.model) == ("b200", 8, case.model.name)
    assert time.run_class == ("blackwell", "one", "dense", "16 bits", "megatron", "nothing")
    assert (time.left_out, time.predicted_without_source) == (None, 1.5)
    (again, _) = score(case, make_figures(seconds=1.5, peak=110), {"time": 1.8})
    assert (again.predicted, again.left_out, again.predicted_without_source) == (1.5, 1.8, 1.8)
    assert [s.quantity for s in score(case._replace(step_seconds=None), make_figures(seconds=1, peak=1))] == ["peak"]


@pytest.mark.parametrize(
    ("changes", "predicted"),
    [
        ({"memory": "allocated"}, 100),
        ({"memory": "reserved"}, 120),
        ({"memory": "driver"}, 127),
        ({"quantity": "states"}, 6),
        ({"quantity": "activations"}, 40),
    ],
)
def test_each_memory_figure_is_compared_with_its_own_prediction(changes: dict[str, object], predicted: int) -> None:
    case = CASE._replace(memory_bytes=50.0, step_seconds=None, **changes)  # type: ignore[arg-type]
    (result,) = score(case, make_figures(seconds=1, peak=100, reserved=120))
    assert result.predicted == predicted


def test_the_bias_of_a_summary_is_signed() -> None:
    (summary,) = summarise([make_score(p, 1.0, rivals="") for p in (1.1, 0.8, 1.3)])
    assert (summary.cases, summary.groups, summary.tau) == (3, 0, None)
    assert summary.bias == pytest.approx((0.1 - 0.2 + 0.3) / 3)
    assert summary.median == pytest.approx(0.2)
    assert summary.mean == pytest.approx(0.2)
    assert summary.worst == pytest.approx(0.3)
    assert summarise([make_score(0.5, 1.0), make_score(1.2, 1.0)])[0].worst == -0.5


def test_kendall_tau_of_a_worked_example() -> None:
    """Measured in the order 1 2 3 4, predicted 2 1 3 4: one pair of six is turned, and the pick costs 10 %."""
    scores = [make_score(p, m) for p, m in ((2.0, 1.0), (1.0, 1.1), (3.0, 1.2), (4.0, 1.3))]
    (ranking,) = rank(scores)
    assert ranking.tau == pytest.approx((5 - 1) / 6)
    assert ranking.regret == pytest.approx(0.1)
    assert rank(scores[:2]) == []
    assert rank([s.replace(rivals="") for s in scores]) == []


def test_pairs_within_the_resolution_are_not_ranked() -> None:
    """1.005 follows 1 by half of a percent: of three pairs two are left, both in order. A sum of parts is exact."""
    scores = [make_score(p, m) for p, m in ((1.1, 1.0), (1.0, 1.005), (1.2, 1.3))]
    assert rank(scores)[0].tau == 1.0
    assert rank([s.replace(quantity="composed") for s in scores])[0].tau == pytest.approx(1 / 3)


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_kendall_is_one_minus_twice_the_inversions(order: tuple[int, ...]) -> None:
    inversions = sum(order[i] > order[j] for i in range(4) for j in range(i + 1, 4))
    assert kendall([float(o) for o in order], [0.0, 1.0, 2.0, 3.0]) == pytest.approx(1 - 2 * inversions / 6)


@given(st.lists(st.floats(0.1, 10), min_size=3, max_size=9), st.floats(0.1, 10))
def test_a_constant_factor_does_not_change_the_ranking(measured: list[float], factor: float) -> None:
    (ranking,) = rank([make_score(m * factor, m) for m in measured])
    assert ranking.regret == pytest.approx(0, abs=1e-9)


def test_the_scoring_script_scores_and_excludes_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def cases() -> Iterator[Case | Excluded]:
        yield CASE._replace(source="vtrain", row="good", step_seconds=2.0, memory_bytes=None)
        yield CASE._replace(source="vtrain", row="bad", layout=CASE.layout.replace(tp=3))
        yield Excluded("vtrain", "none", "nothing was measured")

    def predict_case(case: Case) -> tuple[PredictedFigures, TuningCase]:
        figures, again = published_prediction(case)
        return figures._replace(step_seconds=2.2), again

    published_prediction = published.predict_case
    monkeypatch.setattr(published, "predict_case", predict_case)
    monkeypatch.setattr(published, "reader", lambda _: cases)
    report = run(["vtrain"])
    assert [(s.row, round(s.error, 9)) for s in report.scores] == [("good", 0.1)]
    assert [(r.row, r.rule) for r in report.excluded] == [
        ("bad", "layout 'dp4 tp3 pp2 zero1 1f1b mbs1': needs 24 ranks, but b200 has 8; lower a degree or use 24 ranks"),
        ("none", "nothing was measured"),
    ]
    assert table_markdown(report).splitlines()[2].startswith("| vtrain | time | 1 | +10.0% | 10.0% |")
    assert Report.model_validate_json(report.model_dump_json()) == report

from __future__ import annotations

from pathlib import Path

from fivefold.check.published import regimes
from fivefold.check.published.score import Quantity, Score


def scored(error: float, *, source: str, chip: str = "b200", quantity: Quantity = "time") -> Score:
    return Score(
        source=source,
        row="r",
        regime="x",
        chip=chip,
        shape="flat",
        kind="dense",
        layout="dp1",
        quantity=quantity,
        predicted=1 + error,
        measured=1,
    )


def test_a_source_of_many_rows_counts_once() -> None:
    scores = [scored(0.1, source="many")] * 90 + [scored(-0.3, source="few")] * 5
    rows = regimes.learn(scores)
    assert {row.error for row in rows} == {0.2}
    assert {(row.chip, row.shape, row.kind) for row in rows} == {
        ("b200", "flat", "dense"),
        ("*", "flat", "dense"),
        ("*", "*", "dense"),
        ("*", "*", "*"),
    }
    assert {(row.cases, row.sources) for row in rows} == {(95, 2)}


def test_few_cases_teach_the_wider_classes_only() -> None:
    scores = [scored(0.1, source="s")] * 3 + [scored(0.2, source="s", chip="h100")] * 3
    assert {row.chip for row in regimes.learn(scores)} == {"*"}
    assert regimes.learn(scores[:4]) == ()


def test_states_of_a_figure_teach_nothing() -> None:
    assert regimes.learn([scored(0.1, source="s", quantity="states")] * 9) == ()


def test_written_in_one_order(tmp_path: Path) -> None:
    scores = [scored(0.1, source="s")] * 5 + [scored(0.2, source="t", quantity="peak")] * 5
    one, two = tmp_path / "one.csv", tmp_path / "two.csv"
    regimes.write(regimes.learn(scores), one)
    regimes.write(regimes.learn(scores[::-1]), two)
    assert one.read_text() == two.read_text()
    assert one.read_text().splitlines()[:2] == ["chip,shape,kind,quantity,sources,cases,error", "*,*,*,peak,1,5,0.2"]

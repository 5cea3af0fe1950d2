"""What the scores teach: cells by source and class, and coverage of a source by what the others teach."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.published.intervals import KEPT, coverage, learn, write
from benchmarks.published.score import Quantity, Score
from fivefold.planner.time import errors


def make_score(
    ratio: float, *, source: str, generation: str = "hopper", quantity: Quantity = "time", **more: object
) -> Score:
    """A run that measured ``ratio`` times what was predicted without its source."""
    words = {"nodes": "one", "kind": "dense", "precision": "16 bits", "software": "megatron", "recomputed": "nothing"}
    fields = words | {"row": "r", "layout": "dp1", "ranks": 8, "predicted": 7.0, "left_out": 1.0} | more
    return Score(source=source, generation=generation, quantity=quantity, measured=ratio, **fields)  # type: ignore[arg-type]


def test_ratios_are_grouped_by_source_and_class_and_thinned_in_order() -> None:
    scores = [make_score(1 + at / 1000, source="many", ranks=at + 1) for at in range(900)]
    scores += [make_score(1.2, source="few"), make_score(1.1, source="few", generation="ampere")]
    few, ampere, many = sorted(learn(scores), key=lambda cell: (cell.rows, -cell.ratios[0]))
    assert (few.source, few.ratios, few.of.generation) == ("few", (1.2,), "hopper")
    assert (ampere.source, ampere.ratios, ampere.of.generation) == ("few", (1.1,), "ampere")
    assert (many.rows, many.ranks, len(many.ratios)) == (900, 900, KEPT)
    assert many.ratios == tuple(sorted(many.ratios))
    assert many.ratios[KEPT // 2] == pytest.approx(1.45, abs=0.002)  # the median


def test_held_out_rows_and_messages_are_not_learned_from() -> None:
    assert learn([make_score(1.1, source="s", held_out=True), make_score(1.1, source="s", quantity="states")]) == ()


def test_a_source_is_covered_by_intervals_fitted_to_the_others() -> None:
    """Three sources that agree, and one whose runs take twice as long: it alone lies outside."""
    accurate_scores = [make_score(1 + at / 100, source=name) for name in ("a", "b", "c") for at in range(-10, 11)]
    far = [make_score(2.0, source="d")] * 30
    result = {item.source: item for item in coverage([*accurate_scores, *far])}
    assert (result["d"].half, result["d"].most, result["d"].runs) == (0, 0, 30)
    assert result["a"].most == 1
    alone = {item.source: item for item in coverage(accurate_scores)}
    assert 0.4 <= alone["a"].half <= 0.8
    assert alone["a"].most >= 0.9


def test_the_interval_file_does_not_depend_on_the_order_of_scores_and_reads_back(tmp_path: Path) -> None:
    scores = [make_score(1.1, source="s")] * 5 + [make_score(1.25, source="t", quantity="peak", counter="reserved")] * 2
    one, two = tmp_path / "one.csv", tmp_path / "two.csv"
    write(learn(scores), one)
    write(learn(scores[::-1]), two)
    assert one.read_text() == two.read_text()
    assert (*errors.read("reserved", one), *errors.read("time", one)) == learn(scores)

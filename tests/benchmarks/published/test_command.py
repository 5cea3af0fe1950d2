"""The command: errors by another field, charts, and constants set again into a file that it goes on with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.published.__main__ import score_published


@pytest.mark.slow
def test_errors_can_be_grouped_by_another_field_than_the_source(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    score_published(["nemo_perf", "torchtitan"], by="software")
    text = capsys.readouterr().out
    words = [line.split()[:3] for line in text.splitlines()]
    assert words[0][:2] == ["software", "of"]
    assert ["megatron", "time", "12"] in words
    assert ["torch", "time", "15"] in words
    score_published(["nemo_perf"], by="model", json=True)
    result = json.loads(capsys.readouterr().out)["summaries"]
    assert sum(row["cases"] for row in result) == 12
    assert "llama3-70b" in {row["source"] for row in result}


@pytest.mark.slow
def test_charts_show_every_run_and_the_diagonal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    score_published(["kempnerforge"], charts=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{quantity}-{kind}.svg" for quantity in ("time", "peak") for kind in ("scatter", "over-ranks")
    }
    drawn = (tmp_path / "time-scatter.svg").read_text(encoding="utf-8")
    assert drawn.count("kempnerforge-0") >= 12  # a run each, by its row
    assert "stroke-dasharray" in drawn
    assert "drew" in capsys.readouterr().err


def test_a_row_with_its_source_is_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half of an H100's work per joule lost: what the file says is what the column shows."""
    path = tmp_path / "fits.csv"
    path.write_text('source,constant,factor,runs\nnemo_perf,"HOPPER_JOULE[""bf16""]",0.5,9\n')
    score_published(["nemo_perf"], left_out=path, json=True)
    (time,) = (row for row in json.loads(capsys.readouterr().out)["summaries"] if row["quantity"] == "time")
    assert time["mean"] < 0.05
    assert time["left_out"] > 3 * time["mean"]

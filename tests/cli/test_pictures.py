from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fivefold.cli import app
from fivefold.errors import UserError

PREDICT = ["predict", "llama3-8b", "h100:8", "tp2 pp4 v2 zbv", "--gbs", "16", "--seq", "2048"]
FLAT = ["predict", "nano", "h100:8", "dp8 zero3", "--gbs", "8"]


def run(*words: str) -> str:
    result = CliRunner().invoke(app, [*words], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_the_over_time_option_draws_pipeline_and_memory() -> None:
    words = (*PREDICT, "--stack", "fivefold")  # that is named: without a remark at the end
    plain, drawn = run(*words), run(*words, "--over-time")
    assert drawn.startswith(plain)
    assert "rank 3 │" in drawn
    assert "drawn with 8 of 16 micro-batches" in drawn
    assert "Memory over time of pipeline rank 0" in drawn
    assert "Memory over time\n" in run(*FLAT, "--over-time")


def test_json_output_is_unchanged_by_other_options() -> None:
    assert json.loads(run(*PREDICT, "--over-time", "--json"))["layout"].startswith("dp1 tp2 pp4 v2")


def test_the_trace_of_a_predicted_step_ends_at_its_step_time(tmp_path: Path) -> None:
    step = json.loads(run(*PREDICT, "--json", "--trace", str(tmp_path / "t.json")))
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    last = max(event["ts"] + event["dur"] for event in events if event["ph"] == "X")
    assert last == pytest.approx(step["time"]["step_seconds"] * 1e6, rel=1e-6)
    assert {event["pid"] for event in events} == {0, 1, 2, 3}


def test_charts_are_written_into_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    run(*FLAT, "--charts", str(tmp_path / "new" / "folder"))
    files = {path.name: path.read_bytes() for path in (tmp_path / "new" / "folder").iterdir()}
    assert sorted(files) == ["memory.html", "memory.svg", "pipeline.html", "pipeline.svg"]
    assert b"rank 0" in files["pipeline.svg"]
    assert b"null" not in files["pipeline.svg"]


def test_a_folder_that_is_a_file_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(UserError, match="a is a file; name a folder"):
        run(*FLAT, "--charts", str(tmp_path / "a"))

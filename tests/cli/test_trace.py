"""The command trace: its page, its data, its pictures, and its mistakes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fivefold import bounded_file
from fivefold.cli import app
from fivefold.errors import UserError
from fivefold.profiling.traces import job_traces, json_stream, read
from fivefold.profiling.traces.critical_path import EndOrder
from fivefold.rendering.progress import show_progress
from tests.profiling.traces import kineto


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces")
    kineto.write(kineto.draw(1), path, zipped=True)
    return path


def run(*words: object) -> str:
    result = CliRunner().invoke(app, ["trace", *map(str, words)], catch_exceptions=False, env={"COLUMNS": "160"})
    assert result.exit_code == 0
    return result.stdout


def test_progress_is_reported_in_bytes_and_steps_and_as_lines_without_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kineto.write(kineto.draw(1), tmp_path)
    monkeypatch.setattr(json_stream, "CHUNK_BYTES", 2000)
    monkeypatch.setattr(bounded_file, "_CHUNK_BYTES", 1000)
    monkeypatch.setattr(job_traces, "MIB", 1000)
    told: list[tuple[str, int, int]] = []
    read([tmp_path], progress=lambda *item: told.append(item))
    total = sum(path.stat().st_size for path in tmp_path.iterdir()) // 1000
    reading = [item for item in told if "(MiB)" in item[0]]
    assert [what for what, *_ in reading] == sorted(what for what, *_ in reading)
    assert [done for _, done, _ in reading] == sorted(done for _, done, _ in reading)
    assert len({done for _, done, _ in reading}) > 2
    assert {most for *_, most in reading} == {total} == {reading[-1][1]}
    assert [item for item in told if item not in reading] == [("critical paths", place, 3) for place in range(3)]
    with show_progress("reading") as report:
        report("x", 1, 9)
    assert not capsys.readouterr().err, "what is done in seconds says nothing"
    monkeypatch.setattr("fivefold.rendering.progress.QUIET_SECONDS", 0.0)
    with show_progress("reading") as report:
        report("rank0.json (MiB)", 1_200, 3_400)
    assert capsys.readouterr().err == "reading rank0.json (MiB): 1,200 of 3,400\n"


def test_a_trace_is_sorted_once_and_not_for_every_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces of hundreds of steps and millions of events took minutes for it."""
    made: list[int] = []
    order = EndOrder.__init__
    monkeypatch.setattr(EndOrder, "__init__", lambda own, trace: (made.append(trace.rank), order(own, trace))[1])
    assert len(read([folder]).report.steps) == 3
    assert made == [0, 1]


def test_a_trace_is_read_from_a_pipe(folder: Path) -> None:
    from_file = json.loads(run(folder / "rank0.json.gz", "--json"))
    with subprocess.Popen(["cat", str(folder / "rank0.json.gz")], stdout=subprocess.PIPE) as cat:
        assert cat.stdout is not None
        from_pipe = json.loads(run(f"/dev/fd/{cat.stdout.fileno()}", "--json"))
    assert from_pipe["breakdown"] == from_file["breakdown"]


def test_trace_prints_where_the_time_went(folder: Path) -> None:
    page = run(folder, "--machine", "h100:8", "--top", 3)
    for title in ("Where the time goes", "What runs", "Longest kernels", "Messages", "Critical path"):
        assert title in page
    assert "traced  2 ranks on GPUs" in page
    assert "× NVLink 4" in page
    assert "is last to arrive at" in page
    assert "mean of 3 steps" in page
    assert "ProfilerStep#4, shares" not in page
    assert "by rank, ProfilerStep#4" in run(folder, "--step", 4)


def test_files_and_their_folder_give_the_same_answer(folder: Path) -> None:
    assert run(*sorted(folder.iterdir())) == run(folder)


def test_trace_with_json_prints_the_record(folder: Path) -> None:
    data = json.loads(run(folder, "--json", "--top", 2))
    assert data["device"] == "GPU"
    assert len(data["kernels"]) == 2
    assert [item["rank"] for item in data["breakdown"]] == [0, 0, 0, 1, 1, 1]
    assert data["against"] == []
    assert data["predicted"] is None


def test_the_report_compares_with_the_prediction(folder: Path) -> None:
    against = ("--against", "nano", "h100:2", "dp2 zero2 mbs2", "--gbs", 8, "--seq", 128)
    page = run(folder, *against)
    assert "Compared with the prediction" in page
    assert "dp2 zero2 mbs2" in page
    assert "× NVLink 4" in page, "the machine of the prediction has the links"
    data = json.loads(run(folder, *against, "--json"))
    rows = {row["quantity"]: row for row in data["against"]}
    assert rows["step time"]["predicted"] == data["predicted"]["time"]["step_seconds"]
    assert rows["dp, world all_gather, calls"]["measured"] > 0


@pytest.mark.slow
def test_trace_writes_charts_into_a_folder(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    run(folder, "--charts", tmp_path / "new")
    files = {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()}
    assert sorted(files) == ["breakdown.html", "breakdown.svg", "critical-path.html", "critical-path.svg"]
    assert b"rank 1" in files["breakdown.svg"]
    assert b"exposed communication" in files["breakdown.svg"]
    assert b"of the critical path of" in files["critical-path.svg"]
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match="is a file; name a folder"):
        run(folder, "--charts", tmp_path / "file")


def test_options_of_a_job_need_a_prediction(folder: Path) -> None:
    with pytest.raises(UserError, match="add --against MODEL MACHINE LAYOUT"):
        run(folder, "--seq", 128)

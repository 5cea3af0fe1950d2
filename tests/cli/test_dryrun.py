"""The command dryrun: its page, its files, its exit codes, and nothing half-done after an interruption."""

from __future__ import annotations

import json
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fivefold.cli import app
from fivefold.cli.commands.dryrun import WOULD_FAIL
from fivefold.errors import UserError
from fivefold.step import Step
from fivefold.trainer.model import mlp

pytestmark = pytest.mark.slow

TINY = ["dryrun", "nano", "h100:4", "tp2 pp2 mbs1", "--gbs", "4", "--seq", "64"]
LARGE = ["dryrun", "llama3.2-1b", "rtx3090:1", "dp1 mbs4", "--gbs", "4", "--seq", "4096"]


def run(*words: str) -> Any:
    return CliRunner().invoke(app, [*words], catch_exceptions=False)


def test_dryrun_prints_its_page_and_writes_charts_trace_and_snapshot(tmp_path: Path) -> None:
    folder, file, snapshot = tmp_path / "charts", tmp_path / "step.json", tmp_path / "rank.pickle"
    result = run(
        *TINY,
        "--over-time",
        "--charts",
        str(folder),
        "--trace",
        str(file),
        "--snapshot",
        str(snapshot),
        "--ranks",
        "0,3",
    )
    assert result.exit_code == 0
    for words in (
        "dry run  nano on h100, 4 ranks",
        "Predicted and dry-run",
        "Pipeline over time",
        "Memory over time of rank",
        "estimated from the kernels",
    ):
        assert words in result.stdout
    assert sorted(path.name for path in folder.iterdir()) == [
        "memory.html",
        "memory.svg",
        "pipeline.html",
        "pipeline.svg",
    ]
    events = json.loads(file.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 3}
    assert sorted(path.name for path in tmp_path.glob("*.pickle")) == ["rank-rank0.pickle", "rank-rank3.pickle"]
    assert pickle.loads((tmp_path / "rank-rank3.pickle").read_bytes())["device_traces"]
    assert list(tmp_path.rglob("*partial*")) == []


def test_json_has_the_predicted_and_the_dry_run_step_and_the_peak() -> None:
    result = json.loads(run(*TINY, "--json").stdout)
    predicted, dry_run = (Step.read(result[kind], origin=kind) for kind in ("predicted", "dry_run"))
    assert (predicted.kind, dry_run.kind) == ("predicted", "dry run")
    assert predicted.work == dry_run.work
    assert sum(result["peak"]["bytes"].values()) == dry_run.memory.peak_bytes
    assert [stage["stage"] for stage in result["first_step"]] == [0, 1]
    assert result["findings"] == []
    assert predicted.remarks == dry_run.remarks == ()


def test_idle_ranks_are_reported() -> None:
    words = [*TINY[:2], "h100:8", "dp1 tp2 pp2 mbs1", *TINY[4:]]
    said = "uses 4 of the 8 ranks of h100; 4 stay idle"
    assert said in " ".join(run(*words).stdout.split())
    assert said in json.loads(run(*words, "--json").stdout)["dry_run"]["remarks"][0]


def test_a_job_that_does_not_fit_ends_with_exit_code_3() -> None:
    result = run(*LARGE)
    assert result.exit_code == WOULD_FAIL == 3
    assert result.stdout.startswith("rank 0 needs ")
    assert "does not fit" in result.stdout


@pytest.mark.parametrize("json_too", [False, True])
def test_a_step_that_raises_ends_with_exit_code_3(monkeypatch: pytest.MonkeyPatch, json_too: bool) -> None:
    monkeypatch.setattr(mlp.Mlp, "forward", lambda _self, x, _keys: x @ torch.zeros(3, 3))
    result = run(*TINY, *(["--json"] if json_too else []))
    assert result.exit_code == WOULD_FAIL
    words = "rank 0, forward of micro-batch 0, blocks.0.mlp: aten::mm"
    line = json.loads(result.stdout)["findings"][0] if json_too else " ".join(result.stdout.split())
    assert line.startswith(words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks", "0;1"], "is not a list of ranks; write 0,3"),
        (["--ranks", "9"], "no rank 9 in layout"),
        (["--set", "loss=plain"], "the trainer supports loss=fused"),
        (["--schedule", "none.csv"], "none.csv: no such file"),
    ],
)
def test_user_errors_are_reported_before_building(words: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        run(*TINY, *words)


def test_a_custom_schedule_is_dry_run(tmp_path: Path) -> None:
    table = tmp_path / "mine.csv"
    table.write_text("F0.0,F0.1,F0.2,F0.3,BW0.0,BW0.1,BW0.2,BW0.3\nF1.0,BW1.0,F1.1,BW1.1,F1.2,BW1.2,F1.3,BW1.3\n")
    flooded, plain = (
        json.loads(run(*TINY, "--json", *words).stdout)["dry_run"]["memory"]["stages"][0]
        for words in (["--schedule", str(table)], [])
    )
    assert flooded["activations_bytes"] == 2 * plain["activations_bytes"]  # four micro-batches in flight, not two


SLOW = """
import sys
import fivefold.dry_run.rank_processes as dryrun
from fivefold.cli.command_line import main
real = dryrun.run_rank
def slow(**words):
    print("begun", flush=True)
    return real(**words)
dryrun.run_rank = slow
main()
"""


def test_an_interrupted_dry_run_leaves_nothing(tmp_path: Path) -> None:
    words = [
        "dryrun",
        "llama3-8b",
        "h100:8",
        "dp8 zero3",
        "--gbs",
        "64",
        "--charts",
        str(tmp_path / "charts"),
        "--trace",
        str(tmp_path / "step.json"),
        "--snapshot",
        str(tmp_path / "rank.pickle"),
    ]
    child = subprocess.Popen(
        [sys.executable, "-c", SLOW, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "begun\n"
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 1
    assert out == ""
    assert err.startswith("fivefold: stopped by SIGINT")
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []

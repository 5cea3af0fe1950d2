"""The measured half of a sweep: two real runs, and imitated ones: out of memory, timeout, Slurm, kills."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from fivefold.errors import RunFailure, UserError
from fivefold.layout.spec import Layout
from fivefold.machine.toml import write
from fivefold.planner.predict import predict
from fivefold.results.sweep_row import SweepRow
from fivefold.sweeps import sweep as module
from fivefold.sweeps.journal import open_journal
from fivefold.sweeps.measure import PredictedRow, Submit
from fivefold.sweeps.spec import Sweep
from fivefold.sweeps.sweep import SweepPlan, Trials, run
from fivefold.sweeps.trial import Trial
from tests.sweeps.test_trial import MACHINE


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """What ``local`` means: two ranks of 4 GiB."""
    write(MACHINE, tmp_path / "local.toml")
    return tmp_path / "local.toml"


def run_sweep(local: Path, *, submit: Submit | None = None, **values: Any) -> list[SweepRow]:
    least = {
        "models": ["nano"],
        "machines": ["local"],
        "ranks": [1, 2],
        "layouts": ["dp* mbs{2,4}"],
        "sequences": [32],
        "batches": [4],
        "precisions": ["fp32"],
    }
    plan = SweepPlan.from_sweep(Sweep.read(least | values, origin="test"), local=local)
    trials = Trials(local.parent / "trials", steps=4, submit=submit)
    with open_journal(local.parent / "journal") as journal:
        return run(plan, journal, trials=trials, report=lambda what, done, total: None)


def fake_trials(monkeypatch: pytest.MonkeyPatch, **outcomes: Trial) -> list[str]:
    """Trials by layout (``_`` for a space) that end so; the list of those that were tried."""
    tried: list[str] = []

    def run_trial(case: PredictedRow, **_: object) -> Trial:
        tried.append(case.row.layout)
        return outcomes[case.row.layout.replace(" ", "_")]

    monkeypatch.setattr(module, "run_locally", run_trial)
    return tried


@pytest.mark.processes
def test_two_layouts_are_measured(local: Path) -> None:
    rows = run_sweep(local, ranks=[1])
    assert [(row.layout, row.measured, row.measured_why) for row in rows] == [
        ("dp1 zero0 mbs2", "measured", ""),
        ("dp1 zero0 mbs4", "measured", ""),
    ]
    for row in rows:
        assert row.measured_step_seconds
        assert row.measured_tokens_per_second_per_gpu == pytest.approx(4 * 32 / row.measured_step_seconds / row.ranks)
        assert row.peak_bytes
        assert row.measured_peak_bytes == pytest.approx(
            row.peak_bytes, rel=0.1
        )  # a model of 2 MB: allocations of the process itself are as large
    assert not (local.parent / "trials").exists()
    assert run_sweep(local, ranks=[1]) == rows  # from the journal, to the last bit


def step_of(layout: str, local: Path) -> Trial:
    from fivefold.job import Job
    from fivefold.model.catalog import build_model

    job = Job(sequence=32, global_batch=4, precision="fp32")
    step = predict(model=build_model("nano"), machine=MACHINE, layout=Layout.parse(layout), job=job)
    return Trial(ended="measured", measured=step.replace(kind="measured"))


def test_every_outcome_of_a_trial_is_a_row(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = fake_trials(
        monkeypatch,
        dp1_zero0_mbs2=Trial(ended="memory", why="CUDA out of memory"),
        dp1_zero0_mbs4=Trial(ended="timeout", why="was not done with 4 steps in 300 s"),
        dp2_zero0_mbs2=step_of("dp2 zero0 mbs2", local),
    )
    rows = run_sweep(local)
    assert [(row.ranks, row.status, row.measured, row.measured_why) for row in rows] == [
        (1, "fits", "memory", "CUDA out of memory"),
        (1, "fits", "timeout", "was not done with 4 steps in 300 s"),
        (2, "fits", "measured", ""),
        (2, "invalid", "invalid", rows[3].why),
    ]
    assert "is not divisible by dp·mbs" in rows[3].why
    assert tried == ["dp1 zero0 mbs2", "dp1 zero0 mbs4", "dp2 zero0 mbs2"]
    assert rows[2].measured_step_seconds == rows[2].step_seconds


def test_layout_that_does_not_fit_is_not_tried(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(MACHINE.replace(chip=MACHINE.chip.replace(memory_bytes=2**20)), local)
    tried = fake_trials(monkeypatch)
    rows = run_sweep(local, ranks=[1])
    assert {(row.status, row.measured) for row in rows} == {("memory", "memory")}
    assert all(row.measured_why.startswith("needs ") for row in rows)
    assert tried == []


def test_a_killed_sweep_continues_after_its_last_trial(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    good = Trial(ended="failed", why="x")
    tried: list[str] = []

    def run_trial(case: PredictedRow, **_: object) -> Trial:
        tried.append(case.row.layout)
        if len(tried) == 2:
            raise Killed
        return good

    monkeypatch.setattr(module, "run_locally", run_trial)
    with pytest.raises(Killed):
        run_sweep(local)
    rows = run_sweep(local)
    assert tried == ["dp1 zero0 mbs2", "dp1 zero0 mbs4", "dp1 zero0 mbs4", "dp2 zero0 mbs2"]
    assert [row.measured for row in rows] == ["failed", "failed", "failed", "invalid"]


def test_rows_stay_measured_after_another_calibration(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = fake_trials(
        monkeypatch, dp1_zero0_mbs2=Trial(ended="failed", why="x"), dp1_zero0_mbs4=Trial(ended="failed", why="y")
    )
    before = run_sweep(local, ranks=[1])
    write(MACHINE.replace(chip=MACHINE.chip.replace(peak_flops={"fp32": 2e11})), local)
    after = run_sweep(local, ranks=[1])
    assert len(tried) == 2
    assert [row.measured_why for row in after] == ["x", "y"]
    assert [row.step_seconds for row in after] != [row.step_seconds for row in before]


def test_a_gpu_is_not_measured_on_a_cpu(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="h100 has GPUs, but this computer has none; measure on machine 'local'"):
        run_sweep(local, machines=["local", "h100"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UserError, match="local has a CPU, but this computer would run on its GPU"):
        run_sweep(local)


def commands(folder: Path, **bodies: str) -> None:
    for name, body in bodies.items():
        path = folder / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)


@pytest.mark.processes
def test_trials_on_slurm_are_submitted_and_later_collected(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fivefold.cli.commands.sweep import _submit

    folder = local.parent / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.chdir(local.parent)
    count = "n=$(($(cat n 2>/dev/null || echo 70) + 1)); echo $n > n; cp $1 job$n; echo Submitted batch job $n"
    commands(folder, sbatch=count, squeue="echo PENDING")
    rows = run_sweep(local, submit=_submit)
    assert [row.measured for row in rows] == ["waiting", "waiting", "waiting", "invalid"]
    script = Path("job71").read_text()
    assert "#SBATCH --nodes=1\n#SBATCH --ntasks-per-node=1" in script
    assert "run.json --layout" in script
    assert [row.measured for row in run_sweep(local, submit=_submit)] == ["waiting", "waiting", "waiting", "invalid"]
    assert Path("n").read_text() == "73\n"  # nothing is submitted twice

    runs = sorted((local.parent / "trials").glob("*/*/run"), key=lambda path: path.parent.name)
    assert [path.parent.name for path in runs] == ["dp1_zero0_mbs2", "dp1_zero0_mbs4", "dp2_zero0_mbs2"]
    step = step_of("dp1 zero0 mbs2", local).measured
    assert step
    text = step.model_dump_json()
    (runs[0] / "step.json").write_text(f'{{"predicted": {text}, "measured": {text}}}')
    (runs[1] / "slurm-72.txt").write_text("step 1\nfivefold: CUDA out of memory; the same command continues from x\n")
    commands(folder, squeue='[ "$3" = 72 ] || { echo "slurm_load_jobs error: Invalid job id" >&2; exit 1; }')
    rows = run_sweep(local, submit=_submit)
    assert [(row.measured, row.measured_why) for row in rows[:3]] == [
        ("measured", ""),
        ("memory", "CUDA out of memory"),
        ("failed", f"the Slurm job 73 is gone and left neither a result nor {runs[2] / 'slurm-73.txt'}"),
    ]
    commands(folder, sbatch="echo hello")
    with pytest.raises(RunFailure, match="sbatch printed no job id but 'hello'"):
        run_sweep(local, submit=_submit, sequences=[64])

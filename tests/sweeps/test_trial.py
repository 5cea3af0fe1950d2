"""A trial is a short run of ``fivefold train`` in processes of their own: measured, or one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.spec import Chip, Link, Machine
from fivefold.model.catalog import build_model
from fivefold.planner.predict import predict
from fivefold.sweeps.trial import OUT_OF_MEMORY, Trial, judge_trial, prepare, try_layout
from tests.forked_python import true_interpreters

MACHINE = Machine(
    name="here", ranks=2, ranks_per_node=2, backend="gloo",
    chip=Chip(name="core", peak_flops={"fp32": 1e11}, memory_bytes=2**32, memory_bandwidth=1e10, source="test"),
    links=(Link(name="loopback", span=2, bandwidth=1e9, latency_seconds=1e-4, source="test"),),
)  # fmt: skip
MODEL, JOB = build_model("nano"), Job(sequence=32, global_batch=4, precision="fp32")


def run_trial(layout: str = "dp1 mbs4", *, job: Job = JOB, machine: Machine = MACHINE, **options: object) -> Trial:
    return try_layout(model=MODEL, machine=machine, layout=Layout.parse(layout), job=job, **options)  # type: ignore[arg-type]


@pytest.mark.processes
def test_a_trial_measures_what_train_would(tmp_path: Path) -> None:
    result = run_trial("dp2 zero1 mbs2", steps=4, within=tmp_path)
    assert result.ended == "measured", result.why
    assert result.why == ""
    assert result.measured is not None
    expected = predict(model=MODEL, machine=MACHINE, layout=Layout.parse("dp2 zero1 mbs2"), job=JOB)
    assert result.measured.work.hardware_flops == expected.work.hardware_flops
    assert result.measured.traffic == expected.traffic
    assert (result.measured.model, result.measured.machine, result.measured.layout) == (
        "nano",
        "here",
        "dp2 zero1 mbs2",
    )
    assert 0 < result.measured.time.step_seconds < 60
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
def test_a_trial_of_an_invalid_layout_records_the_error() -> None:
    result = run_trial("dp4 mbs1")
    assert (result.ended, result.measured) == ("invalid", None)
    assert result.why.startswith("layout 'dp4 zero0 mbs1': needs 4 ranks, but here has 2")
    small = MACHINE.replace(chip=MACHINE.chip.replace(memory_bytes=2**20))
    result = run_trial(machine=small)
    assert result.ended == "invalid"
    assert "would need" in result.why
    with pytest.raises(UserError, match="a trial of 3 steps is too few to time one; use 4 or more"):
        run_trial(steps=3)


@pytest.mark.processes
@true_interpreters()  # a forked process may be done within the time
def test_trial_over_its_time_limit_is_ended(tmp_path: Path) -> None:
    begin = time.monotonic()
    result = run_trial(timeout_seconds=0.3, within=tmp_path)
    assert (result.ended, result.why) == ("timeout", "was not done with 8 steps in 0.3 s")
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize(
    ("code", "said", "ended", "why"),
    [
        (1, "fivefold: rank 0: CUDA out of memory. Tried to allocate 2 GiB. (see /x/stderr-rank0.txt); the same "
            "command continues from the beginning\n", "memory", "rank 0: CUDA out of memory. Tried to allocate 2 GiB."),
        (1, "fivefold: rank 1 was ended by SIGKILL, perhaps for want of memory; the same command continues from x\n",
            "memory", "rank 1 was ended by SIGKILL, perhaps for want of memory"),
        (-9, "step 3\n", "memory", "was ended by SIGKILL, perhaps for want of memory"),
        (1, "step 3\nfivefold: step 3: loss is nan; stop\n", "failed", "step 3: loss is nan; stop"),
        (3, "", "failed", "ended with code 3 and said nothing"),
    ],
)  # fmt: skip
def test_exit_code_and_output_say_how_a_trial_ended(tmp_path: Path, code: int, said: str, ended: str, why: str) -> None:
    assert judge_trial(tmp_path / "step.json", code=code, output=said) == Trial(ended=ended, why=why)  # type: ignore[arg-type]


def test_messages_of_torch_that_mean_out_of_memory_are_recognized() -> None:
    cpu = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
    assert OUT_OF_MEMORY.search(cpu)
    assert not OUT_OF_MEMORY.search("layout 'dp1': would need 3 GiB")


def test_a_job_with_a_ramp_and_a_warm_up_is_measured_at_its_whole_batch(tmp_path: Path) -> None:
    job = Job.read(
        {
            "sequence": 512,
            "global_batch": 64,
            "ramp": {"first": 16, "step": 16, "every": 10},
            "learning_rate": {"warmup_steps": 100},
            "stack": "fivefold",
        },
        origin="test",
    )
    from fivefold.trainer.run import Run

    run = Run.load(prepare(tmp_path, model=MODEL, machine=MACHINE, layout=Layout(dp=2), job=job, steps=8))
    assert (run.job.steps, run.job.ramp, run.job.global_batch) == (8, None, 64)
    assert run.job.replace(steps=1000) == job.replace(ramp=None, learning_rate=run.job.learning_rate)
    from fivefold.trainer.data.prepare import prepare as tokenize

    tokenize(run.data.corpus, directory=run.folder / "data", holdout=run.data.heldout)
    run.shards(MODEL)  # raises unless the corpus has a batch, and a sequence held out


def test_a_trial_ends_when_its_parent_process_does(tmp_path: Path) -> None:
    script = (
        "from pathlib import Path; from tests.sweeps.test_trial import run_trial; "
        f"run_trial('dp2 mbs2', steps=100_000, within=Path({str(tmp_path)!r}))"
    )
    parent = subprocess.Popen([sys.executable, "-c", script])
    end = time.monotonic() + 60
    while not (running := list_processes(tmp_path, ranks=2)):
        assert time.monotonic() < end
        time.sleep(0.1)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    while any(Path(f"/proc/{pid}").exists() for pid in running):
        assert time.monotonic() < end
        time.sleep(0.1)


def list_processes(folder: Path, *, ranks: int) -> list[int]:
    """Processes whose command names ``folder``, once all of launcher and ``ranks`` are there."""
    results = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:
            continue
        if str(folder / "fivefold-trial").encode() in words:
            results.append(int(path.parent.name))
    return results if len(results) == 1 + ranks else []

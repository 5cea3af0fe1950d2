"""The measured half of a sweep: a trial of each row that fits, on this computer one after another, or as Slurm jobs.

Each Slurm job has its own folder, where the next call of the sweep finds its result.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from fivefold.bounded_file import read_end
from fivefold.errors import RunFailure, UserError
from fivefold.layout.spec import Layout
from fivefold.machine.spec import Machine
from fivefold.results.sweep_row import SweepRow
from fivefold.sweeps.spec import SweepSetting
from fivefold.sweeps.trial import Trial, judge_trial, prepare, try_layout
from fivefold.trainer.run import Run

SAID_BYTES = 2**16  # bytes read from the end of a Slurm job's output, to find its last line
Submit = Callable[[Run, Path, Layout, Machine], str]  # run, its file, layout, machine → the output of sbatch


class PredictedRow(NamedTuple):
    """A predicted row and the setting it was predicted for."""

    setting: SweepSetting
    row: SweepRow


def add_measurement(row: SweepRow, result: Trial) -> SweepRow:
    """Return the row with the outcome of its trial."""
    if result.measured is not None:
        return row.with_measured(result.measured)
    return row.replace(measured=result.ended, measured_why=result.why)


def run_locally(case: PredictedRow, *, steps: int, timeout_seconds: float, within: Path) -> Trial:
    """Run the trial of a row in processes of this computer."""
    setting = case.setting
    assert setting.job is not None
    within.mkdir(parents=True, exist_ok=True)
    return try_layout(
        model=setting.model,
        machine=setting.machine,
        layout=Layout.parse(case.row.layout),
        job=setting.job,
        steps=steps,
        timeout_seconds=timeout_seconds,
        within=within,
    )


def check_here(settings: list[SweepSetting]) -> None:
    """Raise ``UserError`` if a machine's kind is not this computer's: CPU measurements do not stand for a GPU."""
    import torch

    backend = "nccl" if torch.cuda.is_available() else "gloo"
    for setting in settings:
        if setting.machine.backend != backend:
            expected_device, this_computer = (
                ("GPUs", "has none") if setting.machine.has_gpus else ("a CPU", "would run on its GPU")
            )
            raise UserError(
                f"--measure: {setting.machine_name} has {expected_device}, but this computer {this_computer}; "
                "measure on machine 'local', submit with --slurm, or leave --measure out"
            )


def submit_trial(case: PredictedRow, folder: Path, *, steps: int, submit: Submit) -> str:
    """Submit the trial of a row as a Slurm job that runs in ``folder``; return its job number."""
    setting = case.setting
    assert setting.job is not None
    folder.mkdir(parents=True, exist_ok=True)
    layout = Layout.parse(case.row.layout)
    file = prepare(folder, model=setting.model, machine=setting.machine, layout=layout, job=setting.job, steps=steps)
    sbatch_output = submit(Run.load(file), file, layout, setting.machine)
    number = re.search(r"\d+", sbatch_output)
    if number is None:
        raise RunFailure(f"sbatch printed no job id but {sbatch_output!r}; see by squeue whether the job was submitted")
    return number[0]


def collect_trial(folder: Path, job: str) -> Trial | None:
    """Return the outcome of a Slurm job, or None while it is pending or running."""
    pair = folder / "run" / "step.json"
    if pair.exists():
        return judge_trial(pair, code=0, output="")
    queue = subprocess.run(["squeue", "--noheader", "--jobs", job], capture_output=True, text=True, check=False)
    if queue.returncode == 0 and queue.stdout.strip():
        return None
    log_path = folder / "run" / f"slurm-{job}.txt"
    text = read_end(log_path, most_bytes=SAID_BYTES).decode(errors="replace") if log_path.is_file() else ""
    return judge_trial(
        pair, code=1, output=text or f"the Slurm job {job} is gone and left neither a result nor {log_path}"
    )

"""Runs training as a Slurm job: writes an sbatch script with one task per rank next to the run's logs, and submits it.

    USR1 before the time is up → to all ranks, which save          → requeued by the script
    preempted, with a GraceTime → TERM to the ranks, which save    → requeued by the script: else it counts as failed
    preempted without, requeued → TERM to all; KillWait for a save → requeued by Slurm
    a rank dies or hangs        → Slurm ends the others            → restarted at most max_restarts times

https://slurm.schedmd.com: sbatch.html (--signal, --requeue), preempt.html (GraceTime). As observed on Slurm 22.05.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.cli.hosts import RESTARTS
from fivefold.errors import RunFailure, UserError

if TYPE_CHECKING:
    from fivefold.layout.spec import Layout
    from fivefold.machine.spec import Machine
    from fivefold.trainer.run import Run

WARNING_SECONDS = 300  # before the time limit; enough for a step and a checkpoint


def submit(
    run: Run, *, path: Path, layout: Layout, machine: Machine, force: bool = False, words: Sequence[str] = ()
) -> str:
    """Write the run file's sbatch script into the run's folder and submit it; return the output of sbatch."""
    if shutil.which("sbatch") is None:
        raise UserError("--slurm: there is no sbatch here; run it on a login node of the cluster, or without --slurm")
    run.folder.mkdir(parents=True, exist_ok=True)
    file = run.folder / "job.sh"
    file.write_text(write_script(run, path=path, layout=layout, machine=machine, force=force, words=words))
    completed = subprocess.run(["sbatch", str(file)], capture_output=True, text=True, check=False)
    if completed.returncode:
        raise RunFailure(f"sbatch refused {file}: {completed.stderr.strip() or f'exit code {completed.returncode}'}")
    return completed.stdout.strip()


def write_script(
    run: Run, *, path: Path, layout: Layout, machine: Machine, force: bool = False, words: Sequence[str] = ()
) -> str:
    """Return the sbatch script; SBATCH_… variables set partition and account. ``words``: further arguments."""
    nodes, ranks = _divide_ranks(layout, machine)
    options = {
        "job-name": f"fivefold-{run.folder.name}",
        "nodes": nodes,
        "ntasks-per-node": ranks,
        **({"gpus-per-node": ranks} if machine.has_gpus else {}),
        "output": run.folder / "slurm-%j.txt",
        "open-mode": "append",
        "signal": f"B:USR1@{WARNING_SECONDS}",
    }
    command = shlex.join([sys.executable, "-m", "fivefold", "train", str(path), "--layout", str(layout), *words])
    command += " --force" if force else ""
    command += f" --trace {run.trace_steps}" if run.trace_steps else ""
    rank_environment = f"RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE={ranks}"
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH --{name}={value}" for name, value in options.items()),
        "#SBATCH --requeue",
        "",
        'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))",
        "",
        "# The time is nearly up: every rank finishes its step and saves, and the job goes back into the queue.",
        "ending=",
        "trap 'woken=1 ending=USR1; scancel --signal=USR1 \"$SLURM_JOB_ID\"' USR1",
        "trap woken=1 TERM",
        "",
        f"for start in $(seq 0 {run.faults.max_restarts}); do",
        f"    export {RESTARTS}=$start",
        f"    srun --kill-on-bad-exit=1 bash -c {shlex.quote(f'exec env {rank_environment} {command}')} &",
        "    step=$!",
        "    # A signal ends the wait, not the step.",
        '    woken=1; while [ -n "$woken" ]; do woken=; wait "$step"; code=$?; done',
        "    # 0: done. 2: an error in the run file, which another start does not fix.",
        '    if [ "$code" = 0 ] || [ "$code" = 2 ]; then exit "$code"; fi',
        '    case "$ending $(scontrol show job --oneliner "$SLURM_JOB_ID")" in',
        '        USR1*|*" PreemptTime="[0-9]*) exec scontrol requeue "$SLURM_JOB_ID" ;;',
        '        *JobState=COMPLETING*) exit "$code" ;;  # cancelled, or requeued already',
        "    esac",
        "done",
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


def _divide_ranks(layout: Layout, machine: Machine) -> tuple[int, int]:
    """Return the number of nodes and the ranks on each."""
    ranks_per_node = min(machine.ranks_per_node, layout.world)
    if layout.world % ranks_per_node:
        raise UserError(
            f"--slurm: layout {str(layout)!r} has {layout.world} ranks, and {machine.name} has {ranks_per_node} per "
            "node; "
            f"use a multiple of {ranks_per_node}"
        )
    return layout.world // ranks_per_node, ranks_per_node

"""``train --slurm``: the script's text, and its course under small scripts on PATH that imitate Slurm's commands."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fivefold.cli.hosts import RESTARTS, count_restarts
from fivefold.cli.slurm import submit, write_script
from fivefold.errors import RunFailure, UserError
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve as find
from fivefold.machine.spec import Machine
from fivefold.trainer.run import Run

RUN = Run.read({"folder": "runs/big", "faults": {"max_restarts": 2}}, origin="test")


def resolve(name: str) -> Machine:
    return find(name, local=Path("nowhere"))


def text(layout: str, machine: str) -> str:
    return write_script(RUN, path=Path("big.toml"), layout=Layout.parse(layout), machine=resolve(machine))


def test_nodes_and_ranks_follow_from_layout_and_machine() -> None:
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", text("dp4 tp8 zero1 mbs1", "h100:512"), re.MULTILINE))
    assert options == {
        "job-name": "fivefold-big",
        "nodes": "4",
        "ntasks-per-node": "8",
        "gpus-per-node": "8",
        "output": "runs/big/slurm-%j.txt",
        "open-mode": "append",
        "signal": "B:USR1@300",
        "requeue": "",
    }
    assert "#SBATCH --nodes=1\n#SBATCH --ntasks-per-node=2" in text("dp2 mbs1", "h100:512")
    command = f"{sys.executable} -m fivefold train big.toml --layout"
    assert f"{command} '\"'\"'dp2 zero0 mbs1'\"'\"'" in text("dp2 mbs1", "h100:512").replace(" ac=none", "")
    assert "--trace" not in text("dp2 mbs1", "h100:512")
    traced = RUN.replace(trace_steps=3)
    layout = Layout.parse("dp2 mbs1")
    assert " --trace 3" in write_script(traced, path=Path("big.toml"), layout=layout, machine=resolve("h100:512"))
    with pytest.raises(UserError, match=r"has 12 ranks, and .* has 8 per node; use a multiple of 8"):
        text("dp12 mbs1", "h100:512")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Slurm's commands, of which each notes its words in ``calls``; ``srun`` runs the file ``task``."""
    commands = {
        "sbatch": "echo Submitted batch job 7",
        "scontrol": 'case "$1 $2" in "show hostnames") echo node1;; "show job") cat state;; esac',
        "scancel": 'kill -USR1 "$(cat task.pid)"',
        "srun": "exec ./task",
    }
    (tmp_path / "bin").mkdir()
    for name, body in commands.items():
        path = tmp_path / "bin" / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >> calls\n{body}\n')
        path.chmod(0o755)
    (tmp_path / "state").write_text("JobState=RUNNING Restarts=0 PreemptTime=None")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "10007")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-4]")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def calls() -> list[str]:
    return [line.split(" --kill")[0] for line in Path("calls").read_text().splitlines()]


def run_job(task: str, *signals: int) -> int:
    """The job whose every start of all ranks is ``task``; ``signals`` come while it runs. Its exit code."""
    Path("task").write_text(f"#!/bin/bash\n{task}\n")
    Path("task").chmod(0o755)
    Path("job.sh").write_text(text("dp4 tp8 zero1 mbs1", "h100:512"))
    job = subprocess.Popen(["bash", "job.sh"], start_new_session=True)
    for number in signals:
        end = time.monotonic() + 20
        while not Path("task.pid").exists():
            assert time.monotonic() < end
            time.sleep(0.01)
        os.kill(job.pid, number)
    return job.wait(timeout=30)


@pytest.mark.processes
def test_the_job_script_is_written_and_submitted(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"path": Path("big.toml"), "layout": Layout.parse("dp8 mbs1"), "machine": resolve("h100:8")}
    assert submit(RUN, **asked) == "Submitted batch job 7"
    assert calls() == ["sbatch runs/big/job.sh"]
    assert Path("runs/big/job.sh").read_text() == write_script(RUN, **asked)
    (slurm / "bin" / "sbatch").write_text("#!/bin/sh\necho 'invalid account' >&2\nexit 1\n")
    with pytest.raises(RunFailure, match=r"^sbatch refused runs/big/job.sh: invalid account$"):
        submit(RUN, **asked)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="there is no sbatch here"):
        submit(RUN, **asked)


STARTED = ["scontrol show hostnames node[1-4]", "srun"]
ASKED, REQUEUED = "scontrol show job --oneliner 10007", "scontrol requeue 10007"


def test_every_start_of_a_slurm_job_has_its_restart_count(slurm: Path) -> None:
    assert run_job(f"echo ${RESTARTS} >> starts; [ $(wc -l < starts) = 3 ]") == 0
    starts = [count_restarts({RESTARTS: line}) for line in Path("starts").read_text().split()]
    assert starts == [0, 1, 2]
    assert count_restarts({}) == 0
    assert count_restarts({"TORCHELASTIC_RESTART_COUNT": "4"}) == 4


def test_a_successful_slurm_job_is_not_restarted(slurm: Path) -> None:
    assert run_job("exit 0") == 0
    assert calls() == STARTED


def test_a_slurm_job_is_restarted_after_a_failure_and_not_after_a_user_error(slurm: Path) -> None:
    assert run_job("echo x >> tries; [ $(wc -l < tries) = 2 ]") == 0
    assert calls() == [*STARTED, ASKED, "srun"]
    Path("calls").unlink()
    assert run_job("exit 75") == 75
    assert calls() == [*STARTED, ASKED, "srun", ASKED, "srun", ASKED]  # max_restarts = 2
    Path("calls").unlink()
    assert run_job("exit 2") == 2
    assert calls() == STARTED


SAVES = "trap 'sleep 0.3; touch saved; exit 1' USR1 TERM; echo $$ > task.pid; for i in $(seq 200); do sleep 0.1; done"


def test_a_slurm_job_near_its_time_limit_is_saved_and_requeued(slurm: Path) -> None:
    assert run_job(SAVES, signal.SIGUSR1) == 0
    assert calls() == [*STARTED, "scancel --signal=USR1 10007", ASKED, REQUEUED]
    for name in ("calls", "task.pid"):
        Path(name).unlink()
    assert run_job("trap 'exit 0' USR1; echo $$ > task.pid; sleep 9 & wait", signal.SIGUSR1) == 0  # its last step
    assert REQUEUED not in calls()


# What Slurm 22.05 does and shows where it takes the nodes away; ``tests.endure.slurm`` lets it.


def test_a_preempted_job_with_a_grace_period_is_saved_and_requeued(slurm: Path) -> None:
    Path("state").write_text("JobState=RUNNING Restarts=0 PreemptTime=2026-11-21T20:58:30")
    assert run_job(f"(sleep 1; kill -TERM $$) & {SAVES}") == 0
    assert calls() == [*STARTED, ASKED, REQUEUED]
    assert Path("saved").exists()


def test_a_preempted_job_without_a_grace_period_is_saved_and_left_to_slurm(slurm: Path) -> None:
    Path("state").write_text("JobState=COMPLETING Restarts=1")
    assert run_job(f"(sleep 1; kill -TERM $$) & {SAVES}", signal.SIGTERM) == 1
    assert calls() == [*STARTED, ASKED]
    assert Path("saved").exists()


def test_a_run_goes_on_if_the_slurm_controller_does_not_answer(slurm: Path) -> None:
    Path("state").unlink()
    assert run_job("echo x >> tries; [ $(wc -l < tries) = 2 ]") == 0
    assert calls() == [*STARTED, ASKED, "srun"]

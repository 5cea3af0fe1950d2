"""A real Slurm of one node: a run that is preempted, requeued and out of time ends in the bits of the undisturbed run.

    python -m tests.endure.slurm

``fivefold train run.toml --slurm`` submits it. A job of a higher partition takes its node, with a grace time and
without, and then its time is up; each time it must have saved the step at which it was told, and go on from there.
munged, slurmctld and slurmd run in namespaces of this process, as in ``hosts.py``.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.endure import hosts
from tests.endure.kills import enter_folder
from tests.trainer.test_faults import events, losses, read_last_step, saved_bits, saved_step, set_run, wait_for

PATIENCE_SECONDS = 240.0
STEPS = 2000
RUN: dict[str, Any] = {
    "layout": "dp2 zero2 mbs2",
    "checkpoints": {"every_steps": STEPS},  # none but when told
    "job": {"steps": STEPS, "global_batch": 16},  # not over in the half minute after which Slurm looks at the time
}
CLUSTER = """
ClusterName=one
SlurmctldHost=node1
SlurmUser=root
AuthType=auth/munge
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=node1 CPUs=2 State=UNKNOWN
PartitionName=grace Nodes=node1 PriorityTier=1 GraceTime=120
PartitionName=none Nodes=node1 PriorityTier=1 GraceTime=0
PartitionName=high Nodes=node1 PriorityTier=9 PreemptMode=OFF
"""


def describe_missing() -> str:
    """What is not here that a Slurm needs; empty if nothing."""
    for command in ("munged", "slurmctld", "slurmd", "sbatch", "srun"):
        if shutil.which(command) is None:
            return f"there is no {command} here (Debian: slurm-wlm, munge)"
    return "slurmd must be root" if os.geteuid() else hosts.describe_missing()


def start_cluster(folder: Path) -> None:
    """Slurm as node1, with its configuration and state in ``folder``."""
    (folder / "spool").mkdir(parents=True)
    (folder / "hosts").write_text("127.0.0.1 localhost\n10.0.0.1 node1\n")
    (folder / "slurm.conf").write_text(CLUSTER.format(folder=folder))
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    commands = (
        "ip link set lo up",
        "ip link add eth0 type veth peer name eth1",
        "ip link set eth1 up",
        "ip link set eth0 up",
        "ip addr add 10.0.0.1/24 dev eth0",  # without one, no name is looked up
        "hostname node1",
        f"mount --bind {folder}/hosts /etc/hosts",
        "mount -t tmpfs tmpfs /run",
        "mkdir --mode=0755 /run/munge",
        f"munged --force --key-file={folder}/munge.key --log-file={folder}/munged.log --seed-file={folder}/seed",
        "slurmctld",
        "slurmd",
    )
    for command in commands:
        subprocess.run(command.split(), check=True)
    wait_for(lambda: "idle" in slurm("sinfo", "--noheader", "--format=%T", check=False), seconds=PATIENCE_SECONDS)


def slurm(*words: str, check: bool = True) -> str:
    """What a command of Slurm's says."""
    return subprocess.run(words, capture_output=True, text=True, check=check).stdout


def submit(partition: str) -> str:
    """The run as a job, by our own command; its id."""
    said = subprocess.run(
        [sys.executable, "-m", "fivefold", "train", "run.toml", "--slurm"],
        env=os.environ | {"SBATCH_PARTITION": partition},
        capture_output=True,
        text=True,
        check=True,
    )
    match = re.fullmatch(r"Submitted batch job (\d+)", said.stderr.strip())
    assert match, said
    return match[1]


def state(job: str) -> str:
    """The job's state in Slurm's words."""
    match = re.search(r"JobState=(\S+)", slurm("scontrol", "show", "job", "--oneliner", job))
    assert match
    return match[1]


def preempt(job: str) -> None:
    """A job of a higher partition wants the node."""
    slurm("sbatch", "--partition=high", "--ntasks=2", "--output=high.txt", "--wrap=true")


def requeue(job: str) -> None:
    """Someone puts it back into the queue."""
    slurm("scontrol", "requeue", job)


def shorten_time(job: str) -> None:
    """Less than the five minutes are left in which the script wants to be told."""
    slurm("scontrol", "update", f"JobId={job}", "TimeLimit=5")


def disturb(job: str, by: Any, *, signal: str) -> None:
    """Take the node away a while after the last time; the job must have saved, wait in the queue, and go on."""
    former = max(0, saved_step())
    wait_for(lambda: read_last_step() > former + STEPS // 20, seconds=PATIENCE_SECONDS)
    begin = time.monotonic()
    by(job)
    wait_for(lambda: state(job) == "PENDING", seconds=PATIENCE_SECONDS)
    took, saved = time.monotonic() - begin, saved_step()
    assert former < saved == read_last_step() < STEPS, (former, saved, read_last_step())
    line = f"stopped by {signal} after step {saved} of {STEPS}; saved run/checkpoints/step-{saved:08d}"
    assert line in Path(f"run/slurm-{job}.txt").read_text()
    print(f"{by.__name__.replace('_', ' ')}: {signal}, saved step {saved}, in the queue after {took:.0f} s", flush=True)
    wait_for(lambda: slurm("squeue", "--noheader", "--partition=high") == "", seconds=PATIENCE_SECONDS)
    time.sleep(3)  # of two minutes that a requeued job waits: within a second, its node takes it for the former start
    slurm("scontrol", "update", f"JobId={job}", "StartTime=now", "TimeLimit=UNLIMITED")


def main() -> int:
    """The same bits twice."""
    parser = argparse.ArgumentParser(description="a run under Slurm; the weights must be those of the undisturbed run")
    parser.add_argument("--folder", type=Path, default=Path("runs/slurm"))
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if (code := hosts.run_in_namespaces("tests.endure.slurm", missing=describe_missing())) is not None:
        return code
    shutil.rmtree(options.folder, ignore_errors=True)
    with enter_folder(options.folder):
        start_cluster(Path("cluster").absolute())
        set_run(**RUN | {"folder": "straight"})
        command = [sys.executable, "-m", "fivefold", "train", "run.toml", "--json"]
        subprocess.run(command, capture_output=True, check=True)
        set_run(**RUN)
        job = submit("grace")
        disturb(job, preempt, signal="SIGTERM")
        disturb(job, shorten_time, signal="SIGUSR1")
        slurm("scontrol", "update", f"JobId={job}", "Partition=none")
        disturb(job, preempt, signal="SIGTERM")
        disturb(job, requeue, signal="SIGTERM")
        wait_for(lambda: state(job) not in ("PENDING", "RUNNING", "COMPLETING"), seconds=PATIENCE_SECONDS)
        equal = saved_bits() == saved_bits("straight") and saved_step() == len(losses()) == STEPS and not events()
        print(f"{state(job).lower()}: {'the same bits' if equal else 'OTHER BITS'} as undisturbed")
        return 0 if equal and state(job) == "COMPLETED" else 1


if __name__ == "__main__":
    sys.exit(main())

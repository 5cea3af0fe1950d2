"""How a run is started on its machine: one command on one host, torchrun on each of several, or a Slurm job."""

from __future__ import annotations

from pathlib import Path

from fivefold.layout.spec import divisor_below
from fivefold.machine.spec import Machine


def divide_over_hosts(world: int, ranks_per_host: int) -> tuple[int, int]:
    """Return the hosts of ``world`` ranks, and the ranks on each: as many as fit and divide ``world``."""
    each = divisor_below(world, ranks_per_host)
    return world // each, each


def start_commands(file: Path | str, *, world: int, machine: Machine) -> tuple[str, ...]:
    """Return the commands that start the run file on ``machine``, each of which is enough; the usual one first."""
    hosts, each = divide_over_hosts(world, machine.ranks_per_node)
    if hosts == 1:
        return (f"fivefold train {file}",)
    return (torchrun_command(file, hosts=hosts, each=each), f"fivefold train {file} --slurm")


def torchrun_command(file: Path | str, *, hosts: int, each: int) -> str:
    """Return the command for each host; ``HOST`` is the name of the first."""
    return (
        f"torchrun --nnodes {hosts} --nproc-per-node {each} --max-restarts 3 --rdzv-backend c10d "
        f"--rdzv-endpoint HOST:29400 -m fivefold train {file}"
    )

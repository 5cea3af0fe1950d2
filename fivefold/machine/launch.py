"""The commands that start a run on its machine: one command on one host, torchrun on each of several, or Slurm."""

from __future__ import annotations

from pathlib import Path

from fivefold.layout.spec import find_divisor_below
from fivefold.machine.spec import Machine


def divide_over_hosts(world: int, ranks_per_host: int) -> tuple[int, int]:
    """Return the number of hosts for ``world`` ranks, and the ranks per host: as many as fit and divide ``world``."""
    ranks_each = find_divisor_below(world, ranks_per_host)
    return world // ranks_each, ranks_each


def start_commands(file: Path | str, *, world: int, machine: Machine) -> tuple[str, ...]:
    """Return alternative commands that start the run file on ``machine``, the usual one first."""
    hosts, ranks_each = divide_over_hosts(world, machine.ranks_per_node)
    if hosts == 1:
        return (f"fivefold train {file}",)
    return (format_torchrun_command(file, hosts=hosts, ranks_per_host=ranks_each), f"fivefold train {file} --slurm")


def format_torchrun_command(file: Path | str, *, hosts: int, ranks_per_host: int) -> str:
    """Return the torchrun command for each host; ``HOST`` stands for the name of the first host."""
    return (
        f"torchrun --nnodes {hosts} --nproc-per-node {ranks_per_host} --max-restarts 3 --rdzv-backend c10d "
        f"--rdzv-endpoint HOST:29400 -m fivefold train {file}"
    )

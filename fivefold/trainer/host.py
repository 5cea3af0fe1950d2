"""Compares the machine of a run with this computer before a process starts, so that no plan starts by accident.

A GPU takes one rank of NCCL. Processes on CPU share the cores, so ``local:8`` may run on two cores. A machine of
several hosts may not run on one, nor may a planned GPU machine, whose ranks would train on a laptop's cores for years.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from fivefold.bounded_file import read_bytes
from fivefold.errors import UserError
from fivefold.layout.spec import Layout
from fivefold.machine.launch import divide_over_hosts, format_torchrun_command
from fivefold.machine.spec import Machine
from fivefold.units import show_bytes

MIN_MEMORY_SHARE = 0.9  # share of the planned chip's memory; what drivers report for one chip differs by less


@dataclass(frozen=True)
class Host:
    """The GPUs, cores and memory of this computer; ``gpu_memory_bytes``: memory of the smallest GPU."""

    cores: int
    memory_bytes: int
    gpus: int = 0
    gpu: str = ""  # name of the first GPU
    gpu_memory_bytes: int = 0

    @classmethod
    def inspect(cls) -> Host:
        """Inspect this computer."""
        import torch

        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not gpus:
            return cls(cores, count_memory_bytes())
        properties = [torch.cuda.get_device_properties(number) for number in range(gpus)]
        return cls(cores, count_memory_bytes(), gpus, properties[0].name, min(gpu.total_memory for gpu in properties))

    def __str__(self) -> str:
        """Describe its devices, to follow "this host has"."""
        if self.gpus:
            return f"{_count(self.gpus, 'GPU')} ({self.gpu}, {show_bytes(self.gpu_memory_bytes)})"
        return f"no GPU ({_count(self.cores, 'core')}, {show_bytes(self.memory_bytes)})"


def check_host(host: Host, *, machine: Machine, named: str, layout: Layout, file: Path, started: int = 0) -> str:
    """Raise a ``UserError`` if ``host`` cannot run its part of ``layout``; return a warning, or an empty text.

    ``named``: the machine as the run file names it. ``started``: ranks that torchrun or Slurm has started on this
    host; 0: all would be started here.
    """
    ranks = started or layout.world
    host_division = divide_over_hosts(layout.world, machine.ranks_per_node)
    request = f"machine {named!r}: layout {str(layout)!r} has {_count(layout.world, 'rank')}"
    if machine.has_gpus or host.gpus:
        if host.gpus < ranks:
            needs = f"of which {ranks} were started here" if started else "each on a GPU of its own"
            needs = needs if layout.world > 1 else "on a GPU"
            raise UserError(
                f"{request}, {needs}, but this host has {host}; {_format_advice(host, host_division, layout, file)}"
            )
        if host.gpu_memory_bytes < MIN_MEMORY_SHARE * machine.chip.memory_bytes and machine.has_gpus:
            raise UserError(
                f"machine {named!r}: {machine.chip.name} has {show_bytes(machine.chip.memory_bytes)}, but this host "
                f"has {host}; plan for that chip, or --machine local:{ranks} after `fivefold calibrate`"
            )
        family = machine.chip.name.partition("-")[0].lower()
        if machine.calibration is None and family not in host.gpu.lower():
            return f"this host has {host}, not {machine.chip.name}: what is predicted is of the latter"
    elif not started and host_division[0] > 1 and _name(named) != "local":
        raise UserError(
            f"{request} on {host_division[0]} hosts, and this would start all of them here; "
            f"{_format_advice(host, host_division, layout, file)}"
        )
    return ""


def check_memory(host: Host, *, peak_bytes: int, ranks: int, named: str) -> None:
    """Raise a ``UserError`` if ``ranks`` processes on the cores of ``host`` need more than its memory."""
    if not host.gpus and ranks * peak_bytes > host.memory_bytes:
        raise UserError(
            f"machine {named!r}: {_count(ranks, 'rank')} of up to {show_bytes(peak_bytes)} need "
            f"{show_bytes(ranks * peak_bytes)}, but this host has {show_bytes(host.memory_bytes)}; shard more, use a "
            "smaller model, or --force"
        )


def count_memory_bytes() -> int:
    """Return the bytes of RAM of this computer, or the limit of its control group (cgroup v2) if that is less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    allowed = read_bytes(limit).decode().strip() if limit.exists() else "max"
    return min(total, int(allowed)) if allowed.isdigit() else total


def _format_advice(host: Host, several: tuple[int, int], layout: Layout, file: Path) -> str:
    """Return advice if the ranks are too many for ``host``."""
    hosts, ranks_per_host = several
    local_devices = host.gpus or host.cores
    start = f"start it on a host of {_count(ranks_per_host, 'GPU')}"
    if hosts > 1:
        command = format_torchrun_command(file, hosts=hosts, ranks_per_host=ranks_per_host)
        start = f"start `{command}` on each of {hosts} hosts, or this with --slurm on a cluster"
    return f"{start}, or try it here: --machine local:{min(local_devices, layout.world)} --layout auto"


def _name(named: str) -> str:
    return named.strip().partition(" ")[0].partition(":")[0]


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"

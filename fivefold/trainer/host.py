"""Compares the machine of a run with this computer before a process starts, so that no plan starts by mistake.

A GPU takes one rank of NCCL. Processes on CPU share the cores, so ``local:8`` may run on two; but not the hosts of a
machine of several, nor a planned GPU machine, whose ranks would train on the cores of a laptop for years.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from fivefold.bounded_file import read_bytes
from fivefold.layout.spec import Layout
from fivefold.machine.launch import divide_over_hosts, torchrun_command
from fivefold.machine.spec import Machine
from fivefold.record import Mistake
from fivefold.units import show_bytes

SMALLER = 0.9  # of the machine's memory: what the driver shows of one chip differs by less


@dataclass(frozen=True)
class Host:
    """GPUs, cores and memory of this computer; ``gpu_memory_bytes``: of the smallest GPU."""

    cores: int
    memory_bytes: int
    gpus: int = 0
    gpu: str = ""  # name of the first
    gpu_memory_bytes: int = 0

    @classmethod
    def here(cls) -> Host:
        """Look at this computer."""
        import torch

        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not gpus:
            return cls(cores, memory_bytes())
        found = [torch.cuda.get_device_properties(number) for number in range(gpus)]
        return cls(cores, memory_bytes(), gpus, found[0].name, min(each.total_memory for each in found))

    def __str__(self) -> str:
        """What it has, after "this host has"."""
        if self.gpus:
            return f"{_count(self.gpus, 'GPU')} ({self.gpu}, {show_bytes(self.gpu_memory_bytes)})"
        return f"no GPU ({_count(self.cores, 'core')}, {show_bytes(self.memory_bytes)})"


def check_host(host: Host, *, machine: Machine, named: str, layout: Layout, file: Path, started: int = 0) -> str:
    """Raise a ``Mistake`` if ``host`` cannot run its part of ``layout``; return a warning, or an empty text.

    ``named``: the machine in the words of the run file. ``started``: ranks that torchrun or Slurm has started on this
    host; 0: all would be started here.
    """
    ranks, several = started or layout.world, divide_over_hosts(layout.world, machine.ranks_per_node)
    wants = f"machine {named!r}: layout {str(layout)!r} has {_count(layout.world, 'rank')}"
    if machine.backend == "nccl" or host.gpus:
        if host.gpus < ranks:
            all_here = f"of which {ranks} were started here" if started else "each on a GPU of its own"
            all_here = all_here if layout.world > 1 else "on a GPU"
            raise Mistake(f"{wants}, {all_here}, but this host has {host}; {_advice(host, several, layout, file)}")
        if host.gpu_memory_bytes < SMALLER * machine.chip.memory_bytes and machine.backend == "nccl":
            raise Mistake(
                f"machine {named!r}: {machine.chip.name} has {show_bytes(machine.chip.memory_bytes)}, but this host "
                f"has {host}; plan for that chip, or --machine local:{ranks} after `fivefold calibrate`"
            )
        family = machine.chip.name.partition("-")[0].lower()
        if machine.calibration is None and family not in host.gpu.lower():
            return f"this host has {host}, not {machine.chip.name}: what is predicted is of the latter"
    elif not started and several[0] > 1 and _name(named) != "local":
        raise Mistake(f"{wants} on {several[0]} hosts, and this would start all of them here; "
                      f"{_advice(host, several, layout, file)}")  # fmt: skip
    return ""


def check_memory(host: Host, *, peak_bytes: int, ranks: int, named: str) -> None:
    """Raise a ``Mistake`` if ``ranks`` processes on the cores of ``host`` need more than its memory."""
    if not host.gpus and ranks * peak_bytes > host.memory_bytes:
        raise Mistake(
            f"machine {named!r}: {_count(ranks, 'rank')} of up to {show_bytes(peak_bytes)} need "
            f"{show_bytes(ranks * peak_bytes)}, but this host has {show_bytes(host.memory_bytes)}; shard more, take a "
            "smaller model, or --force"
        )


def memory_bytes() -> int:
    """Return the bytes of RAM of this computer, or the limit of its control group (cgroup v2) if that is less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    allowed = read_bytes(limit).decode().strip() if limit.exists() else "max"
    return min(total, int(allowed)) if allowed.isdigit() else total


def _advice(host: Host, several: tuple[int, int], layout: Layout, file: Path) -> str:
    """Return what to do where the ranks are too many for ``host``."""
    hosts, each = several
    here = host.gpus or host.cores
    start = f"start it on a host of {_count(each, 'GPU')}"
    if hosts > 1:
        command = torchrun_command(file, hosts=hosts, each=each)
        start = f"start `{command}` on each of {hosts} hosts, or this with --slurm on a cluster"
    return f"{start}, or try it here: --machine local:{min(here, layout.world)} --layout auto"


def _name(named: str) -> str:
    return named.strip().partition(" ")[0].partition(":")[0]


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"

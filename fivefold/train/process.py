"""This process among its peers: started alone, by ``launch`` below, or by torchrun on many machines."""

from __future__ import annotations

import logging
import os
import signal
import sys
from dataclasses import dataclass
from datetime import timedelta
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from fivefold.record import Fault

# A collective that waits longer than this for a peer ends the run: longer than any step, shorter than patience.
TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Process:
    """Which process this is. ``joined``: others were started with it, and say so in its environment."""

    rank: int = 0
    local_rank: int = 0
    local_ranks: int = 1
    world: int = 1
    joined: bool = False

    def start(self) -> torch.device:
        """Join the process group and take this process's device and share of the cores."""
        if torch.cuda.is_available():
            device = torch.device("cuda", self.local_rank)
            torch.cuda.set_device(device)
        else:
            device = torch.device("cpu")
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // self.local_ranks))
        backend = "nccl" if device.type == "cuda" else "gloo"
        if self.joined:
            dist.init_process_group(backend, timeout=TIMEOUT)
        else:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        return device

    @staticmethod
    def end() -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()


def launch(arguments: list[str], *, ranks: int) -> None:
    """Run ``python -m fivefold ARGUMENTS`` as ``ranks`` local processes under torch's elastic agent.

    Raises ``Died`` with the first process that failed. A signal is passed on, and the processes are waited for.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the cause is told in one line
    with TemporaryDirectory() as logs:
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=ranks, rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0",
            run_id="fivefold", max_restarts=0, logs_specs=DefaultLogsSpecs(log_dir=logs),
        )  # fmt: skip
        if hasattr(config, "shutdown_timeout"):  # torch 2.13; 2.11 kills 30 s after a signal
            config.shutdown_timeout = 3600
        try:
            elastic_launch(config, sys.executable)("-m", "fivefold", *arguments)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            raise Died(rank, failure.exitcode) from None
        except SignalException:
            raise Died(0, 1) from None


class Died(Fault):
    """A process ended with ``code``; below 0 it was killed by that signal, otherwise it has said why itself."""

    def __init__(self, rank: int, code: int) -> None:
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        super().__init__(f"rank {rank} was ended by {name}")
        self.code = code

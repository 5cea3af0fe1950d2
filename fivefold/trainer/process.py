"""Starts processes and connects them: one by itself, several by ``launch`` on this host, or many by torchrun."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore
from torch.distributed.rendezvous import rendezvous

from fivefold.errors import RunFailure, StopSignal, UserError
from fivefold.trainer.checkpoint.checkpoint_folder import find_latest
from fivefold.trainer.faults.signals import EXIT_RETRY, LAUNCHER, STOP_SIGNALS, TIME, resume_hint
from fivefold.trainer.logs.run_log import note
from fivefold.units import ceil_div

# Timeout of collectives and of the rendezvous; longer than any step.
TIMEOUT = timedelta(minutes=10)
# A death is noticed after up to a second, so a peer's error about it may have an earlier time, by less than this.
NOTICED_SECONDS = 5.0
RENDEZVOUS_POLL_SECONDS = 0.02  # poll interval of ``agree_on_store_prefix`` per 64 ranks


@dataclass(frozen=True)
class Process:
    """The rank of this process. ``joined``: torchrun or ``launch`` started it, also if it is the only one."""

    rank: int = 0
    local_rank: int = 0
    local_ranks: int = 1
    world: int = 1
    joined: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Process:
        """Read the variables that torchrun or ``launch`` set in ``environment``; without them, a single process."""
        if "RANK" not in environment:
            return cls()
        names = {"rank": "RANK", "local_rank": "LOCAL_RANK", "local_ranks": "LOCAL_WORLD_SIZE", "world": "WORLD_SIZE"}
        return cls(**{field: int(environment[name]) for field, name in names.items()}, joined=True)

    @property
    def has_several_hosts(self) -> bool:
        """Return whether ranks of the world are on other hosts."""
        return self.world > self.local_ranks

    def start(self) -> torch.device:
        """Initialise the process group (NCCL on GPUs, else gloo); return the device. On CPU also divide the cores."""
        if torch.cuda.is_available():
            device = torch.device("cuda", self.local_rank)
            torch.cuda.set_device(device)
        else:
            device = torch.device("cpu")
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // self.local_ranks))
        backend = "nccl" if device.type == "cuda" else "gloo"
        if self.joined:
            store, rank, world = next(rendezvous("env://", timeout=TIMEOUT))
            store = PrefixStore(agree_on_store_prefix(store, rank=rank, world=world), store)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=TIMEOUT)
        else:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        return device

    @staticmethod
    def end() -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()


def agree_on_store_prefix(store: Any, *, rank: int, world: int) -> str:
    """Agree on a store prefix for this start, the same on all its ranks and never used before (a rendezvous).

    torchrun restarts processes on the same store, which still holds addresses of dead ones, and a replaced host counts
    restarts from 0. So each rank writes a random token, rank 0 publishes the list of them, and a list is valid once all
    its ranks have acknowledged it, which dead ones never do. Raises ``RunFailure`` after ``TIMEOUT``.
    """
    token = secrets.token_hex(8)
    acknowledged = set()
    deadline = time.monotonic() + TIMEOUT.total_seconds()
    store.set(f"here/{rank}", token)
    while time.monotonic() < deadline:
        if rank == 0:
            store.set("roll", b" ".join(store.multi_get([f"here/{peer}" for peer in range(world)])))
        roll: str = store.get("roll").decode()
        if token in roll:
            name = f"start/{hashlib.sha256(roll.encode()).hexdigest()}"
            n_answers = store.add(f"{name}/answers", int(name not in acknowledged))
            acknowledged.add(name)
            if n_answers == world:
                return name
        time.sleep(RENDEZVOUS_POLL_SECONDS * ceil_div(world, 64))
    raise RunFailure(
        f"rank {rank}: not all of the {world} ranks have joined within {TIMEOUT}; see that all were started and reach "
        "the master's address"
    )


def launch(arguments: list[str], *, ranks: int, folder: Path, restarts: int) -> None:
    """Run ``python -m fivefold ARGUMENTS``, which train in ``folder``, as ``ranks`` local processes, and wait.

    If one is killed, hangs or fails unexpectedly, all are restarted, at most ``restarts`` times in a row without a new
    checkpoint. SIGINT and SIGTERM are forwarded once. Raises ``UserError``, ``RunFailure``, ``StopSignal`` or
    ``SystemExit``.
    """
    restarts_left = restarts
    last_checkpoint = find_latest(folder / "checkpoints")
    while True:
        try:
            return _launch(arguments, ranks=ranks, folder=folder)
        except RetryableExit as exit_error:
            newest = find_latest(folder / "checkpoints")
            restarts_left = restarts if newest != last_checkpoint else restarts_left
            last_checkpoint = newest
            if not restarts_left:
                raise RunFailure(str(exit_error)) if str(exit_error) else SystemExit(1) from None
            restarts_left -= 1
            if str(exit_error):
                print(f"fivefold: {exit_error}", file=sys.stderr)
            print(f"fivefold: started again from {newest or 'the beginning'}", file=sys.stderr)
            with suppress(RunFailure):  # RunFailure: a full disk; the run itself may have enough space
                note(folder, text=f"{exit_error}; started again" if str(exit_error) else f"started again from {newest}")


class RetryableExit(Exception):
    """Processes have ended, and the same command may succeed; the message is empty if a process has printed it."""


def _launch(arguments: list[str], *, ranks: int, folder: Path) -> None:
    """Start the processes once, under torch's elastic library: if one fails, end the others and raise its error."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # port 0: any that is free
    received: list[int] = []
    logging.disable()  # torch reports a failure at length; ours is one line
    # Children inherit blocked signals, until they have handlers for them (``signals.install_signal_handlers``).
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    with TemporaryDirectory() as answers:
        processes = start_processes(
            "fivefold",
            sys.executable,
            args=dict.fromkeys(range(ranks), ("-m", "fivefold", *arguments)),
            envs={rank: _build_environment(rank, ranks=ranks, port=store.port) for rank in range(ranks)},
            logs_specs=DefaultLogsSpecs(log_dir=answers),
        )
        former_handlers = {
            number: signal.signal(number, lambda number, _: received.append(number)) for number in STOP_SIGNALS
        }
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        is_forwarded = False
        while (result := processes.wait(timeout=0.2, period=0.05)) is None:
            if received and not is_forwarded:
                is_forwarded = True
                _forward_signal(received[0], processes.pids().values())
        for number, handler in former_handlers.items():
            signal.signal(number, handler)
    logging.disable(logging.NOTSET)
    if sys.stderr.isatty():
        print(end="\x1b[?25h", file=sys.stderr)  # show the cursor, which a killed progress bar may have hidden
    if result.failures:
        name = signal.Signals(received[0]).name if received else ""
        _raise_first_cause(list(result.failures.values()), signal_name=name, folder=folder)


def _build_environment(rank: int, *, ranks: int, port: int) -> dict[str, str]:
    """Return the environment variables of rank ``rank``, as torchrun sets them."""
    values = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        LAUNCHER: os.getpid(),
    }
    return {name: str(value) for name, value in values.items()}


def _forward_signal(number: int, pids: Iterable[int]) -> None:
    """Send signal ``number`` to all ``pids`` that still run."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _raise_first_cause(failures: list[Any], *, signal_name: str, folder: Path) -> None:
    """Raise an error for the first cause among torch's ``ProcessFailure``s: a killed process, else the first error.

    Errors of the others, such as a peer that does not answer or the SIGTERM that ends them, follow from it.
    """
    reported = sorted((f for f in failures if TIME in f.error_file_data), key=lambda f: f.error_file_data[TIME])
    killed = [f for f in failures if f.exitcode < 0 and -f.exitcode not in STOP_SIGNALS]
    if reported and killed and killed[0].timestamp > reported[0].timestamp + NOTICED_SECONDS:
        killed = []  # killed later, because it did not exit after the first failure
    first = (killed or reported or failures)[0]
    if first.exitcode == EXIT_RETRY and not signal_name:
        raise RetryableExit(first.message if first in reported else "")
    if first.exitcode >= 0:
        if first in reported:
            raise (UserError if first.exitcode == 2 else RunFailure)(first.message)
        raise SystemExit(first.exitcode)  # it stopped in the loop and has printed the reason
    if signal_name:
        raise StopSignal(signal_name)
    name = first.signal_name()
    reason = ", perhaps for want of memory" if name == "SIGKILL" else ""
    raise RetryableExit(f"rank {first.local_rank} was ended by {name}{reason}; {resume_hint(folder)}")

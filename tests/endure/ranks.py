"""Ranks of one run, forked from a process that has imported torch: they start in a moment, as kills by the hundred ask.

Each is ``fivefold train run.toml`` with the environment that torchrun gives; who starts them again is the caller.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

import fivefold.profiling.closed_loop  # noqa: F401  torch once, before any fork
from fivefold import cli
from tests.forked_python import import_what_runs_load


class Ranks:
    """``world`` processes that train ``run.toml`` in the working directory."""

    def __init__(self, world: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        import_what_runs_load()
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.pids = [self._fork(rank, world) for rank in range(world)]
        self.codes: dict[int, int] = {}

    def _fork(self, rank: int, world: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        code: object = 99
        if hasattr(os, "sched_setaffinity"):  # a rank with two cores has two threads, which wait for each other
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[rank % len(cores)]})
        gc.freeze()  # what the parent has not collected is not ours: its threads are not here to answer
        try:
            stream = os.open(f"said-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(stream, 1)
            os.dup2(stream, 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
            os.environ |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
            sys.argv = ["fivefold", "train", "run.toml", "--json"]
            cli.entry()
        except SystemExit as done:
            code = done.code
        finally:
            sys.stderr.flush()
            os._exit(code if isinstance(code, int) else 0)

    def poll(self) -> list[int]:
        """The ranks that have ended."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes and (status := os.waitpid(pid, os.WNOHANG))[0]:
                self.codes[rank] = os.waitstatus_to_exitcode(status[1])
        return sorted(self.codes)

    def wait(self, *, seconds: float) -> dict[int, int]:
        """Exit codes by rank; who has not ended by then is killed, as a launcher would."""
        end = time.monotonic() + seconds
        while len(self.poll()) < len(self.pids) and time.monotonic() < end:
            time.sleep(0.02)
        for rank in range(len(self.pids)):
            self.signal(rank, signal.SIGKILL)
        while len(self.poll()) < len(self.pids):
            time.sleep(0.01)
        return self.codes

    def signal(self, rank: int, number: int) -> None:
        if rank not in self.codes:
            with suppress(ProcessLookupError):
                os.kill(self.pids[rank], number)

    def read_output(self) -> str:
        """What all wrote to the terminal."""
        return "".join(Path(f"said-{rank}.txt").read_text() for rank in range(len(self.pids)))

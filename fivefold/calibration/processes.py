"""Run worker processes in parallel, read the output of the first one, and end all of them together.

The first worker writes lines to its standard output. Whatever happens (a worker dies or hangs, Ctrl-C, an exception in
the caller), no worker is left when ``run_in_parallel`` returns.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, NamedTuple, NoReturn

from fivefold.errors import RunFailure


class Worker(NamedTuple):
    """A worker process, and the file that its standard error goes to."""

    process: subprocess.Popen[str]
    errors: Path


def run_in_parallel(
    commands: Sequence[Sequence[str]], *, silence_seconds: float, on_line: Callable[[str], None]
) -> None:
    """Run ``commands`` in parallel and pass each output line of the first to ``on_line``, until all have exited with 0.

    Raises ``RunFailure`` when a worker fails, or when the first one writes nothing for ``silence_seconds``.
    """
    with TemporaryDirectory(prefix="fivefold-") as folder:
        workers: list[Worker] = []
        try:
            for rank, command in enumerate(commands):
                workers.append(_start(command, errors=Path(folder) / f"{rank}", listen=rank == 0))
            _watch_workers(workers, silence_seconds=silence_seconds, on_line=on_line)
        finally:
            for worker in workers:
                worker.process.kill()
            for worker in workers:
                worker.process.wait()


def carry_out(work: Callable[[], None]) -> NoReturn:
    """Do the work of a worker process and exit; a failure is one line on standard error and exit code 1.

    The interpreter's tear-down is skipped, because threads of torch 2.13 abort one process in ten in it ("terminate
    called without an active exception").
    """
    code = 0
    try:
        work()
    except BaseException as error:  # Ctrl-C as well
        print(f"{type(error).__name__}: {error}".splitlines()[0], file=sys.stderr, flush=True)
        code = 1
    os._exit(code)


def _start(command: Sequence[str], *, errors: Path, listen: bool) -> Worker:
    """Start a worker; its stderr goes to the file ``errors``, and its stdout to a pipe if we ``listen``."""
    with errors.open("w") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if listen else subprocess.DEVNULL,
            stderr=file,
            text=True,
        )
    return Worker(process, errors)


def _watch_workers(workers: Sequence[Worker], *, silence_seconds: float, on_line: Callable[[str], None]) -> None:
    """Pass on the lines of the first worker until all have ended; raise if one fails or all are silent for long."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    stdout = workers[0].process.stdout
    assert stdout is not None, "the first worker is started with a pipe"
    threading.Thread(target=_forward_lines, args=(stdout, lines), daemon=True).start()
    last_line_time, is_open = time.monotonic(), True
    while is_open or any(worker.process.poll() is None for worker in workers):
        try:
            line = lines.get(timeout=0.1)
        except queue.Empty:
            if any(worker.process.poll() for worker in workers):
                raise _find_first_failure(workers) from None
            if time.monotonic() - last_line_time > silence_seconds:
                raise RunFailure(
                    f"{len(workers)} workers have reported nothing for {silence_seconds:g} s and were stopped; "
                    "try again when the computer is idle"
                ) from None
            continue
        if line is None:
            is_open = False
        else:
            on_line(line)
            last_line_time = time.monotonic()
    if any(worker.process.returncode for worker in workers):
        raise _find_first_failure(workers)


def _forward_lines(stdout: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    """Put every line on the queue, then None: a process may exit before its last lines are read."""
    with stdout:
        for line in stdout:
            lines.put(line)
    lines.put(None)


def _find_first_failure(workers: Sequence[Worker]) -> RunFailure:
    """Return the ``RunFailure`` of the worker that failed first; the others fail because they lost their peer."""
    time.sleep(0.5)  # let the first one finish exiting
    dead = {rank: worker for rank, worker in enumerate(workers) if worker.process.poll()}
    rank, worker = min(dead.items(), key=lambda item: item[1].errors.stat().st_mtime_ns)
    code = worker.process.returncode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    error_lines = worker.errors.read_text(errors="replace").strip().splitlines()
    return RunFailure(f"worker {rank} of {len(workers)} {how}{f': {error_lines[-1].strip()}' if error_lines else ''}")

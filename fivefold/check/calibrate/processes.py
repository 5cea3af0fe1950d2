"""Worker processes side by side: started together, watched together, ended together.

The first worker answers, line by line, on its standard output. Whatever happens (a death, silence, Ctrl-C, an error
in the caller), no worker is left when ``side_by_side`` returns.
"""

from __future__ import annotations

import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, NamedTuple

from fivefold.record import Fault


class Worker(NamedTuple):
    """A process and the file that its errors go to."""

    process: subprocess.Popen[str]
    errors: Path


def side_by_side(commands: Sequence[Sequence[str]], *, silence_seconds: float, on_line: Callable[[str], None]) -> None:
    """Run ``commands`` at once and hand each line of the first one to ``on_line``, until all have ended well.

    A ``Fault`` of one line when a worker dies or the first one says nothing for ``silence_seconds``.
    """
    with TemporaryDirectory(prefix="fivefold-") as folder:
        workers: list[Worker] = []
        try:
            for rank, command in enumerate(commands):
                workers.append(_start(command, errors=Path(folder) / f"{rank}", listen=rank == 0))
            _watch(workers, silence_seconds=silence_seconds, on_line=on_line)
        finally:
            for worker in workers:
                worker.process.kill()
            for worker in workers:
                worker.process.wait()


def _start(command: Sequence[str], *, errors: Path, listen: bool) -> Worker:
    with errors.open("w") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if listen else subprocess.DEVNULL,
            stderr=file,
            text=True,
        )
    return Worker(process, errors)


def _watch(workers: Sequence[Worker], *, silence_seconds: float, on_line: Callable[[str], None]) -> None:
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    stdout = workers[0].process.stdout
    assert stdout is not None, "the first worker is started with a pipe"
    threading.Thread(target=_listen, args=(stdout, lines), daemon=True).start()
    heard, talking = time.monotonic(), True
    while talking or any(worker.process.poll() is None for worker in workers):
        try:
            line = lines.get(timeout=0.1)
        except queue.Empty:
            if any(worker.process.poll() for worker in workers):
                raise _death(workers) from None
            if time.monotonic() - heard > silence_seconds:
                raise Fault(
                    f"{len(workers)} workers have said nothing for {silence_seconds:g} s and were stopped; "
                    "try again when the computer is idle"
                ) from None
            continue
        if line is None:
            talking = False
        else:
            on_line(line)
            heard = time.monotonic()
    if any(worker.process.returncode for worker in workers):
        raise _death(workers)


def _listen(stdout: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    """Pass on every line, then None: the end of the process may be seen before its last words."""
    with stdout:
        for line in stdout:
            lines.put(line)
    lines.put(None)


def _death(workers: Sequence[Worker]) -> Fault:
    """The one line for the worker that failed first: the others only lost their neighbour."""
    time.sleep(0.5)  # let the one that began it finish dying
    dead = {rank: worker for rank, worker in enumerate(workers) if worker.process.poll()}
    rank, worker = min(dead.items(), key=lambda item: item[1].errors.stat().st_mtime_ns)
    code = worker.process.returncode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    said = worker.errors.read_text(errors="replace").strip().splitlines()
    return Fault(f"worker {rank} of {len(workers)} {how}{f': {said[-1].strip()}' if said else ''}")

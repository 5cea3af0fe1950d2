"""How a process ends, and how before its time: by a signal, or because its launcher died. No torch here.

A process on its own raises ``StopSignal`` wherever it is. One of several, which may wait for another deep in a library,
simply dies; its launcher says why. Only the training loop does better: it finishes the step and saves.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from fivefold.record import Fault, Mistake

LAUNCHER = "FIVEFOLD_LAUNCHER"  # in the environment of a process that ``process.launch`` started: the launcher's id
TIME = "timestamp"  # of a line that was told, in seconds; the name is torch's
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
EXIT_RETRY = 75  # a process ends with it where the same command may succeed; EX_TEMPFAIL of sysexits.h


@contextmanager
def catch_signals(note: Callable[[str], None]) -> Iterator[None]:
    """Turn signals into a wish, by the signal's name; SIGUSR1 is what Slurm sends before the time is up."""

    def take(number: int, _frame: object) -> None:
        note(signal.Signals(number).name)

    former = {number: signal.signal(number, take) for number in (*STOP_SIGNALS, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


class StopSignal(BaseException):
    """A signal, by its name, asked for the end. Not an ``Exception``, lest someone on the way swallow it."""


def install_signal_handlers(*, launcher: int | None) -> None:
    """Let SIGINT and SIGTERM end this process as told above; signals that are ignored, as under nohup, stay so."""

    def stop(number: int, _frame: object) -> None:
        raise StopSignal(signal.Signals(number).name)

    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL if launcher else stop)
    if launcher:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        threading.Thread(target=_exit_with_launcher, args=(launcher,), daemon=True).start()


def _exit_with_launcher(launcher: int) -> None:
    """A launcher that is killed can tell nobody; whoever trains on would meet the next run in the same folder."""
    while os.getppid() == launcher:
        time.sleep(0.1)
    os._exit(1)


def leave(code: int) -> NoReturn:
    """End this process, which has been one of a process group, when all is said and saved.

    Not by way of the interpreter's own end: threads of gloo outlive their group, and one that lets go of a tensor of
    the last collective while the interpreter is taken down aborts the process (pytorch/pytorch#38228, #179291).
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def write_error_file(line: str, *, to: Path) -> bool:
    """Leave ``line`` for the launcher, in the form and the file that torch's elastic library reads.

    False if that cannot be, as when the disk is full: then it must be said here.
    """
    unfinished = to.with_suffix(".partial")
    try:
        unfinished.write_text(json.dumps({"message": line, TIME: time.time()}), encoding="utf-8")
        os.replace(unfinished, to)
    except OSError:
        return False
    return True


def resume_hint(folder: Path) -> str:
    """What to do after the run in ``folder`` has died."""
    from fivefold.train.checkpoint.checkpoint_folder import (
        latest,  # not before: until signals are heeded, every import counts
    )

    return f"the same command goes on from {latest(folder / 'checkpoints') or 'the beginning'}"


@contextmanager
def one_line(folder: Path, *, rank: int, answer: Path | None) -> Iterator[None]:
    """Of what nobody foresaw, one line remains, and the rest goes into a file of the run's ``folder``.

    ``answer``: the file in which a launcher expects it, with ``EXIT_RETRY``, as what nobody foresaw may pass. Without
    one, only the first rank says what all know.
    """
    path = folder / f"stderr-rank{rank}.txt"
    with _library_noise(path):
        try:
            yield
        except (Mistake, Fault):
            if rank == 0 or answer is not None:
                raise
            raise SystemExit(1) from None
        except Exception as error:
            os.write(2, traceback.format_exc().encode())
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            line = f"rank {rank}: {reason} (see {path}); {resume_hint(folder)}"
            if answer is not None and write_error_file(line, to=answer):
                os._exit(EXIT_RETRY)
            raise Fault(line) from None


def _report_thread(failed: threading.ExceptHookArgs) -> None:
    """As ``threading`` would, but below Python's stderr: the main thread will say what matters."""
    os.write(2, "".join(traceback.format_exception(failed.exc_value)).encode())


@contextmanager
def _library_noise(path: Path) -> Iterator[None]:
    """Let what libraries and their threads write to stderr go to ``path``, which is gone again if that is nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    former = sys.stderr
    former.flush()
    speaking = os.fdopen(os.dup(2), "w", buffering=1, encoding=former.encoding, errors="backslashreplace")
    with path.open("wb") as file:
        os.dup2(file.fileno(), 2)
    sys.stderr = speaking
    hook, threading.excepthook = threading.excepthook, _report_thread
    try:
        yield
    finally:
        threading.excepthook = hook
        speaking.flush()
        os.dup2(speaking.fileno(), 2)
        sys.stderr = former
        speaking.close()
        with suppress(FileNotFoundError):
            if path.stat().st_size == 0:
                path.unlink()

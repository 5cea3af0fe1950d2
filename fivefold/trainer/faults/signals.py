"""Handles the end of a process: signals, the death of its launcher, error files, exit codes. Does not import torch.

A single process raises ``StopSignal`` at any point. One of several may be blocked inside a library, so it exits at
once and its launcher reports why. Only the training loop catches signals, to finish the step and save.
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

from fivefold.errors import RunFailure, StopSignal, UserError
from fivefold.trainer.faults.transient import is_transient

LAUNCHER = "FIVEFOLD_LAUNCHER"  # environment variable set by ``process.launch``: the launcher's pid
TIME = "timestamp"  # key in the error file, seconds since the epoch; torchelastic's name
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
EXIT_RETRY = 75  # exit code if the same command may succeed when run again; EX_TEMPFAIL of sysexits.h


@contextmanager
def catch_signals(note: Callable[[str], None]) -> Iterator[None]:
    """Call ``note`` with the name of each SIGINT, SIGTERM and SIGUSR1 (Slurm's warning) instead of ending."""

    def take(number: int, _frame: object) -> None:
        note(signal.Signals(number).name)

    former_handlers = {number: signal.signal(number, take) for number in (*STOP_SIGNALS, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in former_handlers.items():
            signal.signal(number, handler)


def install_signal_handlers(*, launcher: int | None) -> None:
    """Make SIGINT and SIGTERM end this process as described above; ignored signals (nohup) stay ignored."""

    def stop(number: int, _frame: object) -> None:
        raise StopSignal(signal.Signals(number).name)

    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL if launcher else stop)
    if launcher:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        threading.Thread(target=exit_with_parent, args=(launcher,), daemon=True).start()


def exit_with_parent(parent: int) -> None:
    """Exit once the process that started this one is dead, so that no orphan trains on next to its successor."""
    while os.getppid() == parent:
        time.sleep(0.1)
    os._exit(1)


def leave(code: int) -> NoReturn:
    """Exit with ``code`` after flushing stdout and stderr, without finalising the interpreter.

    Threads of gloo outlive their process group; one that frees a tensor of the last collective while the interpreter
    shuts down aborts the process (pytorch/pytorch#38228, #179291).
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def write_error_file(line: str, *, to: Path) -> bool:
    """Write ``line`` for the launcher in the format of torchelastic's error file, atomically.

    Returns False if the file cannot be written (disk full); the caller must then report the line itself.
    """
    unfinished = to.with_suffix(".partial")
    try:
        unfinished.write_text(json.dumps({"message": line, TIME: time.time()}), encoding="utf-8")
        os.replace(unfinished, to)
    except OSError:
        return False
    return True


def resume_hint(folder: Path) -> str:
    """Return advice for the user after the run in ``folder`` has died, for the end of an error line."""
    from fivefold.trainer.checkpoint.checkpoint_folder import (
        find_latest,  # imported late: every import delays the signal handlers
    )

    return f"the same command continues from {find_latest(folder / 'checkpoints') or 'the beginning'}"


@contextmanager
def shorten_errors(folder: Path, *, rank: int, answer: Path | None) -> Iterator[None]:
    """Reduce an unexpected error to a one-line ``RunFailure``; traceback and library noise go to a file in ``folder``.

    ``answer``: the error file that a launcher reads; after a transient error the process exits with ``EXIT_RETRY``.
    Without it, only rank 0 raises a ``UserError`` or ``RunFailure`` that all ranks have met.
    """
    path = folder / f"stderr-rank{rank}.txt"
    with _redirect_library_stderr(path):
        try:
            yield
        except (UserError, RunFailure):
            if rank == 0 or answer is not None:
                raise
            raise SystemExit(1) from None
        except Exception as error:
            os.write(2, traceback.format_exc().encode())
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            line = f"rank {rank}: {reason} (see {path})"
            if answer is not None and not is_transient(error):
                raise RunFailure(
                    f"{line}; not started again, because every attempt would end in the same error"
                ) from None
            line = f"{line}; {resume_hint(folder)}"
            if answer is not None and write_error_file(line, to=answer):
                os._exit(EXIT_RETRY)
            raise RunFailure(line) from None


def _report_thread(failed: threading.ExceptHookArgs) -> None:
    """Write a thread's traceback to file descriptor 2 (``_redirect_library_stderr``), not to sys.stderr."""
    os.write(2, "".join(traceback.format_exception(failed.exc_value)).encode())


@contextmanager
def _redirect_library_stderr(path: Path) -> Iterator[None]:
    """Redirect file descriptor 2 to ``path`` for C libraries; sys.stderr still prints. Deletes an empty ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    former_stderr = sys.stderr
    former_stderr.flush()
    terminal = os.fdopen(os.dup(2), "w", buffering=1, encoding=former_stderr.encoding, errors="backslashreplace")
    with path.open("wb") as file:
        os.dup2(file.fileno(), 2)
    sys.stderr = terminal
    former_hook, threading.excepthook = threading.excepthook, _report_thread
    try:
        yield
    finally:
        threading.excepthook = former_hook
        terminal.flush()
        os.dup2(terminal.fileno(), 2)
        sys.stderr = former_stderr
        terminal.close()
        with suppress(FileNotFoundError):
            if path.stat().st_size == 0:
                path.unlink()

"""The lock of a run's folder: one training at a time writes its checkpoints and logs, on this host or another.

    RUN/lock.json  {"host": "node7", "process": 4711, "started": …, "kernel": …, "beat": 12}

The holder counts ``beat`` up every few seconds. A lock of a process that has died is taken over at once if its
processes are visible from here, and otherwise once its beat has not changed for ``SILENT_SECONDS`` by the local clock:
hosts that share a folder need not agree on the time.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from io import FileIO
from pathlib import Path

from pydantic import ValidationError

from fivefold.errors import RunFailure, UserError
from fivefold.record import Record

LOCK_FILE = "lock.json"
BEAT_SECONDS = 5.0
SILENT_SECONDS = 30.0  # several beats; a network file system shows a change a few seconds late
POLL_SECONDS = 1.0


class Holder(Record):
    """The process that trains in a folder.

    ``kernel``: the kernel of the process id; ``started``: start time of the process in ticks since that kernel's start,
    as ids are reused.
    """

    host: str
    process: int
    kernel: str
    started: str
    since: float = 0.0
    beat: int = 0

    @classmethod
    def from_pid(cls, process: int) -> Holder:
        """Describe a process of this host."""
        return cls(
            host=socket.gethostname(), process=process, kernel=_identify_kernel(), started=_read_start_time(process)
        )

    def is_same(self, other: Holder) -> bool:
        """Return whether both are one process."""
        return (self.kernel, self.process, self.started) == (other.kernel, other.process, other.started)

    def is_dead(self) -> bool | None:
        """Return whether the process has ended; None if that cannot be seen from here."""
        return None if self.kernel != _identify_kernel() else _read_start_time(self.process) != self.started

    def __str__(self) -> str:
        return f"process {self.process} on host {self.host}"


class RunLock:
    """A lock that this process holds; created by ``hold``."""

    def __init__(self, path: Path, holder: Holder) -> None:
        self.path, self.holder = path, holder
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="run lock", daemon=True)

    def _beat(self) -> None:
        beat = 0
        while not self._ended.wait(BEAT_SECONDS):
            beat += 1
            with suppress(OSError), _open_locked(self.path) as file:
                current = _read(file)
                if current is None or not current.is_same(self.holder):
                    return  # another process has taken it over: the next save raises
                _write(file, self.holder.replace(beat=beat))

    def start(self) -> None:
        """Start the thread that counts ``beat`` up."""
        self._thread.start()

    def release(self) -> None:
        """Remove the lock, unless another process has taken it over."""
        self._ended.set()
        self._thread.join(BEAT_SECONDS)
        with suppress(OSError), _open_locked(self.path) as file:
            current = _read(file)
            if current is not None and current.is_same(self.holder):
                self.path.unlink()


@contextmanager
def hold(folder: Path, *, report: Callable[[str], object] = lambda _: None) -> Iterator[None]:
    """Hold the lock of ``folder``, which is created if missing; raises ``UserError`` if another process holds it.

    ``report``: called once if it takes a while to see whether the former holder still runs.
    """
    path = folder / LOCK_FILE
    holder = Holder.from_pid(os.getpid()).replace(since=time.time())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _take(path, holder, report=report)
    except OSError as error:
        line = f"{folder} cannot be written: {error.strerror or error}; make room or give the run another folder"
        raise (RunFailure if error.errno in (errno.ENOSPC, errno.EDQUOT) else UserError)(line) from None
    lock = RunLock(path, holder)
    lock.start()
    try:
        yield
    finally:
        lock.release()


def check_held(folder: Path) -> None:
    """Raise a ``RunFailure`` if a process that is neither this one nor its parent holds the lock of ``folder``.

    A run that was stopped until another took it over must not remove files that the other writes.
    """
    with suppress(FileNotFoundError), _open_locked(folder / LOCK_FILE, creates=False) as file:
        current = _read(file)
        if current is not None and not any(
            current.is_same(Holder.from_pid(pid)) for pid in (os.getpid(), os.getppid())
        ):
            raise RunFailure(f"{current} has taken this run over, while this one stood still; it continues there")


def _take(path: Path, holder: Holder, *, report: Callable[[str], object]) -> None:
    """Write ``holder`` into the lock; first wait, if it is not known whether the previous holder still runs."""
    last_seen, deadline = None, 0.0
    while True:
        with _open_locked(path) as file:
            current = _read(file)
            if current is None or current.is_dead() or (current == last_seen and time.monotonic() > deadline):
                _write(file, holder)
                return
        if current.is_dead() is False or (last_seen is not None and current != last_seen):
            raise _build_error(path.parent, current)
        if last_seen is None:
            last_seen, deadline = current, time.monotonic() + SILENT_SECONDS
            report(f"{path.parent}: waiting up to {SILENT_SECONDS:g} s to see whether {current} still trains here")
        time.sleep(POLL_SECONDS)


def _build_error(folder: Path, holder: Holder) -> UserError:
    since = time.strftime("%H:%M:%S", time.localtime(holder.since))
    return UserError(
        f"{folder}: {holder} has been using this folder since {since}; wait for it, stop it, or give this run another "
        "folder"
    )


@contextmanager
def _open_locked(path: Path, *, creates: bool = True) -> Iterator[FileIO]:
    """Open the lock's file and exclude other processes meanwhile, if the file system supports it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if creates else 0), 0o644)
        with FileIO(descriptor, "r+") as file:
            _exclude(file)
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):  # else it was removed meanwhile
                yield file
                return


def _exclude(file: FileIO) -> None:
    """Take the flock of an open file; continue without it if unsupported, or if a stopped process has it."""
    for _ in range(20):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.1)
        except OSError:
            return
        else:
            return


def _read(file: FileIO) -> Holder | None:
    """Read the holder of the lock; None if it is free or the file is damaged."""
    try:
        return Holder.model_validate_json(os.pread(file.fileno(), 4096, 0))
    except ValidationError:
        return None


def _write(file: FileIO, holder: Holder) -> None:
    """Write the holder into the lock file, and flush it to disk."""
    text = holder.model_dump_json().encode()
    os.pwrite(file.fileno(), text, 0)
    os.ftruncate(file.fileno(), len(text))
    os.fsync(file.fileno())


@cache
def _identify_kernel() -> str:
    """Return an identifier of this kernel and its process ids, which differ per container."""
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{started} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _read_start_time(process: int) -> str:
    """Return when a process of this kernel started; empty if it has ended, also if it is still a zombie."""
    if not Path("/proc/self/stat").exists():
        try:
            os.kill(process, 0)
        except OSError:
            return ""
        return "runs"
    try:
        state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]  # proc_pid_stat(5): starttime is the 22nd field, the state the third

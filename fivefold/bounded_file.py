"""Read files within limits: only regular files and pipes, up to a size, and pipes for a limited time.

A path may name anything: /dev/zero never ends, a named pipe without a writer never begins, and a file of gigabytes
fills the memory before a parser can see that it is not a configuration.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader, FileIO
from pathlib import Path

MIB = 2**20
SETTINGS_BYTES = 4 * MIB  # TOML, Python, scripts; tomllib takes 0.4 s for a MiB
RECORD_BYTES = 64 * MIB  # JSON: steps, searches, indexes of weights, tokenizers
ROWS_BYTES = 512 * MIB  # a line per step of a run or per row of a sweep
LIMITS = {  # by suffix; all others have SETTINGS_BYTES. PyYAML takes six seconds for a MiB
    ".json": RECORD_BYTES,
    ".jsonl": ROWS_BYTES,
    ".csv": RECORD_BYTES,
    ".yaml": MIB,
    ".yml": MIB,
}
PIPE_SECONDS = 30.0  # timeout for all of a pipe (process substitution, or a named pipe with a writer)
_CHUNK_BYTES = MIB


def get_size_limit(path: Path) -> int:
    """Return the maximum number of bytes to read from a file with this name."""
    return LIMITS.get(path.suffix.lower(), SETTINGS_BYTES)


def read_bytes(path: Path, *, most_bytes: int | None = None) -> bytes:
    """Read all of a regular file or pipe. ``most_bytes`` replaces the limit of its suffix.

    Raises an ``OSError`` that says what is wrong, also for a device, a file that is too large, and a pipe that does not
    end within ``PIPE_SECONDS``.
    """
    limit = get_size_limit(path) if most_bytes is None else most_bytes
    with open_input(path) as file:
        status = os.fstat(file.fileno())
        chunks = list[bytes]()
        size = status.st_size
        is_pipe = not stat.S_ISREG(status.st_mode)
        deadline = time.monotonic() + PIPE_SECONDS
        if size <= limit:
            size = 0
            while size <= limit and (not is_pipe or _is_ready(file, deadline)) and (chunk := file.read(_CHUNK_BYTES)):
                chunks.append(chunk)
                size += len(chunk)
        if size > limit:
            reason = f"holds more than {limit / MIB:g} MiB, the most that is read of such a file"
            raise OSError(errno.EFBIG, reason, str(path))
    return b"".join(chunks)


def read_end(path: Path, *, most_bytes: int) -> bytes:
    """Read the last ``most_bytes`` of a regular file, or all of a pipe that has at most as many."""
    with open_input(path) as file:
        if not file.seekable():
            return read_bytes(path, most_bytes=most_bytes)
        file.seek(max(0, os.fstat(file.fileno()).st_size - most_bytes))
        return file.read(most_bytes)


@contextmanager
def open_input(path: Path) -> Iterator[FileIO]:
    """Open a regular file or a pipe, unbuffered, without waiting for a writer. Raise ``OSError`` for anything else."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with FileIO(descriptor) as file:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            raise OSError(errno.EINVAL, "is a device or a socket; name a file or a pipe", str(path))
        yield file


@contextmanager
def open_stream(path: Path) -> Iterator[BufferedReader]:
    """Open a regular file of any size, or a pipe that has data within ``PIPE_SECONDS``, for reading piece by piece."""
    with open_input(path) as file:
        if not file.seekable():
            _is_ready(file, time.monotonic() + PIPE_SECONDS)
            os.set_blocking(file.fileno(), True)
        buffered: BufferedReader = BufferedReader(file, _CHUNK_BYTES)
        with buffered:
            yield buffered


def drop_torn_line(descriptor: int) -> None:
    """Truncate an open file after its last line feed, to drop a line that was left unfinished."""
    end_offset = os.fstat(descriptor).st_size
    while end_offset:
        start_offset = max(0, end_offset - 65_536)
        newline_index = os.pread(descriptor, end_offset - start_offset, start_offset).rfind(b"\n")
        if newline_index >= 0:
            os.ftruncate(descriptor, start_offset + newline_index + 1)
            return
        end_offset = start_offset
    os.ftruncate(descriptor, 0)


def _is_ready(file: FileIO, end: float) -> bool:
    """Wait until a pipe has bytes or has ended. Raise ``OSError`` if neither happens before ``end``."""
    poll = select.poll()
    poll.register(file, select.POLLIN | select.POLLHUP)
    if time.monotonic() > end or not poll.poll(1000 * max(0.0, end - time.monotonic())):
        raise TimeoutError(errno.ETIMEDOUT, f"the pipe did not end in {PIPE_SECONDS:g} s; write it to a file first")
    return True

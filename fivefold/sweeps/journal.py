"""The journal of a sweep: what is done, one JSON line each, appended by one write; it survives a kill at any moment.

    {"kind": "predicted" | "measured" | "submitted", "key": …, "value": …}

A last line that was cut off is dropped when the journal is opened again. One sweep at a time writes to it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fivefold.bounded_file import drop_torn_line
from fivefold.record import Fault, Mistake, read_lines


class Journal:
    """The values by kind and key; the last of a key counts. Made by ``opened``."""

    def __init__(self, path: Path, file: int) -> None:
        self.path, self._file = path, file
        self._values: dict[tuple[str, str], Any] = {}
        for line in read_lines(path):
            self._values[line["kind"], line["key"]] = line["value"]

    def get(self, kind: str, key: str) -> Any:
        """The value of ``key``, or None."""
        return self._values.get((kind, key))

    def put(self, kind: str, key: str, value: Any) -> None:
        """Add a line; a ``Fault`` if the disk is full, which leaves the lines before it."""
        line = json.dumps({"kind": kind, "key": key, "value": value}).encode() + b"\n"
        end = os.fstat(self._file).st_size
        try:
            if os.write(self._file, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            os.ftruncate(self._file, end)
            raise Fault(
                f"{self.path}: cannot be written: {error.strerror}; the same command goes on from there"
            ) from None
        self._values[kind, key] = value

    def drop(self, kind: str) -> None:
        """Forget the lines of ``kind``; remove the file if no others are left."""
        kept = {place: value for place, value in self._values.items() if place[0] != kind}
        if not kept:
            self.path.unlink()
            return
        partial = self.path.with_suffix(".partial")
        lines = (json.dumps({"kind": of, "key": key, "value": value}) for (of, key), value in kept.items())
        partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
        os.replace(partial, self.path)


@contextmanager
def opened(path: Path) -> Iterator[Journal]:
    """The journal at ``path``, which is made if it is not there; a ``Mistake`` if another process writes to it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise Mistake(f"{path}: cannot be written: {error.strerror}; name another file with --out") from None
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Mistake(f"{path}: another sweep writes to it; wait for it, or name another file with --out") from None
        drop_torn_line(file)
        yield Journal(path, file)
    finally:
        os.close(file)

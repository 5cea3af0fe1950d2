"""The journal of a sweep lists what is finished: one JSON line each, appended by one write, so it survives a kill.

    {"kind": "predicted" | "measured" | "submitted", "key": …, "value": …}

A truncated last line is dropped when the journal is opened again. Only one sweep at a time writes to it.
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

from fivefold.atomic_file import replace_file
from fivefold.bounded_file import drop_torn_line
from fivefold.errors import RunFailure, UserError
from fivefold.text_files import read_lines


class Journal:
    """The values of a sweep by kind and key; the last value of a key counts. Made by ``open_journal``."""

    def __init__(self, path: Path, file: int) -> None:
        self.path, self._file = path, file
        self._values: dict[tuple[str, str], Any] = {}
        for line in read_lines(path):
            self._values[line["kind"], line["key"]] = line["value"]

    def get(self, kind: str, key: str) -> Any:
        """Return the value of ``key``, or None."""
        return self._values.get((kind, key))

    def list_values(self, kind: str) -> list[Any]:
        """Return the values of all keys of ``kind``, in the order in which the keys were first put."""
        return [value for (value_kind, _), value in self._values.items() if value_kind == kind]

    def put(self, kind: str, key: str, value: Any) -> None:
        """Append a line; raises ``RunFailure`` if the disk is full, and the lines before it stay intact."""
        line = json.dumps({"kind": kind, "key": key, "value": value}).encode() + b"\n"
        end = os.fstat(self._file).st_size
        try:
            if os.write(self._file, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            os.ftruncate(self._file, end)
            raise RunFailure(
                f"{self.path} cannot be written: {error.strerror}; the same command continues from there"
            ) from None
        self._values[kind, key] = value

    def drop(self, kind: str) -> None:
        """Delete the lines of ``kind``, and the file if no other lines are left."""
        kept = {kind_and_key: value for kind_and_key, value in self._values.items() if kind_and_key[0] != kind}
        if not kept:
            self.path.unlink()
            return
        lines = (
            json.dumps({"kind": kept_kind, "key": key, "value": value}) for (kept_kind, key), value in kept.items()
        )
        with replace_file(self.path, contents="the journal") as file:
            file.write_text("\n".join(lines) + "\n", encoding="utf-8")


@contextmanager
def open_journal(path: Path) -> Iterator[Journal]:
    """Open the journal at ``path``, creating it if needed; raises ``UserError`` if another process writes to it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}; name another file with --out") from None
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{path}: another sweep writes to it; wait for it, or name another file with --out"
            ) from None
        drop_torn_line(file)
        yield Journal(path, file)
    finally:
        os.close(file)

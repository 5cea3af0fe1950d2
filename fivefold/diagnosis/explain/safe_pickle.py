"""Read a pickle that contains only data (numbers, strings, lists, tuples, dictionaries), without running code.

A pickle calls what it names by GLOBAL, STACK_GLOBAL, INST or an extension, all of which ask ``find_class``; here
``find_class`` always raises, so nothing is imported and nothing called. Memory snapshots and flight recorders name
nothing.
"""

from __future__ import annotations

import os
import pickle
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn

from fivefold.bounded_file import open_stream
from fivefold.errors import UserError

MAX_BYTES = 2**32  # objects in memory take several times as much
MAGIC = b"\x80"  # first byte of a pickle of protocol 2 and later


class _DataOnly(pickle.Unpickler):
    """An unpickler that resolves no names."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Raise ``UserError`` for a name that would be called."""
        raise UserError(
            f"names {module}.{name}, which unpickling would run, so the file was not read; give a memory snapshot or a "
            "flight recorder dump as PyTorch writes it, which names no code"
        )

    def persistent_load(self, _key: object) -> NoReturn:
        """Raise ``UserError`` for an object outside of the pickle."""
        raise UserError(
            "refers to objects outside of the pickle, as files of torch.save do, so it was not read; give a memory "
            "snapshot or a flight recorder dump as PyTorch writes it"
        )


def load(path: Path) -> Any:
    """Return what a pickle holds; raises ``UserError`` if it names code, is cut short or is not a pickle."""
    with open_stream(path) as file:
        return load_open(file, path=path)


def load_open(file: BufferedReader, *, path: Path) -> Any:
    """Return what the pickle of an open file holds, as ``load`` does."""
    if os.fstat(file.fileno()).st_size > MAX_BYTES:
        raise UserError(
            f"{path} holds more than {MAX_BYTES // 2**30} GiB, the limit for a snapshot; record fewer events "
            "(max_entries)"
        )
    try:
        return _DataOnly(file).load()
    except UserError as mistake:
        raise UserError(f"{path}: {mistake}") from None
    except OSError:
        raise
    except Exception as error:  # a damaged pickle raises any of a dozen kinds
        reason = " ".join(str(error).split())[:120]
        if isinstance(error, EOFError) or "truncated" in reason:
            raise UserError(f"{path}: the pickle is truncated; write it again, and copy the complete file") from None
        raise UserError(f"{path}: not a readable pickle: {type(error).__name__} {reason}".rstrip()) from None

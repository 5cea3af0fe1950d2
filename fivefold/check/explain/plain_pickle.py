"""Reads a pickle that holds data alone: numbers, strings, lists, tuples, dictionaries. Runs no code.

A pickle calls what it names by GLOBAL, STACK_GLOBAL, INST or an extension, all of which ask ``find_class``; it always
refuses, so nothing is imported and nothing called. Memory snapshots and flight recorders name nothing.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, NoReturn

from fivefold.record import Mistake

MAGIC = b"\x80"  # how a pickle of protocol 2 and later begins


class _DataOnly(pickle.Unpickler):
    """An unpickler that knows no names."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse what would be called."""
        raise Mistake(f"names {module}.{name}, which reading it would run; a snapshot holds data alone: not read")

    def persistent_load(self, _key: object) -> NoReturn:
        """Refuse what lies elsewhere."""
        raise Mistake("points to objects outside of it (a file of torch.save?); a snapshot holds data alone: not read")


def load(path: Path) -> Any:
    """Return what a pickle holds; a ``Mistake`` if it names code, is cut short or is none."""
    try:
        with path.open("rb") as file:
            return _DataOnly(file).load()
    except Mistake as mistake:
        raise Mistake(f"{path}: {mistake}") from None
    except OSError:
        raise
    except Exception as error:  # what a damaged pickle raises is any of a dozen kinds
        reason = " ".join(str(error).split())[:120]
        if isinstance(error, EOFError) or "truncated" in reason:
            raise Mistake(f"{path}: the pickle is cut short; write it again, and copy it whole") from None
        raise Mistake(f"{path}: not a readable pickle: {type(error).__name__} {reason}".rstrip()) from None

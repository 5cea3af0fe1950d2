"""Text, JSON and TOML files that users name; what is wrong with one is said in one line."""

from __future__ import annotations

import errno
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fivefold.bounded_file import RECORD_BYTES, ROWS_BYTES, read_bytes
from fivefold.errors import UserError


def read_text(path: Path, *, kind: str, most_bytes: int | None = None) -> str:
    """Read a user's file as UTF-8; ``UserError`` if it cannot be read as ``kind``, which the message names.

    ``most_bytes`` replaces the limit of ``bounded_file`` for its suffix.
    """
    try:
        return read_bytes(path, most_bytes=most_bytes).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except NotADirectoryError:
        file = next(parent for parent in path.parents if parent.exists())
        raise UserError(f"{path}: no such file; {file} is a file, not a folder") from None
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            raise UserError(f"{path}: too long for a file name; check the spelling") from None
        reason = (
            error.strerror or error
            if isinstance(error, OSError)
            else f"not UTF-8 at byte {error.start}; save it as UTF-8"
        )
        raise UserError(f"{path} cannot be read as {kind}: {reason}") from None
    except ValueError as error:  # a file name with a null byte
        raise UserError(f"{str(path)!r} is not a file name: {error}") from None


def read_file(path: Path) -> dict[str, Any]:
    """Read a ``.toml`` or ``.json`` file as a dictionary; ``UserError`` if it is missing or invalid."""
    text = read_text(path, kind="UTF-8 text")
    try:
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also a number of 5000 digits, or 100 000 brackets
        raise UserError(f"{path}: not valid {'JSON' if path.suffix == '.json' else 'TOML'}: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} holds {describe_json(values)}, not a table of keys")
    return values


def describe_json(value: object) -> str:
    """Return the kind of a JSON value that is not an object, in words."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return "a list" if isinstance(value, list) else "text" if isinstance(value, str) else "a number"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSON-lines file; empty if it does not exist. Stops at a line that was cut short."""
    if path.exists() and path.stat().st_size > ROWS_BYTES:
        raise UserError(f"{path} holds more than {ROWS_BYTES >> 20} MiB, the limit for rows; split the file")
    return list(iterate_lines(path))


def iterate_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a JSON-lines file of any size, as ``read_lines`` does."""
    if not path.exists():
        return
    if not path.is_file():
        raise UserError(f"{path}: not a regular file; name a file")
    count = 0
    with path.open("rb") as file:
        while line := file.readline(RECORD_BYTES):
            try:
                values = json.loads(line.decode())
            except UnicodeDecodeError:
                if count and not line.endswith(b"\n"):  # cut short within a character
                    return
                raise UserError(f"{path} cannot be read as UTF-8 text; convert it") from None
            except (ValueError, RecursionError):
                return
            count += 1
            if not isinstance(values, dict):
                raise UserError(f"{path}: line {count} holds {describe_json(values)}, not a table of keys")
            yield values


def locate(name: str, *, named_in: Path) -> str:
    """Resolve a path named in the file ``named_in``: relative to that file if it exists there, or else unchanged."""
    path = named_in.parent / name
    return str(path) if name and path.exists() else name

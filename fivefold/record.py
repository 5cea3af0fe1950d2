"""What a noun is: a frozen, validated record that refuses unknown keys and teaches in one line.

``Mistake`` is the user's fault (exit code 2), ``Fault`` the system's (exit code 1); both print one line.
"""

from __future__ import annotations

import json
import reprlib
import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError


class Mistake(ValueError):
    """What the user can mend: one line that says what is wrong, by how much, and what to do."""


class Fault(RuntimeError):
    """What the system did: a full disk, a dead worker; one line as well."""


class Remark(UserWarning):
    """What the user should know though nothing is wrong; one line, as a warning."""


class Record(BaseModel):
    """A frozen value, checked once on construction and varied by ``replace``."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="forbid", strict=False, allow_inf_nan=False, protected_namespaces=()
    )

    def replace(self, **changes: Any) -> Self:
        """A checked copy with some fields changed."""
        return type(self).model_validate({**self.model_dump(), **changes})

    @classmethod
    def read(cls, values: dict[str, Any], *, origin: str) -> Self:
        """Validate ``values``; a ``Mistake`` names ``origin``, the field and the nearest known field."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise Mistake(f"{origin}: {explain(error, cls)}") from None


def explain(error: ValidationError, record: type[BaseModel]) -> str:
    """The first of pydantic's complaints in one line, with the nearest field name where a key is unknown."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "extra_forbidden":
        close = get_close_matches(str(first["loc"][-1]), _known_keys(record, first["loc"]), n=1)
        return f"unknown key {place!r}{f'; did you mean {close[0]!r}?' if close else ''}{more}"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] != "value_error" and isinstance(first["input"], str | int | float):
        message += f", not {reprlib.repr(first['input'])}"
    return f"{place}: {message}{more}" if place else f"{message}{more}"


def _known_keys(record: type[BaseModel], place: tuple[int | str, ...]) -> list[str]:
    """The field names of the record, perhaps a nested one, that holds the key at ``place``."""
    for part in place[:-1]:
        if part in record.model_fields:
            inner = _records_in(record.model_fields[str(part)].annotation)
            record = inner[0] if inner else record
    return list(record.model_fields)


def _records_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and not get_args(annotation) and issubclass(annotation, BaseModel):
        return [annotation]
    return [record for part in get_args(annotation) for record in _records_in(part)]


def difference(there: Record, here: Record, *, skip: tuple[str, ...] = ()) -> str | None:
    """The first field in which two records of one type differ, with both values."""
    for name in type(there).model_fields:
        was, now = getattr(there, name), getattr(here, name)
        if name in skip or was == now:
            continue
        if isinstance(was, Record) and isinstance(now, Record):
            return f"{name}.{difference(was, now)}"
        return f"{name}={was!r} instead of {now!r}"
    return None


def read_text(path: Path, *, kind: str) -> str:
    """The text of a user's file, which is to be of a ``kind``; a ``Mistake`` of one line if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise Mistake(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise Mistake(f"{path}: cannot be read as {kind}: {error}") from None


def read_file(path: Path) -> dict[str, Any]:
    """A ``.toml`` or ``.json`` file as a dictionary; every way it can be unreadable is one line."""
    text = read_text(path, kind="UTF-8 text")
    try:
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also a number of 5000 digits, or 100 000 brackets
        raise Mistake(f"{path}: not valid {path.suffix.lstrip('.').upper() or 'TOML'}: {error}") from None
    if not isinstance(values, dict):
        raise Mistake(f"{path}: holds a {type(values).__name__}, not a table of keys")
    return values


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, none if it is not there; a last line that was cut short is left out."""
    lines: list[dict[str, Any]] = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def nearest(word: str, known: list[str], *, kind: str) -> Mistake:
    """The one line for an unknown name: ``unknown model 'lama3-8b'; did you mean llama3-8b?``."""
    close = get_close_matches(word, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(sorted(known))}"
    return Mistake(f"unknown {kind} {word!r}; {hint}")

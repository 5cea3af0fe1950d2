"""Write a machine to a TOML file atomically, and read it back bitwise equal.

One measured point is one line. Fields that are None are omitted, as TOML has no null.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fivefold.atomic_file import replace_file
from fivefold.machine.spec import Machine
from fivefold.text_files import read_file


def write(machine: Machine, path: Path) -> None:
    """Write ``machine`` to ``path``; raises ``RunFailure`` if that is not possible."""
    with replace_file(path, contents="the machine") as file:
        file.write_text(emit(machine.model_dump(exclude_none=True)), encoding="utf-8")


def read(path: Path) -> Machine:
    """Read the machine in ``path`` (``.toml`` or ``.json``); a ``UserError`` names the file and the wrong field."""
    return Machine.read(read_file(path), origin=str(path))


def emit(values: Mapping[str, Any]) -> str:
    """Format ``values`` as TOML: nested tables under headings, lists of tables with one table per line."""
    return "\n".join(_format_table(values, heading="")) + "\n"


def _format_table(values: Mapping[str, Any], *, heading: str) -> list[str]:
    scalars = {key: value for key, value in values.items() if not isinstance(value, Mapping)}
    lines = [f"{_format_key(key)} = {_format_block(value)}" for key, value in scalars.items()]
    for key, value in values.items():
        if isinstance(value, Mapping):
            path = f"{heading}.{_format_key(key)}" if heading else _format_key(key)
            lines += ["", f"[{path}]", *_format_table(value, heading=path)]
    return lines


def _format_block(value: Any) -> str:
    """Format a value after ``=``; a list of tables takes one line per table."""
    if isinstance(value, list | tuple) and value and all(isinstance(item, Mapping) for item in value):
        return "[\n" + "".join(f"  {_format_inline(item)},\n" for item in value) + "]"
    return _format_inline(value)


def _format_inline(value: Any) -> str:
    """Format a value as TOML in one line."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return _quote(value)
        case int() | float():
            return repr(value)  # the shortest digits that parse to the same float
        case list() | tuple():
            return "[" + ", ".join(_format_inline(item) for item in value) + "]"
        case Mapping():
            return (
                "{ " + ", ".join(f"{_format_key(key)} = {_format_inline(item)}" for key, item in value.items()) + " }"
            )
    raise TypeError(f"TOML has no {type(value).__name__}")


def _format_key(key: str) -> str:
    return key if key.isascii() and key.replace("_", "").replace("-", "").isalnum() else _quote(key)


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON allows a bare DEL, TOML does not

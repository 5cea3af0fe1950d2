"""Read a file as a document: TOML, YAML, JSON, or the text of a Python file. Nothing in it is executed."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

from fivefold.errors import UserError
from fivefold.interop.format import Document
from fivefold.text_files import describe_json, read_text

MAX_FILE_VALUES = 100_000  # maximum number of values in a file, counting what YAML aliases repeat


def parse_yaml(text: str) -> Any:
    """Return the values of a YAML; raise ``ValueError`` if it is not valid."""
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}: " if mark else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise ValueError(f"{place}{problem}") from None


READERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    ".toml": ("toml", tomllib.loads),
    ".json": ("json", json.loads),
    ".yaml": ("yaml", parse_yaml),
    ".yml": ("yaml", parse_yaml),
}


def read_document(path: Path) -> Document:
    """Read the file at ``path``; raise ``UserError`` if it is missing or invalid."""
    text = read_text(path, kind="UTF-8 text")
    document = Document(str(path), "python", text=text, folder=path.resolve().parent)
    if path.suffix == ".py":
        return document
    if path.suffix not in READERS:
        raise UserError(
            f"{path}: ends in {path.suffix or 'nothing'}; configs end in {', '.join([*READERS, '.py', '.sh'])}"
        )
    return parse_values(document, path.suffix)


def parse_values(document: Document, suffix: str) -> Document:
    """Return the document with the values of its text, read as a file that ends in ``suffix``, a key of ``READERS``."""
    origin = document.origin
    kind, reader = READERS[suffix]
    try:
        values = reader(document.text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{origin}: not valid {kind.upper()}: {error}") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UserError(
            f"{origin} holds {describe_json(values)}, not a table of keys by name; give the config of one run"
        )
    if _deduct_values(values, MAX_FILE_VALUES) <= 0:
        raise UserError(
            f"{origin} holds more than {MAX_FILE_VALUES} values, too many for a config; give only the config"
        )
    return document._replace(kind=kind, values=values)


def find_file(document: Document, *names: str, folders: Iterable[Path] = ()) -> Path | None:
    """Return the first of the files ``names`` that is in a document's folder or in one of ``folders``, in this order.

    None if there is none that the document may name.
    """
    for folder, name in product((document.folder, *folders), names):
        try:
            path = document.find(str(folder / name))
            if path.is_file():
                return path
        except (OSError, ValueError):  # not allowed, a name that is too long, or one with a null byte
            continue
    return None


def read_named(document: Document, path: Path) -> Document:
    """Read a file that a document names, which may name what the document may."""
    return read_document(path)._replace(find=document.find)


def _deduct_values(value: Any, left: int) -> int:
    """Return what remains of a budget of ``left`` values after one is deducted for each in ``value``; 0: too many."""
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    left -= 1
    for child in children:
        if left <= 0:
            return 0
        left = _deduct_values(child, left)
    return left

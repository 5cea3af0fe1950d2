"""Whether an answer repeats what was asked: a setting that changes nothing in it was ignored in silence."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any
from warnings import catch_warnings

from fivefold.errors import UserError
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.stack.spec import FACTS

OPTIONS = {"--seq": "sequence", "--gbs": "global_batch", "--precision": "precision.name", "--stack": "stack.name"}

YES, NO = ("true", "1", "yes", "on", "t", "y"), ("false", "0", "no", "off", "f", "n")


def find_ignored(words: list[str], out: str) -> str:
    """Return what ``predict --json`` printed otherwise than it was asked, in one line; "" if nothing."""
    if words[:1] != ["predict"] or "--json" not in words or not out:
        return ""
    step = json.loads(out)
    for path, text in list_asked(words):
        result = value_at(step["job"], path)
        if text is not None and not is_same(text, result) and not is_reduced(path, text, result):
            return f"asked for {path}={text!r}, answered for {result!r}"
    if "--from" not in words and len(words) > 3 and (layout := parse_layout(words[3], words[2])) is not None:
        if str(layout) != step["layout"]:
            return f"asked for the layout {words[3]!r}, answered for {step['layout']!r}"
        if layout.world != step["world"]:
            return f"asked for {layout.world} ranks, answered for {step['world']}"
    return ""


def is_reduced(path: str, text: str, value: Any) -> bool:
    """Whether a precision is the one that was asked for, with gradients as the stack reduces them, which it names."""
    return path == "precision.name" and str(value).startswith(f"{text}-")


def list_asked(words: list[str]) -> list[tuple[str, str | None]]:
    """Return fields of the job and their values, as options and ``--set`` say them; None: cannot be told from here.

    A field of ``--set`` goes before the option of its name.
    """
    options, results, changed = list[tuple[str, str | None]](), list[tuple[str, str | None]](), set[str]()
    for option, text in pairwise(words):
        if option in OPTIONS:
            options.append((OPTIONS[option], text))
        elif option == "--set":
            path, _, value = text.partition("=")
            path = {"stack": "stack.name", "precision": "precision.name"}.get(path, path)
            path = f"stack.{path}" if path.split(".")[0] in FACTS else path
            results.append((path, None if value[:1] in ("[", "{") or path == "adapter" else value))
            changed.add(path)
    return [item for item in options if item[0] not in changed] + results


def value_at(values: Any, path: str) -> Any:
    """Return the value at a dotted path of nested tables."""
    for key in path.split("."):
        values = values[key] if isinstance(values, dict) else None
    return values


def is_same(text: str, value: Any) -> bool:
    """Whether a value of a record is what ``text`` says."""
    if isinstance(value, bool):
        return text.strip().lower() in (YES if value else NO)
    if isinstance(value, int | float):
        try:
            return int(text) == value if text.strip().lstrip("+-").isdecimal() else float(text) == value
        except ValueError:
            return False
    if isinstance(value, list):
        parts = [part.strip() for part in text.split(",") if part.strip()]
        return len(parts) == len(value) and all(map(is_same, parts, value))
    return str(value) == text


def parse_layout(text: str, machine: str) -> Layout | None:
    """Return the layout that ``text`` is on a machine, whose ranks a layout without dp uses; None if it is none."""
    try:
        resolved = resolve(machine, local=Path("/nowhere"))
        with catch_warnings(action="ignore"):
            return Layout.parse(text, machine=resolved)
    except UserError:
        return None

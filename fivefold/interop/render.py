"""Configs as text: TOML and YAML, each line with what it is for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fivefold.interop.keys import Table

WIDTH = 44  # column of comments
Extra = Mapping[str, tuple[Any, str]]  # keys without effect that a run needs, with what they are for


def commented(line: str, comment: str) -> str:
    """A line and its comment."""
    return f"{line:<{WIDTH}}  # {comment}" if comment else line


def grouped(values: Mapping[str, Any], table: Table, extra: Extra) -> dict[str, list[tuple[str, Any, str]]]:
    """Keys by the table that they are in: their name in it, value and meaning; None is left out."""
    rows = [(key, value, table[key].means) for key, value in values.items() if value is not None]
    rows += [(key, value, comment) for key, (value, comment) in extra.items()]
    groups: dict[str, list[tuple[str, Any, str]]] = {}
    for key, value, means in rows:
        group, _, name = key.rpartition(".")
        groups.setdefault(group, []).append((name, value, means))
    return groups


def toml_file(values: Mapping[str, Any], table: Table, *, about: Sequence[str], extra: Extra) -> str:
    """A TOML file."""
    lines = [f"# {line}" for line in about]
    for group, rows in grouped(values, table, extra).items():
        lines += ["", f"[{group}]"]
        lines += [commented(f"{name} = {literal(value)}", means) for name, value, means in rows]
    return "\n".join(lines) + "\n"


def literal(value: Any) -> str:
    """A value in TOML, JSON or YAML, which write these alike."""
    if isinstance(value, tuple):
        value = list(value)
    if isinstance(value, float):
        text = repr(value)
        return text if "." in text or "e" not in text else text.replace("e", ".0e")  # YAML 1.1 wants the dot
    return json.dumps(value)


def yaml_file(values: Mapping[str, Any], table: Table, *, about: Sequence[str], extra: Extra) -> str:
    """A YAML file of tables within tables."""
    tree: dict[str, Any] = {}
    rows = {key: (value, table[key].means) for key, value in values.items() if value is not None}
    for key, row in (rows | dict(extra)).items():
        *parents, name = key.split(".")
        within = tree
        for parent in parents:
            within = within.setdefault(parent, {})
        within[name] = row
    return "\n".join([*(f"# {line}" for line in about), *_yaml(tree, "")]) + "\n"


def _yaml(tree: Mapping[str, Any], indent: str) -> list[str]:
    lines = []
    for name, within in tree.items():
        if isinstance(within, dict):
            lines += [f"{indent}{name}:", *_yaml(within, indent + "  ")]
        else:
            value, means = within
            lines.append(commented(f"{indent}{name}: {literal(value)}", means))
    return lines


def dumped(documents: Sequence[Any]) -> str:
    """Values as YAML, text of several lines as a block."""
    import yaml

    class Blocks(yaml.SafeDumper):  # type: ignore[misc]
        pass

    def text(dumper: Any, value: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Blocks.add_representer(str, text)
    return str(yaml.dump_all(documents, Dumper=Blocks, sort_keys=False, width=120))

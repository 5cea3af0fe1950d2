"""Configs as text: TOML and YAML, each line with a comment on its purpose."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fivefold.interop.keys import Table

WIDTH = 44  # column of comments
Extra = Mapping[str, tuple[Any, str]]  # keys without effect that a run needs: values and comments


def append_comment(line: str, comment: str) -> str:
    """Append a comment to a line."""
    return f"{line:<{WIDTH}}  # {comment}" if comment else line


def group_keys(values: Mapping[str, Any], table: Table, extra: Extra) -> dict[str, list[tuple[str, Any, str]]]:
    """Group keys by their table, each with its name in the table, its value and its meaning; leave out None."""
    rows = [(key, value, table[key].means) for key, value in values.items() if value is not None]
    rows += [(key, value, comment) for key, (value, comment) in extra.items()]
    groups: dict[str, list[tuple[str, Any, str]]] = {}
    for key, value, means in rows:
        group, _, name = key.rpartition(".")
        groups.setdefault(group, []).append((name, value, means))
    return groups


def render_toml(values: Mapping[str, Any], table: Table, *, about: Sequence[str], extra: Extra) -> str:
    """Return a TOML file."""
    lines = [f"# {line}" for line in about]
    for group, rows in group_keys(values, table, extra).items():
        lines += ["", f"[{group}]"]
        lines += [append_comment(f"{name} = {format_literal(value)}", means) for name, value, means in rows]
    return "\n".join(lines) + "\n"


def format_literal(value: Any) -> str:
    """Write a value as TOML, JSON and YAML all spell it."""
    if isinstance(value, tuple):
        value = list(value)
    if isinstance(value, float):
        text = repr(value)
        return text if "." in text or "e" not in text else text.replace("e", ".0e")  # YAML 1.1 requires the dot
    return json.dumps(value)


def render_yaml(values: Mapping[str, Any], table: Table, *, about: Sequence[str], extra: Extra) -> str:
    """Return a YAML file of nested tables."""
    tree: dict[str, Any] = {}
    rows = {key: (value, table[key].means) for key, value in values.items() if value is not None}
    for key, row in (rows | dict(extra)).items():
        *parents, name = key.split(".")
        table_tree = tree
        for parent in parents:
            table_tree = table_tree.setdefault(parent, {})
        table_tree[name] = row
    return "\n".join([*(f"# {line}" for line in about), *_format_yaml(tree, "")]) + "\n"


def _format_yaml(tree: Mapping[str, Any], indent: str) -> list[str]:
    """Return the lines of a tree of values with comments as YAML."""
    lines = []
    for name, within in tree.items():
        if isinstance(within, dict):
            lines += [f"{indent}{name}:", *_format_yaml(within, indent + "  ")]
        elif isinstance(value := within[0], list) and value and all(isinstance(entry, dict) for entry in value):
            lines += [append_comment(f"{indent}{name}:", within[1]), *_format_yaml_entries(value, indent + "  ")]
        else:
            means = within[1]
            lines.append(append_comment(f"{indent}{name}: {format_literal(value)}", means))
    return lines


def _format_yaml_entries(entries: Sequence[Mapping[str, Any]], indent: str) -> list[str]:
    lines = []
    for entry in entries:
        tree = {key: _with_comments(value) for key, value in entry.items()}
        first, *other_lines = _format_yaml(tree, f"{indent}  ")
        lines += [f"{indent}- {first.lstrip()}", *other_lines]
    return lines


def _with_comments(value: Any) -> Any:
    return {key: _with_comments(entry) for key, entry in value.items()} if isinstance(value, dict) else (value, "")


def dump(documents: Sequence[Any]) -> str:
    """Write values as YAML, with text of several lines as blocks."""
    import yaml

    class Blocks(yaml.SafeDumper):  # type: ignore[misc]
        pass

    def text(dumper: Any, value: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Blocks.add_representer(str, text)
    return str(yaml.dump_all(documents, Dumper=Blocks, sort_keys=False, width=120))

"""Texts and syntax trees of the project's files: each is read and parsed once for all tests of this folder."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def read_text(file: Path) -> str:
    """Return the text of a file."""
    return file.read_text(encoding="utf-8")


@cache
def parse_file(file: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(read_text(file))


@cache
def list_nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Return all nodes of a syntax tree: to walk it takes longer than what a test does with them."""
    return tuple(ast.walk(tree))

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

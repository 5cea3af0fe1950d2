"""Names and docstrings use the field's words: the bans are short lists, each exception has its reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FRAGMENTS = re.compile(r"(Of|Those|As|What|Whether|Which|From|By|That|Where|How|With|For|In|At|On)\b")
BARE_NAMES = frozenset(
    [
        "told",
        "found",
        "named",
        "drawn",
        "said",
        "asked",
        "kept",
        "given",
        "held",
        "shown",
        "taken",
        "gone",
        "made",
        "met",
        "seen",
        "sought",
        "tried",
        "reached",
        "varied",
        "joined",
        "built",
        "played",
        "beaten",
        "counted",
        "measured",
        "of",
        "own",
        "others",
        "whole",
        "at",
        "each",
        "alike",
        "apart",
        "beside",
        "again",
        "otherwise",
        "within",
        "without",
        "amid",
        "after",
        "before",
        "both",
        "either",
        "near",
    ]
)
VAGUE_LOCALS = frozenset({"found", "each"})
VAGUE_CONSTANTS = frozenset(
    ["MOST", "LEAST", "ALIKE", "SHOWN", "PARTS", "FREE", "NEAR", "FAR", "MANY", "FEW", "LONG", "SHORT", "LATE", "SOON"]
)
ALLOWED = {
    "fivefold/dry_run/record/tape.py: FREE": "an opcode of the tape, next to ALLOC, as in PyTorch's memory snapshots",
}


def find_violations(tree: ast.AST, path: str) -> Iterator[str]:
    """Yield ``path: name`` for each banned name, and ``path: name: docstring`` for each fragment."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            docstring = ast.get_docstring(node) or ""
            if FRAGMENTS.match(docstring):
                yield f"{path}: {node.name}: {docstring.splitlines()[0]}"
            if not isinstance(node, ast.ClassDef) and node.name.lstrip("_") in BARE_NAMES:
                yield f"{path}: {node.name}"
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            if node.id in VAGUE_LOCALS | VAGUE_CONSTANTS:
                yield f"{path}: {node.id}"
        elif isinstance(node, ast.arg) and node.arg in VAGUE_LOCALS:
            yield f"{path}: {node.arg}"


@pytest.mark.slow
def test_names_and_docstrings_use_the_words_of_the_field() -> None:
    violations = set()
    for file in sorted([*(ROOT / "fivefold").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]):
        path = file.relative_to(ROOT).as_posix()
        violations.update(find_violations(ast.parse(file.read_text(encoding="utf-8")), path))
        if file.stem in BARE_NAMES:
            violations.add(f"{path}: module")
    assert violations - ALLOWED.keys() == set()
    assert set(ALLOWED) <= violations, "an exception that is not needed any more"


@pytest.mark.parametrize(
    "source",
    [
        "def told(): ...",
        "class A:\n    def _of(self): ...",
        "MOST = 3",
        "x = [each for each in y]",
        "def f(found): ...",
        'def f():\n    """Of a step."""',
        'class A:\n    """Which ranks hold it."""',
    ],
)
def test_a_planted_violation_is_reported(source: str) -> None:
    assert len(list(find_violations(ast.parse(source), "planted.py"))) >= 1


def test_ordinary_code_is_not_reported() -> None:
    source = (
        'MAX_RANKS = 3\n\n\ndef count(layouts):\n    """Return the layouts."""\n    return [len(x) for x in layouts]'
    )
    assert list(find_violations(ast.parse(source), "ordinary.py")) == []

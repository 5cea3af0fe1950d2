"""Sizes, names and openings of files: what a reader may count on anywhere in the house."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fivefold"
FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
HOMELESS = {"utils", "util", "common", "helpers", "helper", "base", "misc"}


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def names_used(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def test_files_are_short() -> None:
    sizes = {path.relative_to(ROOT).as_posix(): lines(path) for path in FILES}
    assert {name: size for name, size in sizes.items() if size > 330} == {}
    long = [name for name, size in sizes.items() if size > 300]
    assert len(long) <= len(sizes) // 20, f"more than one file in twenty exceeds 300 lines: {long}"


def test_functions_are_short() -> None:
    sizes = {
        f"{name}:{node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: size for name, size in sizes.items() if size >= 50} == {}


def test_every_line_has_a_home() -> None:
    assert [name for name in TREES if HOMELESS.intersection(Path(name).with_suffix("").parts)] == []


@pytest.mark.parametrize("name", TREES)
def test_a_file_opens_with_what_it_is(name: str) -> None:
    if not TREES[name].body:
        return  # an empty __init__.py
    opening = ast.get_docstring(TREES[name])
    assert opening, f"{name} has no opening docstring"
    assert len(opening.splitlines()) <= 8, f"{name} opens with more than 8 lines"


def test_nothing_comes_from_the_air() -> None:
    """No environment variable is read below ``asked``, and no function rebinds a global."""
    found = []
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            reads = isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv")
            imports = isinstance(node, ast.ImportFrom) and node.module == "os" and "env" in ast.unparse(node)
            above = name.startswith(("fivefold/cli/", "fivefold/asked/"))
            if isinstance(node, ast.Global) or ((reads or imports) and not above):
                found.append(f"{name}:{node.lineno}")
    assert found == []


def test_tensor_suffixes_keep_to_the_one_legend() -> None:
    """``x_BTD``: every letter after the underscore is in the table of ``docs/notation.md`` §1."""
    text = (ROOT / "docs" / "notation.md").read_text(encoding="utf-8")
    letters = set(re.findall(r"^\| ([A-Z]) \|", text, flags=re.MULTILINE))
    assert letters >= set("BTDFNKHSVLE")
    suffix = re.compile(r"[a-z][a-z0-9_]*_([A-Z]{1,6})")
    strange = {
        f"{name}: {used}"
        for name, tree in TREES.items()
        for used in names_used(tree)
        if (match := suffix.fullmatch(used)) and not letters.issuperset(match[1])
    }
    assert strange == set()


def test_there_is_one_legend() -> None:
    tables = [
        path.relative_to(ROOT).as_posix()
        for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
        if re.search(r"^\| D \|", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    ]
    assert tables == ["docs/notation.md"]


@pytest.mark.parametrize(
    "package", sorted({path.parent for path in FILES} - {PACKAGE, PACKAGE / "check/published/readers"})
)
def test_a_package_opens_with_a_table_of_its_contents(package: Path) -> None:
    """Its docstring names every module and package in it."""
    within = {path.stem for path in package.glob("*.py")} - {"__init__"} | {
        path.parent.name for path in package.glob("*/*.py")
    }
    opening = ast.get_docstring(TREES[(package / "__init__.py").relative_to(ROOT).as_posix()]) or ""
    assert within - set(re.findall(r"\w+", opening)) == set()

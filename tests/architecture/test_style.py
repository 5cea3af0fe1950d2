"""Sizes, names and docstrings of files: rules that hold in the full package."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fivefold.optimizers import KINDS
from tests.architecture.sources import list_nodes, parse_file

Trees = dict[str, ast.Module]

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fivefold"
FILES = sorted(PACKAGE.rglob("*.py"))
HOMELESS = {"utils", "util", "common", "helpers", "helper", "base", "misc"}


@pytest.fixture(scope="module")
def trees() -> Trees:
    """Every file's syntax; made by the one worker whose tests these are, and not where they are collected."""
    return {path.relative_to(ROOT).as_posix(): parse_file(path) for path in FILES}


def names_used(tree: ast.AST) -> Iterator[str]:
    for node in list_nodes(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


@pytest.mark.slow
def test_every_line_is_covered_by_a_guard(trees: Trees) -> None:
    assert [name for name in trees if HOMELESS.intersection(Path(name).with_suffix("").parts)] == []


def test_a_file_opens_with_what_it_is(trees: Trees) -> None:
    openings = {name: ast.get_docstring(tree) or "" for name, tree in trees.items() if tree.body}
    assert [name for name, opening in openings.items() if not opening] == [], "no opening docstring"


def test_a_private_function_of_ten_lines_says_what_it_does(trees: Trees) -> None:
    undescribed = [
        f"{name}:{node.lineno} {node.name}"
        for name, tree in trees.items()
        for node in list_nodes(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and re.match("_[a-z]", node.name)
        and (node.end_lineno or node.lineno) - node.lineno >= 9
        and not ast.get_docstring(node)
    ]
    assert undescribed == [], "begin with a sentence that says what it does"


@pytest.mark.slow
def test_nothing_reads_the_environment_below_requests(trees: Trees) -> None:
    """No environment variable is read below ``requests``, and no function rebinds a global."""
    results = []
    for name, tree in trees.items():
        for node in list_nodes(tree):
            reads = isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv")
            imports = isinstance(node, ast.ImportFrom) and node.module == "os" and "env" in ast.unparse(node)
            above = name.startswith(("fivefold/cli/", "fivefold/requests/"))
            if isinstance(node, ast.Global) or ((reads or imports) and not above):
                results.append(f"{name}:{node.lineno}")
    assert results == []


READS_WHOLE = {"read_text", "read_bytes"}
OUR_OWN = {  # files of the package, of Python's library and of the kernel, whose sizes we know
    "fivefold/calibration/processes.py",
    "fivefold/calibration/unit_worker.py",
    "fivefold/calibration/worker.py",
    "fivefold/model/huggingface/families/__init__.py",
    "fivefold/sweeps/trial.py",
    "fivefold/trainer/data/corpus.py",
    "fivefold/trainer/logs/wandb_log.py",
    "fivefold/trainer/run_lock.py",
    "fivefold/web/pages/learn.py",
}


@pytest.mark.slow
def test_code_does_not_branch_on_schedule_names(trees: Trees) -> None:
    """What depends on a pipeline schedule is a field of its record (``PipelineSchedule``); names are only looked up."""
    from fivefold.layout.schedule.pipeline_schedule import SCHEDULES

    for path, tree in trees.items():
        for node in list_nodes(tree):
            if isinstance(node, ast.Compare):
                parts = [item for value in (node.left, *node.comparators) for item in ast.walk(value)]
                words = {item.value for item in parts if isinstance(item, ast.Constant) and isinstance(item.value, str)}
                assert not words & {*SCHEDULES}, f"{path}:{node.lineno}"
            elif isinstance(node, ast.Attribute) and node.attr in ("startswith", "endswith"):
                assert not ast.unparse(node.value).endswith("schedule"), f"{path}:{node.lineno}"


@pytest.mark.slow
def test_files_are_read_within_bounds(trees: Trees) -> None:
    """A user's path may lead to a device, a pipe or gigabytes: ``bounded_file`` reads it, and no method of a path."""
    results = [
        f"{name}:{node.lineno}"
        for name, tree in trees.items()
        for node in list_nodes(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in READS_WHOLE
    ]
    assert {place.partition(":")[0] for place in results} <= OUR_OWN, results


@pytest.mark.slow
def test_tensor_suffixes_follow_the_notation_page(trees: Trees) -> None:
    """``x_BTD``: every letter after the underscore is in the table of ``docs/notation.md`` §1."""
    text = (ROOT / "docs" / "notation.md").read_text(encoding="utf-8")
    letters = set(re.findall(r"^\| ([A-Z]) \|", text, flags=re.MULTILINE))
    assert letters >= set("BTDFNKHSVLE")
    suffix = re.compile(r"[a-z][a-z0-9_]*_([A-Z]{1,6})")
    strange = {
        f"{name}: {used}"
        for name, tree in trees.items()
        for used in names_used(tree)
        if (match := suffix.fullmatch(used)) and not letters.issuperset(match[1])
    }
    assert strange == set()


def test_there_is_one_notation_page() -> None:
    tables = [
        path.relative_to(ROOT).as_posix()
        for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
        if re.search(r"^\| D \|", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    ]
    assert tables == ["docs/notation.md"]


def test_a_package_opens_with_a_table_of_its_contents(trees: Trees) -> None:
    """Its docstring names every module and package in it, except in a registry, which finds new modules by itself."""
    registries = {"model/huggingface/families", "optimizers/costs", "cli/commands"}
    formats = {path.parent.name for path in (PACKAGE / "interop").glob("*/emit.py")}
    registered = {PACKAGE / "trainer/optimizers": set(KINDS), PACKAGE / "interop": formats}
    left_out = {}
    for package in {path.parent for path in FILES} - {PACKAGE, *(PACKAGE / name for name in registries)}:
        within = {path.stem for path in package.glob("*.py")} - {"__init__"} | {
            path.parent.name for path in package.glob("*/*.py")
        }
        name = (package / "__init__.py").relative_to(ROOT).as_posix()
        named = set(re.findall(r"\w+", ast.get_docstring(trees[name]) or ""))
        left_out[name] = within - named - registered.get(package, set())
    assert {name: within for name, within in left_out.items() if within} == {}

"""Imports run down only, and torch is loaded by the trainer and the packages that run it alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.architecture.sources import list_nodes, parse_file

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fivefold"
HEAVY = {"torch", "altair", "vl_convert", "transformers", "tokenizers", "pyarrow", "tensorboard", "fastapi"}
WITH_TORCH = ("trainer", "dry_run", "calibration", "profiling", "diagnosis", "sweeps")
RECORDS = ("job", "layout", "machine", "model", "step", "record", "units", "update")


def modules(*rooms: str) -> list[str]:
    paths = [path for room in rooms for path in [*ROOT.glob(f"{room}.py"), *ROOT.glob(f"{room}/**/*.py")]]
    dotted = (path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for path in paths)
    return sorted(name.removesuffix(".__init__") for name in dotted)


def python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_import_contract_holds() -> None:
    python("import sys; sys.argv[1:] = ['--no-cache']; from importlinter.cli import lint_imports_command as c; c()")


def list_imported(tree: ast.AST) -> Iterator[str]:
    for node in list_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


@pytest.mark.slow
def test_torch_is_imported_only_where_steps_run() -> None:
    naming = {
        p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*.py") if "torch" in list_imported(parse_file(p))
    }
    assert naming, "the search finds nothing at all"
    assert {path for path in naming if not path.startswith(WITH_TORCH)} == set()


@pytest.mark.slow
def test_no_two_modules_import_one_another() -> None:
    """No circle of any length, also not by an import within a function or for type checking alone."""
    names, graph = {*modules("fivefold")}, dict[str, set[str]]()
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
        known = graph[name] = set()
        for node in list_nodes(parse_file(path)):
            if isinstance(node, ast.Import):
                known |= {item.name for item in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{item.name}" for item in node.names}
                known |= inner & names if inner <= names else {node.module, *inner}
        known &= names - {name}
    assert len(graph) > 400
    assert graph["fivefold.planner.predict"]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as circle:
        pytest.fail(" <- ".join(circle.args[1]))


@pytest.mark.parametrize(
    ("names", "absent"),
    [
        (["fivefold", "fivefold.planner"], HEAVY | {"numpy", "rich"}),
        (modules(*(f"fivefold/{record}" for record in RECORDS)), HEAVY | {"numpy", "rich"}),
        (modules("fivefold/rendering"), HEAVY | {"numpy"}),
        (modules("fivefold/planner"), HEAVY),
        (modules("benchmarks/published"), HEAVY),
        (modules("fivefold/profiling/traces"), HEAVY),
        (modules("fivefold/diagnosis/explain"), HEAVY),
    ],
    ids=["fivefold", "records", "rendering", "planner", "published", "traces", "explain"],
)
def test_planning_commands_import_no_torch(names: list[str], absent: set[str]) -> None:
    assert names
    loaded = python(f"import sys\nfor name in {names}: __import__(name)\nprint(*sys.modules)").split()
    assert absent.intersection(loaded) == set()


def test_building_a_run_imports_only_what_it_uses() -> None:
    """``torch._dynamo`` takes two seconds of every process's start, Triton and TensorBoard a fifth of one."""
    python(
        "import sys, torch, fivefold.profiling.closed_loop\n"
        "from fivefold.job import Job\n"
        "from fivefold.model.catalog import build_model\n"
        "from fivefold.trainer.model.kernels.choice import check_kernels\n"
        "from fivefold.trainer.model.transformer import Transformer\n"
        "check_kernels(Job())\n"
        "with torch.device('meta'): Transformer(build_model('nano'))\n"
        "assert not {'torch._dynamo', 'triton', 'torch.utils.tensorboard'} & set(sys.modules)"
    )


def test_no_module_has_the_name_of_a_function_of_the_public_api() -> None:
    """Python binds a submodule to its package when it is first imported, which would hide a function of that name."""
    import fivefold

    modules = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert modules & set(fivefold.__all__) == set()

"""Facts of kernels: which of two lists a stack has is chosen once."""

from __future__ import annotations

import ast
from pathlib import Path

import fivefold
from fivefold.stack.catalog import STACKS, build_stack
from fivefold.stack.kernel_facts import AUTOGRAD, FIVEFOLD

PACKAGE = Path(fivefold.__file__).parent


def compares_linears(tree: ast.AST) -> bool:
    """Return whether a module compares the linear layers of a stack."""
    compared = (
        side for node in ast.walk(tree) if isinstance(node, ast.Compare) for side in (node.left, *node.comparators)
    )
    return any(isinstance(side, ast.Attribute) and side.attr == "linears" for side in compared)


def test_one_module_decides_on_linear_layers_of_other_software() -> None:
    texts = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    asking = [name for name, text in texts.items() if "linears" in text and compares_linears(ast.parse(text))]
    assert asking == ["stack/spec.py"]


def test_only_the_engine_has_the_engines_kernels() -> None:
    facts = {name: build_stack(name).kernel_facts for name in STACKS}
    assert [name for name, fact in facts.items() if fact is FIVEFOLD] == ["fivefold"]
    assert all(fact is AUTOGRAD for name, fact in facts.items() if name != "fivefold")


def test_the_lists_differ_in_every_fact() -> None:
    assert [name for name in FIVEFOLD._fields if getattr(FIVEFOLD, name) == getattr(AUTOGRAD, name)] == []

"""Facts of kernels: which list a stack has is chosen once, and no other module compares the names of its kernels."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import get_args

import pytest

import fivefold
from fivefold.job import RECIPES, get_recipe
from fivefold.layout.names import CONTEXT_PARALLELISMS, CpKind
from fivefold.number_formats import NUMBER_FORMATS
from fivefold.stack.catalog import STACKS, build_stack
from fivefold.stack.kernel_facts import ATTENTIONS, AUTOGRAD, FIVEFOLD, LOSSES
from fivefold.stack.spec import Stack
from fivefold.units import Dtype

PACKAGE = Path(fivefold.__file__).parent


def compares(field: str, tree: ast.AST) -> bool:
    """Return whether a module compares a field of a stack."""
    compared = (
        side for node in ast.walk(tree) if isinstance(node, ast.Compare) for side in (node.left, *node.comparators)
    )
    sides = (side for side in compared if isinstance(side, ast.Attribute) and side.attr == field)
    return any(ast.unparse(side.value).split(".")[-1] in ("stack", "self") for side in sides)


@pytest.mark.parametrize(
    ("field", "modules"),
    [
        ("linears", ["stack/spec.py"]),
        ("loss", []),
        # the config that names FlashAttention-2, the kernels of a machine without GPUs, and those that compute in fp8
        ("attention", ["interop/huggingface/emit.py", "planner/predict.py", "stack/spec.py"]),
    ],
)
def test_only_listed_modules_compare_the_names_of_kernels(field: str, modules: list[str]) -> None:
    texts = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    used = re.compile(rf"\b(stack|self)\.{field}\b")
    assert (
        sorted(name for name, text in texts.items() if used.search(text) and compares(field, ast.parse(text)))
        == modules
    )


def compares_words(words: set[str], tree: ast.AST) -> bool:
    """Return whether a module compares anything with one of the words."""
    return any(
        isinstance(part, ast.Constant) and part.value in words
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        for side in (node.left, *node.comparators)
        for part in ast.walk(side)
    )


def test_no_module_compares_the_names_of_kinds_of_context_parallelism() -> None:
    """Their properties are asked of ``Layout.context_parallelism``."""
    words = set(get_args(CpKind))
    assert words == set(CONTEXT_PARALLELISMS)
    assert compares_words(words, ast.parse("layout.cp_kind in ('ring',)"))
    texts = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    named = {name: text for name, text in texts.items() if any(f'"{word}"' in text for word in words)}
    assert [name for name, text in named.items() if compares_words(words, ast.parse(text))] == []


def test_only_config_readers_compare_the_names_of_number_formats() -> None:
    """Their properties are asked of ``Recipe.number_format``."""
    assert set(get_args(Dtype)) == set(NUMBER_FORMATS)
    names = {get_recipe(name).compute for name in RECIPES}
    found = []
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if (
            re.search(r"\bcompute\b", text)
            and any(f'"{name}"' in text for name in names)
            and any(
                isinstance(side, ast.Attribute | ast.Name) and ast.unparse(side).split(".")[-1] == "compute"
                for node in ast.walk(ast.parse(text))
                if isinstance(node, ast.Compare) and compares_words(names, node)
                for side in (node.left, *node.comparators)
            )
        ):
            found.append(path.relative_to(PACKAGE).as_posix())
    # a recipe that checks itself; keys bf16 and fp16 of configs, and what torchtune has; a chip that has only fp16
    assert sorted(found) == ["interop/huggingface/emit.py", "interop/torchtune/emit.py", "job.py", "layout/remarks.py"]


def test_every_kind_of_loss_and_attention_has_facts() -> None:
    assert set(get_args(Stack.model_fields["loss"].annotation)) == set(LOSSES)
    assert set(get_args(Stack.model_fields["attention"].annotation)) == set(ATTENTIONS)


def test_only_the_engine_has_the_engines_kernels() -> None:
    facts = {name: build_stack(name).kernel_facts for name in STACKS}
    assert [name for name, fact in facts.items() if fact is FIVEFOLD] == ["fivefold"]
    assert all(fact is AUTOGRAD for name, fact in facts.items() if name != "fivefold")


def test_every_kernel_fact_differs_between_the_trainer_and_autograd() -> None:
    assert [name for name in FIVEFOLD._fields if getattr(FIVEFOLD, name) == getattr(AUTOGRAD, name)] == []

"""Functions of the package begin with verbs; accessors of records, functions of tensors and a short list do not."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.sources import list_nodes, parse_file

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fivefold"
VERBS = frozenset(
    re.findall(
        r"\w+",
        """
    abbreviate accept accumulate activate adapt add address advise agree allocate allow alternate answer append
    apply approximate ask assemble assign attach attend average backward balance beat begin bound break
    broadcast build calibrate call can capture carry cast catch change check choose cite clamp classify clean
    climb clip close coarsen collapse collect combine compare compile complete compress compute concatenate
    connect convert convolve copy correct count create cut decode decorate deduct deepcopy defer dequantize
    describe detach differentiate disable dispatch distinguish distribute divide do document draw drop dry dump
    embed emit emulate enable encode end ensure enter escape estimate evaluate examine exchange exclude exit
    expand expect explain explore export extract extrapolate factorize fetch fill filter find finish fit fix
    flatten flush fold follow format forward free freeze fuse gate gather generalize generate get group grow
    handle has hash hide hold identify import index init insert install intercept interpolate intersect invert
    is iterate join judge keep label launch lay learn leave limit linearize link list listen load locate lock
    log look lookup make map mark mask match measure merge mix move multiply name negate nest normalize note
    number observe offer omit open order orthogonalise overlap override overwrite pack pad pair parse pass peek
    permute pick place plan play plot pluralize post predict prepare price print probe profile project propagate
    propose prove prune publish put qualify quantize quarantine quote raise rank reach read reason receive
    recompute record redirect reduce refine refuse register relax remove rename render replace replay report
    request require rescale reserve resize resolve respond restore resume return reuse reword roll rotate round
    route run sample save scale scan schedule score search segment select send serve set settle shard share
    shift shorten should show shrink signal silence simulate skip slice smooth solve sort spell split spread
    square stack start step stop strip style submit substitute subtract suggest sum summarize swap sweep switch
    sync take thin tile time trace track train translate transpose trim try turn unite unmap unpack unwrap
    upcast update use validate vary verify view wait wake walk warn watch weigh widen word work wrap write zero
        """,
    )
)
PREPOSITIONS = ("with", "to", "from", "on")  # of conversions and of events: `with_ranks`, `to_frame`, `on_step_end`
DECORATORS = (  # the name is that of a command, a property, an operator or a kernel
    "accept_request", "document_parameters", "property", "setter", "override", "jit", "custom_op", "register",
    ".get(", ".post(", "handler", "validator",
)  # fmt: skip
FILES = {
    "interop/keys.py": "constructors of keys in the tables of formats, as dataclasses.field",
    "model/catalog.py": "the fields of one family of models, in the table of the catalog",
    "planner/counts/operations/op.py": "constructors of operations, named as the operator",
    "planner/counts/operations/mixers": "`operations` of every token mixer, looked up by the name of its module",
    "trainer/parallel/collectives.py": "collectives, as in torch.distributed",
    "profiling/traces/json_stream.py": "the grammar of JSON: items, keys, value",
}
NAMES = {
    "block": "a nested function: the unit of one block",
    "ceil_div": "a function of numbers, as cdiv of Triton",
    "dryrun": "a command, and the function of the public API with its name",
    "entry": "the entry point of pyproject.toml",
    "hop_during_work": "a nested function, timed as a whole",
    "lifespan": "an event handler, as FastAPI names it",
    "logits_to_gradient": "a function of tensors, which writes in place",
    "main": "the entry point of a process",
    "re_gather": "gather again",
    "repr_html": "IPython's protocol",
    "requires_extra": "a decorator, read as a fact of the function below it",
    "row": "a nested function: one row of a table",
    "shape_encoder": "the shape of an encoder, cached",
    "substitute": "the callback of re.sub",
    "text": "a nested function: the YAML of a text",
    "total": "a nested function: a sum",
    "value": "a nested function: the callback of re.sub",
}
METHODS = {"_absorbed_heads", "_axis", "_gate_output", "_norm_heads", "_stage", "_texts"}  # named by their result


def returns_tensors(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Tell whether a function returns tensors: then its name may be its result, as in ``torch.nn.functional``."""
    return node.returns is not None and any(word in ast.unparse(node.returns) for word in ("Tensor", "Cast"))


def find_nouns(node: ast.AST, *, path: str, is_class: bool = False) -> Iterator[str]:
    """Yield the functions below ``node`` that have to begin with a verb and do not."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            if is_governed(child, path=path, is_class=is_class):
                yield f"{path}: {child.name}"
            yield from find_nouns(child, path=path)
        else:
            inside = isinstance(child, ast.ClassDef) or (is_class and not isinstance(child, ast.expr))
            yield from find_nouns(child, path=path, is_class=inside)


def is_governed(node: ast.FunctionDef | ast.AsyncFunctionDef, *, path: str, is_class: bool) -> bool:
    """Tell whether a function begins with no verb and has no reason for it. Public methods may be nouns."""
    name = node.name.strip("_")
    is_special = not name or node.name.startswith("__") or (is_class and not node.name.startswith("_"))
    is_decorated = any(word in ast.unparse(item) for item in node.decorator_list for word in DECORATORS)
    is_predicate = node.returns is not None and ast.unparse(node.returns).startswith("bool")
    is_allowed = name in NAMES or node.name in METHODS or any(file in path for file in FILES)
    is_of_tensors = "/trainer/" in path and returns_tensors(node)
    first = name.partition("_")[0]
    return not (
        is_special or is_decorated or is_predicate or is_allowed or is_of_tensors or first in VERBS | {*PREPOSITIONS}
    )


@pytest.mark.slow
def test_functions_begin_with_verbs() -> None:
    nouns = []
    for file in sorted(PACKAGE.rglob("*.py")):
        nouns += find_nouns(parse_file(file), path=file.relative_to(ROOT).as_posix())
    assert nouns == []


@pytest.mark.slow
def test_every_exception_is_needed() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    functions = {
        node.name
        for file in files
        for node in list_nodes(parse_file(file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name for name in NAMES if name not in {function.strip("_") for function in functions}} == set()
    assert functions >= METHODS
    assert [part for part in FILES if not (PACKAGE / part).exists()] == []
    assert {function.strip("_").partition("_")[0] for function in functions} & VERBS == VERBS


@pytest.mark.parametrize(
    ("source", "is_reported"),
    [
        ("def seconds(): ...", True),
        ("def count_seconds(): ...", False),
        ("def needs_file() -> bool: ...", False),
        ("class A:\n    def seconds(self): ...", False),
        ("class A:\n    def _seconds(self): ...", True),
        ("class A:\n    @property\n    def _seconds(self): ...", False),
        ("def f():\n    def seconds(): ...", True),
    ],
)
def test_a_planted_noun_is_reported(source: str, is_reported: bool) -> None:
    found_names = [name.partition(": ")[2] for name in find_nouns(ast.parse(source), path="fivefold/planted.py")]
    assert ("seconds" in str(found_names)) is is_reported

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
    embed emit emulate enable encode end ensure enter escape estimate evaluate examine exchange exclude exit extend
    expand expect explain explore export expose extract extrapolate factorize fill filter find finish fit fix
    flatten flush fold follow format forward free freeze fuse gate gather generalize generate get group grow
    handle has hash hide hold identify import index init insert install intercept interpolate intersect invert
    is iterate join judge keep label launch lay learn leave limit linearize link list listen load locate lock
    log look lookup make map mark mask match measure merge mix move multiply name negate nest normalize note
    number observe offer omit open order orthogonalise overlap override overwrite pack pad pair parse pause pass peek
    permute pick place plan plot pluralize post predict prepare price print probe profile project propagate
    propose prove prune publish put qualify quantize quarantine quote raise rank reach read reason receive
    recompute record redirect reduce refine refuse register relax remove rename render replace replay report
    request require rescale reserve resize resolve respond restore resume return reuse reword roll rotate round
    route run sample save scale scan schedule score search segment select send serve set shard share
    shift shorten should show shrink signal silence simulate skip slice smooth solve sort spell split spread
    square stack start step stop strip style submit substitute subtract suggest sum summarize swap sweep switch
    sync take thin tile time trace track train translate transpose trim try turn unite unmap unpack unwrap
    upcast update use validate vary verify view wait wake walk warn watch weigh widen word work wrap write zero
        """,
    )
)
PREPOSITIONS = ("with", "to", "from", "on")  # of conversions and of events: `with_ranks`, `to_frame`, `on_step_end`
DECORATORS = {  # the last part of a decorator's name: the function is a command, a property, a route or a kernel
    "accept_request", "cached_property", "document_parameters", "exception_handler", "get", "jit", "property",
}  # fmt: skip
FILES = {  # names of one file or folder, and why they are no verbs
    "interop/keys.py": (
        {"field", "part", "unmodelled_key", "unmodelled_keys", "ignored_keys"},
        "constructors of keys in the tables of formats, as dataclasses.field",
    ),
    "planner/counts/operations/op.py": (
        {"matmul", "matmul_groups", "norm", "rope", "elementwise", "dropout"},
        "constructors of operations, named as the operator",
    ),
    "planner/counts/operations/mixers": (
        {"operations"}, "`operations` of every token mixer, looked up by the name of its module",
    ),
    "trainer/parallel/collectives.py": (
        {"all_gather", "all_reduce", "all_to_all"}, "collectives, as in torch.distributed",
    ),
    "profiling/traces/json_stream.py": ({"_keys", "_items", "_pieces", "_value"}, "the grammar of JSON"),
}  # fmt: skip
NAMES = {  # single functions, by file
    "calibration/messages.py: hop_during_work": "a nested function, timed as a whole",
    "cli/__init__.py: entry": "the entry point of pyproject.toml",
    "cli/command_line.py: main": "the entry point of a process",
    "display.py: _repr_html_": "IPython's protocol",
    "dry_run/__init__.py: dryrun": "a command, and the function of the public API with its name",
    "dry_run/record/kernels.py: total": "a nested function: a sum",
    "dry_run/report.py: _repr_html_": "IPython's protocol",
    "interop/render.py: text": "a nested function: the YAML of a text",
    "interop/shell/expand.py: value": "a nested function: the callback of re.sub",
    "layout/sharding.py: block": "a nested function: the unit of one block",
    "model/vision_weights.py: shape_encoder": "the shape of an encoder, cached",
    "planner/compare.py: row": "a nested function: one row of a table",
    "planner/counts/counts.py: _stage": "named by its result, a cached stage",
    "planner/counts/operations/attention/grouped.py: _norm_heads": "norms as a verb: the operations of norms per head",
    "profiling/watch_loop.py: _axis": "named by its result, as the axis of a group",
    "rendering/drawing/file.py: _repr_html_": "IPython's protocol",
    "rendering/drawing/file.py: _texts": "named by its result",
    "requests/extras.py: requires_extra": "a decorator, read as a fact of the function below it",
    "trainer/model/attention.py: _absorbed_heads": "named by its result, tensors in a tuple",
    "trainer/model/kernels/fused/loss.py: logits_to_gradient": "a function of tensors, which writes in place",
    "trainer/model/kernels/loss.py: logits_to_gradient": "a function of tensors, which writes in place",
    "trainer/parallel/zero.py: re_gather": "gather again",
    "units.py: ceil_div": "a function of numbers, as cdiv of Triton",
    "web/app.py: lifespan": "an event handler, as FastAPI names it",
}
SYMBOLIC = ("planner/counts/operations/symbolic.py", "planner/counts/operations/mixers/symbolic_scan.py")
TENSOR_FOLDERS = ("trainer/model/", "trainer/optimizers/", "trainer/parallel/", *SYMBOLIC)
TENSOR_TYPES = {"Tensor", "Cast", "tuple", "list", "dict", "str", "int", "Any", "Callable", "Iterator", "Sequence"}


def returns_tensors(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Tell whether a function returns tensors: then its name may be its result, as in ``torch.nn.functional``."""
    if node.returns is None:
        return False
    words = set(re.findall(r"[A-Za-z_]\w*", ast.unparse(node.returns))) - {"None"}
    return bool(words & {"Tensor", "Cast"}) and words <= TENSOR_TYPES


def is_predicate(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> bool:
    """Tell whether a function answers yes or no and is named so: ``needs_file``, ``fits``, ``are_close``."""
    first = name.partition("_")[0]
    returns_bool = node.returns is not None and ast.unparse(node.returns).startswith("bool")
    return returns_bool and (first == "are" or (first.endswith("s") and first not in NOUNS_IN_S))


NOUNS_IN_S = {"neighbours", "ranks", "layers", "bytes", "seconds"}


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
    short_path = path.removeprefix("fivefold/")
    is_decorated = not DECORATORS.isdisjoint(map(name_decorator, node.decorator_list))
    is_allowed = f"{short_path}: {node.name}" in NAMES or any(
        short_path.startswith(part) and node.name in names for part, (names, _) in FILES.items()
    )
    is_of_tensors = short_path.startswith(TENSOR_FOLDERS) and returns_tensors(node)
    is_verb = name.partition("_")[0] in VERBS | {*PREPOSITIONS}
    return not (is_special or is_decorated or is_predicate(node, name) or is_allowed or is_of_tensors or is_verb)


def name_decorator(decorator: ast.expr) -> str:
    """Return the last part of a decorator's name: ``get`` for ``@pages.get("/plan")``."""
    function = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(function).rpartition(".")[2]


@pytest.mark.slow
def test_functions_begin_with_verbs() -> None:
    nouns = []
    for file in sorted(PACKAGE.rglob("*.py")):
        nouns += find_nouns(parse_file(file), path=file.relative_to(ROOT).as_posix())
    assert nouns == []


@pytest.mark.slow
def test_every_listed_name_without_a_verb_is_still_used() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    defined = {
        (file.relative_to(PACKAGE).as_posix(), node.name): node
        for file in files
        for node in list_nodes(parse_file(file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert NAMES.keys() - {f"{file}: {name}" for file, name in defined} == set()
    for part, (names, _) in FILES.items():
        assert names - {name for file, name in defined if file.startswith(part)} == set()
    used = {name_decorator(item) for node in defined.values() for item in node.decorator_list}
    assert used >= DECORATORS
    assert {name.strip("_").partition("_")[0] for _, name in defined} & VERBS == VERBS


@pytest.mark.parametrize(
    ("source", "is_reported"),
    [
        ("def seconds(): ...", True),
        ("def count_seconds(): ...", False),
        ("def needs_file() -> bool: ...", False),
        ("def seconds() -> bool: ...", True),
        ("def seconds() -> Tensor: ...", True),
        ("@app.getter\ndef seconds(): ...", True),
        ("@pages.get('/')\ndef seconds(): ...", False),
        ("class A:\n    def seconds(self): ...", False),
        ("class A:\n    def _seconds(self): ...", True),
        ("class A:\n    @property\n    def _seconds(self): ...", False),
        ("def f():\n    def seconds(): ...", True),
    ],
)
def test_a_planted_noun_is_reported(source: str, is_reported: bool) -> None:
    found_names = [name.partition(": ")[2] for name in find_nouns(ast.parse(source), path="fivefold/planted.py")]
    assert ("seconds" in str(found_names)) is is_reported

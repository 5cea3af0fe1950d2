"""Names, docstrings and comments use the field's words: the bans are short lists, each exception has its reason."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.architecture.sources import list_nodes, parse_file, read_text
from tests.docs.prose import PATTERN

ROOT = Path(__file__).parents[2]
FOLDERS = ("fivefold", "benchmarks", "docs", "examples", "tests")
FRAGMENTS = re.compile(r"(Of|Those|As|What|Whether|Which|From|By|That|Where|How|With|For|In|At|On)\b")
BARE_NAMES = frozenset(
    [
        "told", "found", "named", "drawn", "said", "asked", "kept", "given", "held", "shown", "taken", "gone", "made",
        "met", "seen", "sought", "tried", "reached", "varied", "joined", "built", "played", "beaten", "counted",
        "measured", "of", "own", "others", "whole", "at", "each", "alike", "apart", "beside", "again", "otherwise",
        "within", "without", "amid", "after", "before", "both", "either", "near",
    ]
)  # fmt: skip
VAGUE_LOCALS = frozenset(  # words that do not say what a variable, parameter or field holds
    [
        "alike",
        "apart",
        "beside",
        "born",
        "each",
        "entire",
        "found",
        "gone",
        "heard",
        "lingers",
        "mine",
        "outof",
        "put_off",
        "said",
        "told",
        "travel",
        "unborn",
        "uncut",
        "whole",
    ]
)
VAGUE_PREFIXES = re.compile(r"(MOST|LEAST|ALIKE|SHOWN|NEAR|FAR|MANY|LATE|SOON)_\w+")
VAGUE_CONSTANTS = frozenset(
    ["MOST", "LEAST", "ALIKE", "SHOWN", "PARTS", "FREE", "NEAR", "FAR", "MANY", "FEW", "LONG", "SHORT", "LATE", "SOON"]
)
FIRST_WORDS = frozenset(  # a function does not begin with a preposition, pronoun, conjunction or adverb
    re.findall(
        r"\w+",
        """
    a about across after again against all alone along among any apart aside at away before beside both by during each
    either every few for her here his in inside instead into its just least less like many more most my near neither no
    none nor of off once one only other others otherwise our ours out outside over own per same several since so some
    such than that the their theirs then there these they this those through together toward two under until up upon
    what when where whether which while who whole whose why within without yet
        """,
    )
)
PARTICIPLE = re.compile(
    r"\w+(?:ed|ing)|built|done|drawn|found|given|gone|held|hidden|kept|known|laid|left|lost|made|met|said|seen|sent|shown|"
    r"sought|taken|told|understood|written"
)
NOUNS = {
    "embedding", "feed", "finding", "heading", "holding", "ranking", "ring", "scaling", "setting", "sharding",
    "sizing",
}  # fmt: skip
NOUNS |= {"drawing", "spacing", "speed", "timing"}
ALLOWED_FUNCTIONS = {
    "all_gather": "a collective, as in torch.distributed",
    "all_reduce": "a collective, as in torch.distributed",
    "all_to_all": "a collective, as in torch.distributed",
    "all_layers": "a cheap property: the layers of all stages of a rank",
    "deepspeed": "the name of a software",
    "in_flight_bytes": "bytes in flight, the term of NCCL and of networks",
    "out_of_memory_risk": "out of memory is the name of the error",
}
ALLOWED_CLASSES = {"PredictionCallback": "a callback of the Hugging Face Trainer, and one of Lightning"}
ALLOWED_WORDS = {"dies": "of processes, as in the documents of torchrun and Slurm"}
ALLOWED = {
    "fivefold/dry_run/record/tape.py: FREE": "an opcode of the tape, next to ALLOC, as in PyTorch's memory snapshots",
}


def find_violations(tree: ast.AST, path: str) -> Iterator[str]:
    """Yield ``path: name`` for each banned name, and ``path: name: docstring`` for each fragment."""
    for node in list_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            docstring = ast.get_docstring(node) or ""
            if FRAGMENTS.match(docstring):
                yield f"{path}: {node.name}: {docstring.splitlines()[0]}"
            if not isinstance(node, ast.ClassDef) and node.name.lstrip("_") in BARE_NAMES:
                yield f"{path}: {node.name}"
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            if node.id in VAGUE_LOCALS | VAGUE_CONSTANTS or VAGUE_PREFIXES.fullmatch(node.id):
                yield f"{path}: {node.id}"
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if node.attr.lstrip("_") in VAGUE_LOCALS:
                yield f"{path}: {node.attr}"
        elif isinstance(node, ast.arg) and node.arg in VAGUE_LOCALS:
            yield f"{path}: {node.arg}"


@pytest.mark.slow
def test_names_and_docstrings_use_standard_terms() -> None:
    violations = set()
    for file in sorted([*(ROOT / "fivefold").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]):
        path = file.relative_to(ROOT).as_posix()
        violations.update(find_violations(parse_file(file), path))
        if file.stem in BARE_NAMES:
            violations.add(f"{path}: module")
    assert violations - ALLOWED.keys() == set()
    assert set(ALLOWED) <= violations, "an exception that is not needed any more"


def list_functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the functions whose names the authors choose: neither tests nor special methods."""
    for node in list_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith(("test_", "__")):
            yield node


def find_fault(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return why a function may not have its name; "" if it may. The name of a fixture is that of its value."""
    name = node.name.lstrip("_")
    first, *rest = name.split("_")
    if name in ALLOWED_FUNCTIONS:
        return ""
    if first in FIRST_WORDS:
        return "begins with a preposition, pronoun or adverb"
    if rest or not PARTICIPLE.fullmatch(first) or first in NOUNS:
        return ""
    is_fixture = any("fixture" in ast.unparse(decorator) for decorator in node.decorator_list)
    return "" if is_fixture else "is a bare participle"


def find_shared_class_names(trees: Iterable[ast.Module]) -> set[str]:
    """Return the names that two or more classes of the files have."""
    nodes = (node for tree in trees for node in list_nodes(tree))
    counts = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    return {name for name, count in counts.items() if count > 1}


def test_a_class_name_is_used_for_one_class() -> None:
    assert find_shared_class_names(map(ast.parse, ["class A: ...", "class A: ...", "class B: ..."])) == {"A"}
    files = [file for file in list_files() if file.relative_to(ROOT).parts[0] in ("fivefold", "benchmarks")]
    shared = find_shared_class_names(map(parse_file, files))
    assert shared == set(ALLOWED_CLASSES)


def list_comments(text: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the lines of comments and docstrings, without what they quote as code."""
    documented = set()
    for node in list_nodes(tree):
        is_documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if is_documented and ast.get_docstring(node, clean=False) is not None:
            documented.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}
    for number, line in enumerate(text.splitlines(), start=1):
        comment = line if number in documented else comments.get(number, "")
        yield number, re.sub(r"``[^`]*``|`[^`]*`", "", comment)


def list_files() -> list[Path]:
    """Return the Python files of the project."""
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.slow
def test_functions_are_named_by_verbs_or_nouns() -> None:
    faults, used = [], set()
    for file in list_files():
        for node in list_functions(parse_file(file)):
            used.add(node.name.lstrip("_"))
            if fault := find_fault(node):
                faults.append(f"{file.relative_to(ROOT).as_posix()}: {node.name} {fault}")
    assert faults == []
    assert ALLOWED_FUNCTIONS.keys() - used == set(), "an exception that is not needed any more"


@pytest.mark.slow
def test_comments_use_standard_terms() -> None:
    faults = [
        f"{file.relative_to(ROOT).as_posix()}:{number}: {match[0]}"
        for file in list_files()
        if PATTERN.search(read_text(file))
        for number, comment in list_comments(read_text(file), parse_file(file))
        for match in PATTERN.finditer(comment)
        if match[0].lower() not in ALLOWED_WORDS
    ]
    assert faults == []


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("def gathered(): ...", "is a bare participle"),
        ("def _without_zero(): ...", "begins with a preposition, pronoun or adverb"),
        ("def own_bytes(): ...", "begins with a preposition, pronoun or adverb"),
        ("def gathered_bytes(): ...", ""),
        ("def heading(): ...", ""),
        ("@pytest.fixture\ndef measured(): ...", ""),
    ],
)
def test_a_planted_name_is_reported(source: str, fault: str) -> None:
    (node,) = list_functions(ast.parse(source))
    assert find_fault(node) == fault


def test_a_planted_word_is_reported() -> None:
    text = 'def f():\n    """Return ``whole`` bytes beside it."""\n    return 1  # the whole sum\n'
    comments = [comment for _, comment in list_comments(text, ast.parse(text))]
    assert [match[0] for comment in comments for match in PATTERN.finditer(comment)] == ["beside", "whole"]


@pytest.mark.parametrize(
    "source",
    [
        "def told(): ...",
        "class A:\n    def _of(self): ...",
        "MOST = 3",
        "MOST_LAYOUTS = 3",
        "class A:\n    born: int = 0",
        "def f(self):\n    self._heard = 1",
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

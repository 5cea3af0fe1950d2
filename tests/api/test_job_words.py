"""The keyword arguments that state a job are written from the records of a job and a stack.

``FIVEFOLD_FREEZE=1 python -m pytest tests/api/test_job_words.py`` writes them anew.
"""

from __future__ import annotations

import ast
import os
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from fivefold.job import Job
from fivefold.record import Record
from fivefold.requests.commands import JobOptions
from fivefold.stack.spec import FACTS, Stack

WRITTEN = Path(__file__).parents[2] / "fivefold" / "api" / "job_words.py"
HEAD = '''"""The keyword arguments that state a job, with their types, for type checkers and editors.

It is written from the records of a job and a stack by FIVEFOLD_FREEZE=1 python -m pytest tests/api/test_job_words.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from fivefold.job import Job


class JobWords(TypedDict, total=False):
    """The fields of a job. The others override ``job``, a .toml file, a mapping or a ``Job``. None: not given."""

    job: str | PathLike[str] | Mapping[str, Any] | Job | None
'''
BY_NAME = ("precision", "stack", "adapter", "optimizer")  # a record by its name or as a table
ELSEWHERE = {"job", "set"}  # stated by hand above; other fields, which are arguments here


def write_type(annotation: Any) -> str:
    """Return the source text of the type that a caller may give for a field: records as tables, tuples as sequences."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return write_type(parts[0])
    if origin in (Union, UnionType):
        return " | ".join(dict.fromkeys(map(write_type, parts)))
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, parts))}]".replace("'", '"')
    if origin is tuple:
        return f"Sequence[{write_type(parts[0])}]"
    if annotation is NoneType:
        return "None"
    return "Mapping[str, Any]" if issubclass(annotation, Record) else str(annotation.__name__)


def write_words() -> str:
    """Return the module: the options of a job, then its other fields, then those of its stack."""
    options = {name: write_type(field.annotation) for name, field in JobOptions.model_fields.items()}
    job = {name: write_type(field.annotation) for name, field in Job.model_fields.items()}
    stack = {name: write_type(field.annotation) for name, field in Stack.model_fields.items() if name in FACTS}
    types = {name: text for name, text in (stack | job | options).items() if name not in ELSEWHERE}
    for name in BY_NAME:
        types[name] = "str | Mapping[str, Any] | None"
    order = dict.fromkeys((*options, *job, *stack))
    return HEAD + "".join(f"    {name}: {types[name]}\n" for name in order if name in types)


def test_typed_job_keywords_equal_the_fields_of_the_records() -> None:
    text = write_words()
    if os.environ.get("FIVEFOLD_FREEZE"):
        WRITTEN.write_text(text, encoding="utf-8")
    written = WRITTEN.read_text(encoding="utf-8")
    assert ast.dump(ast.parse(text)) == ast.dump(ast.parse(written)), "write it anew (see above)"

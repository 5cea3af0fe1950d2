"""Document the parameters of a function of the Python API with the help texts of its request, in numpydoc form.

Its errors name these parameters, too.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeVar, get_args, get_origin

from fivefold.api.job_words import JobWords
from fivefold.errors import UserError
from fivefold.requests.commands import JobOptions
from fivefold.requests.schema import Request, describe_fields

_SETTING = re.compile(r"--set (?=[a-z_.]+=)")
_FLAG = re.compile(r"(?<![\w-])--(exact)(?![\w-])")
_VALUE = re.compile(r"(?<![\w-])--([a-z]+(?:-[a-z]+)*) (?=\d)")
_OPTION = re.compile(r"(?<![\w-])--([a-z]+(?:-[a-z]+)*)")
_COMMAND = re.compile(r"(`?fivefold (?!models`|machines`|stacks`)[a-z]+ [^;`]*)")  # to type as it stands
_CATALOG = re.compile(r"`fivefold (models|machines|stacks)`")
P = ParamSpec("P")
T = TypeVar("T")

JOB = (
    "Any other field of a job, such as loss='chunked' or optimizer={'kind': 'muon'}. ``job`` is a "
    ".toml file, a mapping or a ``Job`` with many fields at once, which the other arguments override."
)
PYTHON_FORMS = {
    "such as 2T": "such as 2e12",
    "Default: 1T": "Default: 1e12",
    "such as 8192 or 8k": "such as 8192",
    "; may be repeated": "",
    "`fivefold stacks`": "``ff.stacks()``",
}
"""Phrases of help texts in the form of the terminal, with their form in Python."""
OPTION = re.compile(r"(?<!\w)--([a-z]+(?:-[a-z]+)*)")
HEADING = re.compile(r"^(Parameters|Returns|Yields|Raises|Notes|Examples)\n-+$", flags=re.MULTILINE)
ENTRY = re.compile(r"^\*{0,2}(\w+)(?: : .*)?\n((?:    .*\n?)+)", flags=re.MULTILINE)


def document_parameters(*schemas: type[Request]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Add a section of parameters to a function's docstring: types of its signature, help texts of its request.

    A function that takes a job gets the job's options too, also in the signature that help and editors show. Entries in
    the docstring's own section win. An argument that is not one of the request's values is a ``UserError``, and every
    ``UserError`` names keyword arguments instead of options.
    """

    def document(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)
        parameters = signature.parameters
        takes_job = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
        names = {*parameters, *(JobOptions.model_fields if takes_job else ())} - {"set"}
        names -= {name for name, parameter in parameters.items() if parameter.kind is inspect.Parameter.VAR_KEYWORD}
        stated: tuple[type[Request], ...] = (JobOptions, *schemas)
        helps = {
            name: adapt_to_python(text) for schema in stated for name, text in describe_fields(schema) if name in names
        }
        summary, sections = split_sections(inspect.getdoc(function) or "")
        helps |= {name: " ".join(text.split()) for name, text in ENTRY.findall(sections.pop("Parameters", ""))}
        order = [*(name for name in parameters if name in helps), *(name for name in helps if name not in parameters)]
        entries = [write_entry(name, parameters.get(name), helps[name]) for name in order]
        entries += [f"**job\n    {JOB}"] * takes_job
        sections = {"Parameters": "\n".join(entries), **sections} if entries else sections
        parts = [f"{title}\n{'-' * len(title)}\n{text}" for title, text in sections.items()]
        keywords = {name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY}
        choices = {name: values for name, values in list_choices(schemas).items() if name in keywords}

        @wraps(function)
        def call(*args: P.args, **words: P.kwargs) -> T:
            check_choices(words, choices)
            try:
                return function(*args, **words)
            except UserError as error:
                error.args = (use_python_words(str(error)), *error.args[1:])
                raise

        call.__doc__ = "\n\n".join([summary, *parts])
        if takes_job:
            shown: Any = call
            shown.__signature__ = signature.replace(parameters=list(add_job_options(parameters.values())))
        return call

    return document


def adapt_to_python(text: str) -> str:
    """Return the help text of an option with numbers and names of arguments as Python has them."""
    for terminal, python in PYTHON_FORMS.items():
        text = text.replace(terminal, python)
    return OPTION.sub(lambda match: f"``{match[1].replace('-', '_')}``", text)


def add_job_options(parameters: Iterable[inspect.Parameter]) -> Iterator[inspect.Parameter]:
    """Yield the parameters of a function with the job's options before its ``**job``."""
    known = list(parameters)
    names = {parameter.name for parameter in known}
    for parameter in known:
        if parameter.kind is parameter.VAR_KEYWORD:
            for name in JobOptions.model_fields:
                if name in JobWords.__annotations__ and name not in names:
                    kind = JobWords.__annotations__[name]
                    text = str(getattr(kind, "__forward_arg__", kind))
                    yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=text)
        yield parameter


def split_sections(docstring: str) -> tuple[str, dict[str, str]]:
    """Return the text before the first section of a numpydoc docstring, and each section's text by its title."""
    summary, *rest = HEADING.split(docstring)
    return summary.strip(), {title: text.strip("\n") for title, text in zip(rest[::2], rest[1::2], strict=True)}


def write_entry(name: str, parameter: inspect.Parameter | None, text: str) -> str:
    """Return a numpydoc entry: name, type and default, then the help text; without ``parameter`` a field of a job."""
    kind, default = JobWords.__annotations__.get(name, ""), ", optional"
    if parameter is not None and parameter.kind is not parameter.VAR_KEYWORD:
        kind = parameter.annotation
        default = "" if parameter.default is parameter.empty else f", default {parameter.default!r}"
    kind = str(getattr(kind, "__forward_arg__", kind))
    stars = "*" if parameter is not None and parameter.kind is parameter.VAR_POSITIONAL else ""
    return (
        f"{stars}{name} : {kind}{default}\n{textwrap.fill(text, 116, initial_indent='    ', subsequent_indent='    ')}"
    )


def use_python_words(message: str) -> str:
    """Return a message, which names options and catalogs of the terminal, with keyword arguments and functions.

    raise --gbs, or use --set offload=optimizer    raise gbs, or use offload=optimizer
    `fivefold models` lists all                     ff.models() lists all
    """
    if "--" not in message and "`" not in message:
        return message
    pieces = _COMMAND.split(message)
    return "".join(piece if index % 2 else _replace_options(piece) for index, piece in enumerate(pieces))


def _replace_options(message: str) -> str:
    message = _FLAG.sub(lambda match: f"{match[1]}=True", _SETTING.sub("", message))
    message = _VALUE.sub(lambda match: f"{match[1].replace('-', '_')}=", message)
    message = _OPTION.sub(lambda match: match[1].replace("-", "_"), message)
    return _CATALOG.sub(lambda match: f"ff.{match[1]}()", message)


def list_choices(schemas: tuple[type[Request], ...]) -> dict[str, tuple[str, ...]]:
    """Return the values of each argument that has only certain ones."""
    return {
        name: get_args(field.annotation)
        for schema in schemas
        for name, field in schema.model_fields.items()
        if get_origin(field.annotation) is Literal
    }


def check_choices(arguments: Mapping[str, Any], choices: Mapping[str, tuple[str, ...]]) -> None:
    """Raise ``UserError`` for an argument that is not one of its values."""
    for name, value in arguments.items():
        if name in choices and value is not None and value not in choices[name]:
            raise UserError(f"{name}={value!r} is not one of {', '.join(map(repr, choices[name]))}")

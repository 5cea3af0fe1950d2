"""The question of a page as a command line and as Python, to copy.

    fivefold predict llama3-8b h100:8 'dp8 zero3 mbs1' --seq 8192 --gbs 64
    ff.predict("llama3-8b", "h100:8", "dp8 zero3 mbs1", seq=8192, gbs=64)

Both give the answer of the page. A model that is pasted or changed on the page is a file in them, which the page saves.
"""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from fivefold.api import functions
from fivefold.errors import UserError
from fivefold.requests.answers import OF_LAYOUT, USED_BY
from fivefold.requests.commands import (
    AskOptions,
    CompareOptions,
    DryrunOptions,
    JobRequest,
    PredictOptions,
    SearchOptions,
)
from fivefold.requests.job import FIELDS, collect_fields
from fivefold.requests.schema import Option, Request
from fivefold.requests.settings import load_settings
from fivefold.web.question import (
    ChosenQuestion,
    CompareQuestion,
    JobQuestion,
    PredictQuestion,
    SearchQuestion,
    spell_value,
)

MODEL_FILE = "model.toml"  # the model of a page that has no name
LINE = 100  # characters of a line of Python
COMMANDS: dict[str, type[Request]] = {
    "predict": PredictOptions,
    "dryrun": DryrunOptions,
    "search": SearchOptions,
    "ask": AskOptions,
    "compare": CompareOptions,
}
POSITIONAL = ("model", "machine", "machines", "layout", "question", "set")  # fields that are written without a name


class Copies(NamedTuple):
    """The texts that a page offers to copy. ``file``: the name of the model's file that both need, or empty."""

    command: str
    python: str
    file: str


def write_copies(query: JobQuestion, command: str) -> Copies:
    """Return the question as text; raises ``UserError`` if its job gives a field twice."""
    file = MODEL_FILE if _needs_file(query) else ""
    return Copies(_write_command(query, command), _write_python(query, command), file)


def _needs_file(query: JobQuestion) -> bool:
    return bool(query.config) or any(getattr(query, name) is not None for name in query.shape)


def _name_model(query: JobQuestion) -> str:
    return MODEL_FILE if _needs_file(query) else query.model


def _write_command(query: JobQuestion, command: str) -> str:
    """Return the command that answers a question of the page."""
    words = [_name_model(query), query.machine]
    if isinstance(query, CompareQuestion):
        words += [*query.machines, *query.layout]
    elif isinstance(query, SearchQuestion):
        words += query.machines
    elif isinstance(query, PredictQuestion):
        words.append(query.layout)
    elif isinstance(query, ChosenQuestion):
        words = [query.question, *words, *_list_layout(query)]
    schema = COMMANDS[command]
    options = [text for name, value in _list_options(query, schema) for text in _spell_option(schema, name, value)]
    settings = [text for setting in query.settings for text in ("--set", setting)]
    return shlex.join(["fivefold", command, *words, *options, *settings])


def _list_layout(query: ChosenQuestion) -> list[str]:
    """Return the layout if one is given and the question takes it."""
    return [query.layout] if query.layout and query.question in OF_LAYOUT else []


def _list_options(query: JobQuestion, schema: type[Request]) -> Iterator[tuple[str, Any]]:
    """Yield the fields of ``schema`` that are options and differ from its defaults, without those of ``--set``."""
    for name, field in schema.model_fields.items():
        if name not in type(query).model_fields or name in POSITIONAL:
            continue
        if isinstance(query, ChosenQuestion) and query.question not in USED_BY.get(name, (query.question,)):
            continue
        if (value := getattr(query, name)) != field.default:
            yield name, value


def _spell_option(schema: type[Request], name: str, value: Any) -> list[str]:
    """Return the command-line words of an option with ``value``."""
    field = schema.model_fields[name]
    option = next((item for item in field.metadata if isinstance(item, Option)), Option())
    flag = option.names[0] if option.names else "--" + name.replace("_", "-")
    if value is True:
        return [flag]
    if isinstance(value, tuple):
        values = [option.separator.join(value)] if option.separator else list(value)
        return [text for entry in values for text in (flag, entry)]
    return [flag, spell_value(value)]


def _write_python(query: JobQuestion, command: str) -> str:
    """Return the Python code that answers a question of the page."""
    arguments: list[Any] = [_name_model(query), query.machine]
    function, keywords = command, dict(_list_options(query, COMMANDS[command]))
    if isinstance(query, CompareQuestion):
        arguments += [*query.machines, *query.layout]
    elif isinstance(query, SearchQuestion):
        function, arguments, keywords = _name_search(query, arguments, keywords)
    elif isinstance(query, PredictQuestion):
        arguments.append(query.layout)
    elif isinstance(query, ChosenQuestion):
        arguments = [query.question, *arguments, *_list_layout(query)]
    job = {name: keywords.pop(name) for name in JobRequest.model_fields if name in keywords}
    try:
        fields = collect_fields(None, list(query.settings), **job)
    except UserError:  # a field that is given twice, as the answer says
        fields = job
    if query.reads_settings and (stack := load_settings().stack):  # functions read no settings
        fields.setdefault("stack", stack)
    if isinstance(optimizer := fields.get("optimizer"), dict) and optimizer.keys() == {"kind"}:
        fields["optimizer"] = optimizer["kind"]
    option_by_field = {name: option for option, name in FIELDS.items()}
    keywords |= {option_by_field.get(name, name): _parse_value(value) for name, value in fields.items()}
    return f"import fivefold as ff\n\nanswer = ff.{function}{_write_arguments(arguments, keywords)}"


def _name_search(
    query: SearchQuestion, arguments: list[Any], keywords: dict[str, Any]
) -> tuple[str, list[Any], dict[str, Any]]:
    """Return the function for the kind of search, its arguments, and the keywords that it takes.

    What it does not take is a setting of the machine.
    """
    function = "compare_machines" if query.compares_machines else "walk" if query.keep else "search"
    keep = keywords.pop("keep", "")
    price, memory = keywords.get("price", ()), keywords.get("memory")
    settings = f" memory={memory}" if memory and function == "compare_machines" else ""
    if price and function != "compare_machines":
        settings += f" price={price[-1].rpartition('=')[2].removesuffix('/h')}"
    machines = [machine + settings for machine in (query.machine, *query.machines)]
    taken = (*inspect.signature(getattr(functions, function)).parameters, *JobRequest.model_fields)
    keywords = {name: value for name, value in keywords.items() if name in taken}
    if function == "compare_machines":
        return function, [arguments[0], machines], keywords
    return function, [arguments[0], machines[0], *([keep] if keep else [])], keywords


def _parse_value(value: Any) -> Any:
    """Return a value of ``--set``, which is text, as the number or truth that it spells."""
    if isinstance(value, dict):
        return {key: _parse_value(item) for key, item in value.items()}
    if not isinstance(value, str):
        return value
    if value in ("true", "false"):
        return value == "true"
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def _write_arguments(arguments: Sequence[Any], keywords: dict[str, Any]) -> str:
    """Return a list of arguments in brackets, on one line if it is short."""
    words = [*map(_write_value, arguments), *(f"{name}={_write_value(value)}" for name, value in keywords.items())]
    line = f"({', '.join(words)})"
    return line if len(line) <= LINE else "(\n" + "".join(f"    {word},\n" for word in words) + ")"


def _write_value(value: Any) -> str:
    """Return a value as a formatter of Python writes it."""
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_write_value, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_write_value(key)}: {_write_value(item)}" for key, item in value.items()) + "}"
    text = spell_value(value) if isinstance(value, float) and value >= 1e6 else repr(value)
    return f'"{text[1:-1]}"' if text.startswith("'") and '"' not in text else text

"""Turns the fields of a request schema into the parameters from which typer makes arguments and options."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin

import typer
from annotated_types import Ge, Le
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from fivefold.cli import completion
from fivefold.requests.commands import ConfigOptions, JobOptions, MachineRequest, SearchRequest
from fivefold.requests.schema import Argument, Option, Request
from fivefold.requests.words import split_list

RECORDS = ("model", "machine", "layout")  # arguments that a config may replace
COMPARES_MACHINES = ("tokens", "deadline", "gpu_counts", "price", "assume")  # options of a search of several machines
JOB_PANELS = {
    "trace": "With --against",
    "explain": "With --against",
    "calibrate": "With --for",
}  # commands that take a job only with an option
Asked = TypeVar("Asked", bound=Request)
Mark = TypeVar("Mark", Argument, Option)


def make_parameters(schema: type[Request]) -> Iterator[inspect.Parameter]:
    """Yield the parameters from which typer makes the arguments, in their order, and the options of a command."""
    fields = schema.model_fields
    places = {name: argument.place for name in fields if (argument := _find(fields[name], Argument)) is not None}
    arguments = sorted(places, key=lambda name: places[name])
    for name in (*arguments, *(name for name in fields if name not in places)):
        in_config = name in RECORDS and issubclass(schema, ConfigOptions)
        in_settings = name == "machine" and issubclass(schema, MachineRequest)
        panel = _find_panel(name, schema)
        yield make_parameter(name, fields[name], optional=in_config or in_settings, panel=panel)


def list_options(schema: type[Request]) -> set[str]:
    """Return the names of the options of a command, such as ``--seq``."""
    options: set[str] = set()
    for name, field in schema.model_fields.items():
        if _find(field, Argument) is None:
            options.update((_find(field, Option) or Option()).names or (f"--{name.replace('_', '-')}",))
    return options


def _find_panel(name: str, schema: type[Request]) -> str | None:
    """Return the group of an option on the help page; None for the main one."""
    if name in COMPARES_MACHINES and issubclass(schema, SearchRequest):
        return "Comparing machines"
    if name in JobOptions.model_fields and schema.command in JOB_PANELS:
        return JOB_PANELS[schema.command]
    return None


def make_parameter(
    name: str, field: FieldInfo, *, optional: bool = False, panel: str | None = None
) -> inspect.Parameter:
    """Make the parameter of one field.

    ``optional``: an argument that a config or setting may replace; ``panel``: group of options on the help page.
    """
    kind, default = _strip_constraints(field.annotation), field.default
    argument, option = _find(field, Argument), _find(field, Option) or Option()
    if option.separator:
        kind, default = str, ""
    elif _is_list(field.annotation):
        entries: Any = list[get_args(kind)[0]]  # type: ignore[misc]
        kind, default = (entries, default) if field.is_required() else (entries | None, None)
    elif optional:
        kind, default = kind | None, None
    settings: dict[str, Any] = {"help": field.description}
    if argument is not None and name == "machine" and optional:
        settings["help"] = f"{field.description} Default: the machine set with `fivefold config`."
    for bound in field.metadata:
        settings |= {"min": bound.ge} if isinstance(bound, Ge) else {"max": bound.le} if isinstance(bound, Le) else {}
    form = argument or option
    if isinstance(default, float) and default >= 1e12:  # tokens, as a user writes them
        shown = f"{default / 1e12:g}T"
        settings["show_default"], default = (True, shown) if option.parser else (shown, default)
    settings |= {"autocompletion": getattr(completion, form.completion)} if form.completion else {}
    metavar = form.metavar
    if argument is not None and not metavar:  # in brackets if neither the user nor a config has to give it
        metavar = name.upper() if field.is_required() else f"[{name.upper()}]"
    settings |= {"metavar": metavar} if metavar else {}
    settings |= {"parser": form.parser} if form.parser else {}
    if argument is None:
        settings |= {"rich_help_panel": panel} if panel else {}
        info = typer.Option(*(option.names or (f"--{name.replace('_', '-')}",)), **settings)
    else:
        info = typer.Argument(**settings)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        annotation=Annotated[kind, info],
        default=inspect.Parameter.empty if default is PydanticUndefined else default,
    )


def _find(field: FieldInfo, kind: type[Mark]) -> Mark | None:
    """Return the metadata of one kind of a field; None if it has none."""
    return next((mark for mark in reversed(field.metadata) if isinstance(mark, kind)), None)


def _is_list(annotation: Any) -> bool:
    """Tell whether a field holds any number of entries."""
    return get_origin(annotation) is tuple and Ellipsis in get_args(annotation)


def _strip_constraints(annotation: Any) -> Any:
    """Return a type without pydantic's constraints."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _strip_constraints(parts[0])
    if origin in (Union, UnionType):
        return functools.reduce(operator.or_, map(_strip_constraints, parts))
    if origin is tuple:
        plain: Any = tuple(part if part is Ellipsis else _strip_constraints(part) for part in parts)
        return tuple[plain]
    return annotation


def build_request(schema: type[Asked], values: dict[str, Any]) -> Asked:
    """Build the request from the values that typer has validated."""
    fields = {name: _convert_value(schema.model_fields[name], value, name=name) for name, value in values.items()}
    return cast("Asked", schema.model_construct(None, **fields))


def _convert_value(field: FieldInfo, value: Any, *, name: str) -> Any:
    """Return a value as the field stores it: a list, given as entries or as one text, becomes a tuple."""
    option = _find(field, Option)
    if option is not None and option.separator:
        return split_list(value, option=f"--{name}")
    return tuple(value or ()) if _is_list(field.annotation) else value

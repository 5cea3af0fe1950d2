"""A field of a request schema is an option, a query parameter and a parameter of the Python API, with one help text."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import typer
from pydantic import Field
from rich.markup import render
from typer.main import get_command
from typer.testing import CliRunner

import fivefold as ff
from fivefold.api import functions as api_functions
from fivefold.api.documentation import document_parameters
from fivefold.cli import app
from fivefold.cli.parameters import build_request, make_parameters
from fivefold.cli.request_options import accept_request
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.requests import commands
from fivefold.requests.commands import ConfigOptions, JobRequest, SearchRequest
from fivefold.requests.schema import Request

SCHEMAS = [item for name, item in vars(commands).items() if name.endswith("Options")]
HERE: dict[str, Any] = {"Model": Model, "Machine": Machine}
# Each command with its schema, its schema on a terminal, and the functions that are the command in Python.
COMMANDS: dict[str, tuple[type[Request], type[Request], tuple[Callable[..., Any], ...]]] = {
    "predict": (commands.PredictRequest, commands.PredictOptions, (ff.predict,)),
    "dryrun": (commands.DryrunRequest, commands.DryrunOptions, (ff.dryrun,)),
    "search": (commands.SearchRequest, commands.SearchOptions, (ff.search, ff.walk, ff.compare_machines)),
    "ask": (commands.AskRequest, commands.AskOptions, (ff.ask,)),
    "compare": (commands.CompareRequest, commands.CompareOptions, (ff.compare,)),
    "sweep": (commands.SweepRequest, commands.SweepOptions, (ff.sweep,)),
    "trace": (commands.TraceRequest, commands.TraceOptions, (ff.trace,)),
    "train": (commands.TrainRequest, commands.TrainOptions, (ff.train,)),
    "plan": (commands.PlanRequest, commands.PlanOptions, (ff.plan,)),
}
# Parameters under a name of their own: a walk begins at its layout; across takes all machines in one list.
RENAMED = {
    ("walk", "layout"): "keep",
    ("compare_machines", "machines"): "machines",
    ("compare", "what"): "words",
    ("sweep", "what"): "file",
}
TYPED = {("dryrun", "ranks")}  # text of numbers on the command line, and numbers in Python


def differences(schema: type[Request], options: type[Request], functions: Sequence[Callable[..., Any]]) -> list[str]:
    """In what the signatures of ``functions`` are not the fields of ``schema``, and of ``options`` those they take."""
    results, taken = [], set(JobRequest.model_fields)
    for function in functions:
        stated = {name: kind for name, kind in function.__annotations__.items() if name != "return"}
        hints = get_type_hints(SimpleNamespace(__annotations__=stated), {**vars(api_functions), **_records(), **HERE})
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD or name not in stated:  # an option of the job
                continue
            field = RENAMED.get((function.__name__, name), name)
            taken.add(field)
            if field not in options.model_fields:
                results.append(f"{function.__name__}: {name} is no field")
                continue
            said = options.model_fields[field]
            typed = (function.__name__, name) in TYPED
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not typed and parameter.default != said.default:
                results.append(f"{function.__name__}: {name}={parameter.default!r} instead of {said.default!r}")
            ours, theirs = _kinds(hints[name]), _kinds(said.annotation)
            if not typed and field == name and not _agree(ours, theirs):
                results.append(f"{function.__name__}: {name} is {ours}, not {theirs}")
    return results + [f"{name} is not taken" for name in schema.model_fields if name not in taken]


def _records() -> dict[str, Any]:
    """What the signatures name only for type checkers."""
    names: dict[str, Any] = {"Sequence": Sequence, "PathLike": PathLike}
    source = inspect.getsource(api_functions).partition("if TYPE_CHECKING:\n")[2].partition("\n\n")[0]
    for line in source.splitlines():
        module, _, imported = line.strip().removeprefix("from ").partition(" import ")
        for name, _, alias in (item.partition(" as ") for item in imported.split(", ")):
            names[alias or name] = getattr(importlib.import_module(module), name)
    return names


def _kinds(annotation: Any) -> set[Any]:
    """The members of a union, as far as words say them: records and files are named by text."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kinds(parts[0])
    if origin in (Union, UnionType):
        return set().union(*map(_kinds, parts))
    if origin is Literal:
        return set(parts)
    if origin in (tuple, Sequence) or getattr(origin, "__name__", "") == "Sequence":
        return {("list of", frozenset(_kinds(parts[0])))}
    if annotation in (Path, PathLike) or origin is PathLike or getattr(annotation, "__module__", "").endswith("spec"):
        return {str}
    return {annotation}


def _agree(ours: set[Any], theirs: set[Any]) -> bool:
    """Whether all that the schema takes is taken; functions that share a command have each a part of a Literal."""
    return ours >= theirs or (all(isinstance(item, str) for item in ours) and ours < theirs)


@pytest.mark.parametrize("command", COMMANDS)
def test_signatures_are_those_of_the_schema(command: str) -> None:
    assert differences(*COMMANDS[command]) == []


@pytest.mark.parametrize("command", commands.COMMANDS)
def test_every_option_is_a_field_of_its_request_and_has_help(command: str) -> None:
    group: Any = get_command(app)
    options = commands.COMMANDS[command]
    assert {item.name for item in group.commands[command].params} == set(options.model_fields)
    assert [name for name, field in options.model_fields.items() if not field.description] == []


def test_a_new_request_field_becomes_an_option_and_a_query_parameter() -> None:
    """It is an option with its bounds and default, a query parameter, and missed in a signature without it."""

    class Coloured(SearchRequest):
        colours: Annotated[int, Field(ge=1, le=9, description="How many colours to try.")] = 3
        shades: Annotated[tuple[str, ...], Field(description="Shades to try.")] = ()

    class ColouredOptions(Coloured, ConfigOptions):
        pass

    asked: list[ColouredOptions] = []

    @accept_request(ColouredOptions)
    def paint(request: ColouredOptions) -> None:
        asked.append(request)

    terminal = typer.Typer()
    terminal.command()(paint)
    runner = CliRunner()
    usage = runner.invoke(terminal, ["--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    assert "--colours" in usage
    assert "How many colours to try." in usage
    assert runner.invoke(terminal, ["--colours", "10", "tiny", "h100:2"]).exit_code == 2
    assert runner.invoke(terminal, ["--shades", "a", "--shades", "b", "tiny", "h100:2"]).exception is None
    assert (asked[0].colours, asked[0].shades) == (3, ("a", "b"))

    assert "colours is not taken" in differences(Coloured, ColouredOptions, COMMANDS["search"][2])

    @document_parameters(Coloured)
    def paint_all(*, colours: int = 3) -> None:
        """Paint."""

    assert "colours : int, default 3\n    How many colours to try." in (paint_all.__doc__ or "")


def test_a_new_field_is_a_query_parameter() -> None:
    fastapi = pytest.importorskip("fastapi")
    from fivefold.web.question import JobQuestion

    class Coloured(SearchRequest):
        colours: Annotated[int, Field(ge=1, le=9, description="How many colours to try.")] = 3

    class ColouredQuestion(JobQuestion, Coloured, defer_build=False):
        pass

    def paint(asked: Any) -> int:
        return int(asked.colours)

    paint.__annotations__["asked"] = Annotated[ColouredQuestion, fastapi.Query()]
    page = fastapi.FastAPI()
    page.get("/paint")(paint)
    stated = {item["name"]: item for item in page.openapi()["paths"]["/paint"]["get"]["parameters"]}
    assert stated["colours"]["description"] == "How many colours to try."
    assert stated["colours"]["schema"]["maximum"] == 9
    assert stated["by"]["description"] == SearchRequest.model_fields["by"].description


def test_an_address_of_the_web_page_writes_tokens_as_they_are_read() -> None:
    pytest.importorskip("fastapi")
    from fivefold.web.question import SearchQuestion

    asked = SearchQuestion.model_validate({"tokens": "2T", "price": ["", "2.2"], "risk": "0.1"})
    assert asked.url("/search") == "/search?risk=0.1&tokens=2T&price=2.2"
    assert SearchQuestion.model_validate({"tokens": "2e12", "price": ["2.2"], "risk": 0.1}) == asked


def test_list_options_that_were_not_given_are_empty() -> None:
    request = build_request(commands.SearchOptions, {"price": None, "also": ["fp8"]})
    assert (request.price, request.also, request.by) == ((), ("fp8",), "time")
    names = [parameter.name for parameter in make_parameters(commands.AskOptions)]
    assert names[:4] == ["question", "model", "machine", "layout"]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.__name__)
def test_a_help_text_is_shown_in_full(schema: type[Request]) -> None:
    """The terminal prints help as markup of rich, which would take ``[data]`` as the name of a style and drop it."""
    for name, field in schema.model_fields.items():
        assert render(field.description or "").plain == (field.description or ""), name

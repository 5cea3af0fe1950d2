"""Commands as tools for coding assistants: each with the schema of its request, answered as the command prints it.

Input that names files to write is left out of the schemas; ``write`` may write below a folder if the user allows it.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import anyio
import anyio.to_thread
from mcp import types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from pydantic import Field

from fivefold.cli.errors import run_with_exit_code
from fivefold.errors import UserError
from fivefold.requests.commands import (
    COMMANDS,
    AskedQuestion,
    AskRequest,
    CompareRequest,
    JobRequest,
    PredictRequest,
    SearchRequest,
)
from fivefold.requests.fields import ConfigModel, ConfigTarget, Line, Lines, ModelName, ShownLayouts
from fivefold.requests.schema import Option, Request, make_field
from fivefold.spelling import make_unknown_name_error
from fivefold.version import __version__

INSTRUCTIONS = (
    "Fivefold plans the training step of large language models: memory, FLOPs, communication and time of a layout, "
    "without a GPU. Models are catalog names (llama3-8b) or paths of a config.json, machines are h100:64, layouts are "
    "keywords such as 'dp8 tp8 zero1 mbs1 ac=selective'. Ask `search` for the best layouts, `predict` for one of them, "
    "`ask` for what fits, `explain` for why a run failed, `read` and `write` for configs of other trainers. An error "
    "is one line that says how to fix it."
)
MAX_SHOWN = 50  # layouts in one answer
TEXT_WIDTH = 160  # columns of a table as text
AnswerForm = Annotated[
    Literal["text", "json"],
    Field(description="text: the tables that people read. json: all data, as `fivefold schema COMMAND` describes."),
]


class PredictInput(PredictRequest):
    """The input of the tool ``predict``."""

    answer: AnswerForm = "text"


class SearchInput(SearchRequest):
    """The input of the tool ``search``."""

    top: Annotated[ShownLayouts, Field(le=MAX_SHOWN)] = 10
    answer: AnswerForm = "text"


class CompareInput(CompareRequest):
    """The input of the tool ``compare``: every layout on every machine."""

    model: ModelName
    machines: Lines = make_field(..., "Machines, such as h100:64.", min_length=1)
    layouts: Lines = make_field(..., "Layouts, such as 'dp8 tp8 zero1 mbs1'.", min_length=1)
    answer: AnswerForm = "text"


class AskInput(AskRequest):
    """The input of the tool ``ask``."""

    question: AskedQuestion = make_field(..., "The question.")
    answer: AnswerForm = "text"


class ExplainInput(JobRequest):
    """The input of the tool ``explain``."""

    files: Lines = make_field(
        ..., "Logs, memory snapshots, flight recorder dumps, stack traces, or their folder.", min_length=1
    )
    against: tuple[str, str, str] | None = make_field(
        None, "Model, machine and layout: compare with the prediction, and find a change that fits."
    )
    answer: AnswerForm = "text"


class ReadInput(Request):
    """The input of the tool ``read``."""

    words: Lines = make_field(..., "A config, a script, or the words of a launch command of any trainer.", min_length=1)
    machine: ConfigTarget = None
    model: ConfigModel = None
    vocab: int | None = make_field(None, "Vocabulary size, if the config has none.", ge=1)
    answer: AnswerForm = "text"


class WriteInput(JobRequest):
    """The input of the tool ``write``."""

    layout: Line = make_field(..., "A layout, or the path of a run file or of any config to translate.")
    to: Line = make_field(..., "Format to write, such as torchtitan, megatron, deepspeed or accelerate.")
    model: ConfigModel = None
    machine: ConfigTarget = None


class WriteFileInput(WriteInput):
    """The input of the tool ``write`` where the user allows it to write files."""

    output: Line | None = make_field(None, "File or folder to write, below the server's folder. Default: show it.")


class CommandTool(NamedTuple):
    """A command as a tool: its name, the request that it takes, and what it does in a few sentences."""

    name: str
    request: type[Request]
    description: str
    is_read_only: bool = True


def list_tools(*, writes: bool) -> list[CommandTool]:
    """Return the tools; ``writes``: the tool ``write`` may also write files."""
    inputs: dict[str, type[Request]] = {
        "predict": PredictInput,
        "search": SearchInput,
        "compare": CompareInput,
        "ask": AskInput,
        "explain": ExplainInput,
        "read": ReadInput,
        "write": WriteFileInput if writes else WriteInput,
    }
    return [
        CommandTool(name, schema, _describe(name), is_read_only=not (writes and name == "write"))
        for name, schema in inputs.items()
    ]


def _describe(name: str) -> str:
    """Return the help of a command in one paragraph."""
    return " ".join((_get_command(name).__doc__ or "").split())


def _get_command(name: str) -> Callable[..., None]:
    command: Callable[..., None] = getattr(import_module(f"fivefold.cli.commands.{name}"), name)
    return command


class ToolAnswer(NamedTuple):
    """The answer of a tool: text, its data if JSON was asked for, and whether it is an error."""

    text: str
    data: dict[str, Any] | None = None
    is_error: bool = False


def call_tool(name: str, arguments: Mapping[str, Any], *, folder: Path, writes: bool) -> ToolAnswer:
    """Answer one call as the command does; a user error is an answer of one line.

    ``folder``: paths of files to write lead below it. Output goes through ``sys.stdout``, so calls must not overlap.
    """
    printed, notes = io.StringIO(), io.StringIO()
    wants_json = False

    def answer() -> None:
        nonlocal wants_json
        tools = {tool.name: tool for tool in list_tools(writes=writes)}
        if name not in tools:
            raise make_unknown_name_error(name, list(tools), kind="tool")
        request = tools[name].request.read(dict(arguments), origin=name)
        wants_json = getattr(request, "answer", "") == "json"
        _get_command(name)(**_spell_values(name, request, folder=folder))

    with redirect_stdout(printed), redirect_stderr(notes), _widen_tables():
        code = run_with_exit_code(answer)
    text, lines = printed.getvalue().strip(), notes.getvalue().strip()
    if code:
        return ToolAnswer("\n".join(filter(None, (text, lines))), is_error=True)
    if wants_json:
        values = json.loads(text)
        return ToolAnswer(text, values if isinstance(values, dict) else {"answers": values})
    return ToolAnswer("\n\n".join(filter(None, (text, lines))))


def _spell_values(name: str, request: Request, *, folder: Path) -> dict[str, Any]:
    """Return the arguments and options of the command, as typer passes them, from a tool's request."""
    given = dict(request)
    wants_json = given.pop("answer", "") == "json"
    if isinstance(request, CompareInput):
        given["words"] = (given.pop("model"), *given.pop("machines"), *given.pop("layouts"))
    if isinstance(request, WriteInput):
        given["what"] = given.pop("layout")
    if isinstance(request, ReadInput | WriteInput):
        given["gpus"] = given.pop("machine")
    if isinstance(request, ExplainInput):
        given["files"] = tuple(map(Path, request.files))
    if isinstance(request, WriteFileInput) and request.output is not None:
        given["output"] = _place_output(request.output, folder)
    values = {}
    for field_name, field in COMMANDS[name].model_fields.items():
        value = given.get(field_name, field.default)
        separators = [mark.separator for mark in field.metadata if isinstance(mark, Option) and mark.separator]
        values[field_name] = separators[0].join(value) if separators else value
    return values | ({"as_json": wants_json} if "as_json" in values else {})


@contextmanager
def _widen_tables() -> Iterator[None]:
    """Give tables room for all their columns: what they print is no terminal, where a narrow one leaves some out."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(TEXT_WIDTH)
    try:
        yield
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


def _place_output(text: str, folder: Path) -> Path:
    """Return the path to write; raises ``UserError`` if it is not below ``folder`` or is there already."""
    path = (folder / text).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise UserError(f"output {text!r} is outside of the folder of this server, {folder}; name a file below it")
    if path.exists():
        raise UserError(f"output {text!r} already exists; name another, or ask the user to remove it")
    return path


def make_server(folder: Path, *, writes: bool) -> Any:
    """Make the server of the tools; ``writes``: the tool ``write`` may write files below ``folder``."""
    lock = anyio.Lock()  # answers go through sys.stdout, one after the other

    async def on_list_tools(context: Any, parameters: Any) -> Any:
        tools = [
            types.Tool(
                name=tool.name,
                description=tool.description,
                input_schema=tool.request.model_json_schema(),
                annotations=types.ToolAnnotations(
                    read_only_hint=tool.is_read_only,
                    destructive_hint=False,
                    idempotent_hint=True,
                    open_world_hint=False,
                ),
            )
            for tool in list_tools(writes=writes)
        ]
        return types.ListToolsResult(tools=tools)

    async def on_call_tool(context: Any, parameters: Any) -> Any:
        def answer() -> Any:
            return call_tool(parameters.name, parameters.arguments or {}, folder=folder, writes=writes)

        async with lock:
            reply = await anyio.to_thread.run_sync(answer)
        return types.CallToolResult(
            content=[types.TextContent(type="text", text=reply.text)],
            structured_content=reply.data,
            is_error=reply.is_error,
        )

    return Server(
        "fivefold",
        version=__version__,
        instructions=INSTRUCTIONS,
        on_list_tools=on_list_tools,
        on_call_tool=on_call_tool,
    )


def serve(folder: Path, *, writes: bool) -> None:
    """Serve the tools until the client closes stdin."""

    async def run() -> None:
        server = make_server(folder, writes=writes)
        async with stdio_server() as (incoming, outgoing):
            await server.run(incoming, outgoing, server.create_initialization_options())

    anyio.run(run)

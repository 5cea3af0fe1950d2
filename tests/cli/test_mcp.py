"""``fivefold mcp`` by the official SDK's client: tools, schemas, answers as the commands', errors, and no writes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import fivefold as ff
from fivefold.requests.output_schemas import write_schema
from tests.cli.commands import run
from tests.event_loop import run_in_thread
from tests.forked_python import true_interpreters

# Each worker of the tests imports this file: the SDK is imported where one of them runs.
pytestmark = pytest.mark.skipif(find_spec("mcp") is None, reason="the SDK is missing: pip install 'fivefold[mcp]'")

JOB = {"gbs": 16, "seq": 512}
WORDS = ("--gbs", "16", "--seq", "512")
LAYOUT = "dp8 zero3 mbs1"
STEP = {"model": "nano", "machine": "h100:8", "layout": LAYOUT, **JOB}
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB"


def serve(ask: Callable[[Any], Awaitable[Any]], folder: Path, *, writes: bool = False) -> Any:
    """What ``ask`` returns of a client that is connected to the server within this process."""
    import anyio
    import mcp

    from fivefold.cli.tools import make_server

    async def talk() -> Any:
        async with mcp.Client(make_server(folder, writes=writes)) as client:
            return await ask(client)

    return run_in_thread(anyio.run, talk)


def call(folder: Path, name: str, *, writes: bool = False, **arguments: Any) -> Any:
    return serve(lambda client: client.call_tool(name, arguments), folder, writes=writes)


@pytest.mark.slow
def test_tools_have_the_schemas_of_the_requests(tmp_path: Path) -> None:
    tools = {tool.name: tool for tool in serve(lambda client: client.list_tools(), tmp_path).tools}
    assert [*tools] == ["predict", "search", "compare", "ask", "explain", "read", "write"]
    for tool in tools.values():
        jsonschema.Draft202012Validator.check_schema(tool.input_schema)
        assert tool.annotations.read_only_hint
        assert len(tool.description) > 40
        fields = tool.input_schema["properties"]
        assert [name for name, field in fields.items() if not field.get("description")] == []
        assert not {"output", "charts", "chart", "trace", "measure", "out"} & set(fields)
    predict = tools["predict"].input_schema
    assert predict["required"] == ["model", "machine", "layout"]
    assert {"model", "machine", "layout"} <= tools["write"].input_schema["properties"].keys()
    assert predict["properties"]["seq"]["description"] == "Tokens per sequence, such as 8192 or 8k. Default: 4096."
    assert sum(len(json.dumps(tool.input_schema)) for tool in tools.values()) < 30_000  # an assistant reads all of it


@pytest.mark.slow
def test_answers_are_those_of_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
        ("predict", STEP, ("predict", "nano", "h100:8", LAYOUT)),
        ("search", {"model": "nano", "machine": "h100:8", "top": 2, **JOB}, ("search", "nano", "h100:8", "--top", "2")),
        ("ask", {"question": "micro-batch", **STEP}, ("ask", "micro-batch", "nano", "h100:8", LAYOUT)),
        (
            "compare",
            {"model": "nano", "machines": ["h100:8"], "layouts": [LAYOUT], "precisions": ["bf16", "fp8"], **JOB},
            ("compare", "nano", "h100:8", LAYOUT, "--precisions", "bf16,fp8"),
        ),
    ]
    for name, arguments, words in asked:
        got = call(tmp_path, name, answer="json", **arguments)
        assert not got.is_error, got.content
        assert run(monkeypatch, *words, *WORDS, "--json") == 0
        wanted = json.loads(capsys.readouterr().out)
        data = got.structured_content
        jsonschema.Draft202012Validator(write_schema(name)).validate(data.get("answers", data))
        for values in (data, wanted):
            if isinstance(values, dict):
                values.pop("seconds", None)
        assert data == (wanted if isinstance(wanted, dict) else {"answers": wanted})
    text = call(tmp_path, "predict", **STEP)
    assert text.structured_content is None
    assert "step time" in text.content[0].text
    assert len(text.content[0].text) < 8000
    table = call(tmp_path, "ask", question="finetune", model="nano", machine="h100:8").content[0].text
    assert "with driver" in table
    assert "too narrow to show" not in table


def test_a_user_error_is_a_one_line_error(tmp_path: Path) -> None:
    for name, arguments, line in (
        ("predict", STEP | {"layout": "dp8 tp3"}, "tp"),
        ("predict", STEP | {"model": "lama3-8b"}, "did you mean llama3-8b"),
        ("predict", {"model": "nano"}, "predict: missing: machine, layout"),
        ("predict", STEP | {"charts": "here"}, "unknown key 'charts'"),
        ("search", {"model": "nano", "machine": "h100:8", "top": 5000}, "top must be 50 or less"),
        ("train", {}, "unknown tool 'train'"),
    ):
        got = call(tmp_path, name, **arguments)
        assert got.is_error
        assert line in got.content[0].text
        assert "\n" not in got.content[0].text


def test_the_tools_explain_read_and_write_answer(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text(OOM + "\n", encoding="utf-8")
    explained = call(tmp_path, "explain", files=[str(log)], answer="json").structured_content
    assert explained["explanations"]
    asked = {"model": "nano", "machine": "h100:8", "layout": "dp8 zero1 mbs1"}  # by the names of the other tools
    written = call(tmp_path, "write", to="megatron", **asked, **JOB)
    assert "--micro-batch-size" in written.content[0].text
    script = tmp_path / "run.sh"
    script.write_text(written.content[0].text.split("\n\nfivefold:")[0], encoding="utf-8")
    read = call(tmp_path, "read", words=[str(script)], machine="h100:8", answer="json")
    assert not read.is_error, read.content
    assert read.structured_content["layout"]["dp"] == 8


def test_nothing_is_written_unless_allowed(tmp_path: Path) -> None:
    words = {"layout": "dp8 zero1 mbs1", "to": "megatron", "model": "nano", **JOB}
    assert "unknown key 'output'" in call(tmp_path, "write", output="run.sh", **words).content[0].text
    assert [*tmp_path.iterdir()] == []
    tools = serve(lambda client: client.list_tools(), tmp_path, writes=True).tools
    assert [tool.name for tool in tools if not tool.annotations.read_only_hint] == ["write"]
    outside = call(tmp_path, "write", writes=True, output="../run.sh", **words)
    assert outside.is_error
    assert "outside of the folder" in outside.content[0].text
    assert not call(tmp_path, "write", writes=True, output="run.sh", **words).is_error
    first = (tmp_path / "run.sh").read_text(encoding="utf-8")
    assert "--micro-batch-size" in first
    again = call(tmp_path, "write", writes=True, output="run.sh", **(words | {"layout": "dp4 tp2 zero1 mbs1"}))
    assert again.is_error
    assert (tmp_path / "run.sh").read_text(encoding="utf-8") == first


def test_answers_list_the_settings_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert run(monkeypatch, "config", "set", "stack", "torchtitan") == 0
    got = call(tmp_path, "predict", **STEP, answer="json").structured_content
    assert got["settings"]["stack"] == got["job"]["stack"]["name"] == "torchtitan"


def test_the_command_speaks_the_protocol_and_ends_with_its_client(tmp_path: Path) -> None:
    """A process of its own, as an assistant starts it: nothing but the protocol on stdout, calls side by side."""
    import anyio
    import mcp
    from mcp.client.stdio import stdio_client

    parameters = mcp.StdioServerParameters(
        command=sys.executable,
        args=["-m", "fivefold", "mcp"],
        cwd=str(tmp_path),
        env={**os.environ, "PYTHONPATH": str(Path(ff.__file__).parents[1])},
    )

    async def talk() -> list[Any]:
        answers: list[Any] = [None, None]
        async with mcp.Client(stdio_client(parameters, errlog=sys.__stderr__)) as client:
            assert client.server_info.name == "fivefold"

            async def ask(place: int, layout: str) -> None:
                arguments = STEP | {"layout": layout, "answer": "json"}
                answers[place] = (await client.call_tool("predict", arguments)).structured_content

            async with anyio.create_task_group() as group:
                group.start_soon(ask, 0, LAYOUT)
                group.start_soon(ask, 1, "dp4 tp2 zero1 mbs1")
        return answers

    with true_interpreters():
        answers = run_in_thread(anyio.run, talk)
    for answer, layout in zip(answers, (LAYOUT, "dp4 tp2 zero1 mbs1"), strict=True):
        assert answer == ff.predict("nano", "h100:8", layout, **JOB).model_dump(mode="json")


def test_without_the_mcp_package_the_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    monkeypatch.delitem(sys.modules, "fivefold.cli.tools", raising=False)
    assert run(monkeypatch, "mcp") == 2
    assert "pip install 'fivefold[mcp]'" in capsys.readouterr().err

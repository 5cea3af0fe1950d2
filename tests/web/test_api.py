from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from typer.main import get_command
from typer.testing import CliRunner

from fivefold.cli import app as cli
from fivefold.errors import UserError
from fivefold.requests import playbook
from fivefold.units import show_bytes
from fivefold.web import worker
from fivefold.web.question import AskQuestion, JobQuestion, PlaybookQuestion, RatiosQuestion, SearchQuestion
from tests.selection import mark_share
from tests.web.conftest import OWN

CASES = [
    (["llama3-8b", "h100:8", "dp8 zero3 mbs1", "--seq", "8192", "--gbs", "64"],
     {"model": "llama3-8b", "machine": "h100:8", "layout": "dp8 zero3 mbs1", "seq": 8192, "gbs": 64}),
    (["qwen3-30b-a3b", "h200:16 nic=100Gbit/node", "tp2 pp2 dp4 ep4 zbv", "--gbs", "64", "--set", "loss=chunked",
      "--precision", "fp8", "--stack", "fivefold"],
     {"model": "qwen3-30b-a3b", "machine": "h200:16 nic=100Gbit/node", "layout": "tp2 pp2 dp4 ep4 zbv", "gbs": 64,
      "set": "loss=chunked", "precision": "fp8", "stack": "fivefold"}),
]  # fmt: skip


def run_cli(*words: str) -> Any:
    result = CliRunner().invoke(cli, [*words, "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    return json.loads(result.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(("words", "query"), CASES)
def test_the_predict_api_answers_as_the_command_prints(
    client: TestClient, words: list[str], query: dict[str, Any]
) -> None:
    expected = run_cli("predict", *words)
    assert client.get("/api/predict", params=query).json() == expected
    posted = query | ({"set": [query["set"]]} if "set" in query else {})
    assert client.post("/api/predict", json=posted).json() == expected


def test_a_hugging_face_repository_is_accepted_as_a_model(client: TestClient) -> None:
    query = {"machine": "h100:8", "layout": "dp8 zero3 mbs1"}
    answers = [client.get("/api/predict", params=query | {"model": name}) for name in ("qwen3-8b", "Qwen/Qwen3-8B")]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json() == answers[1].json()
    assert "downloads nothing" in client.get("/api/predict", params=query | {"model": "foo/bar"}).json()["detail"]


@pytest.mark.parametrize(
    ("text", "printed"),
    mark_share(
        3,
        [
            ("hsdp/4 tp2", "dp4 tp2 zero3/4 mbs1"),
            ("fsdp", "dp8 zero3 mbs1"),
            ("ddp", "dp8 zero0 mbs1"),
            ("dp=4,tp=2", "dp4 tp2 zero0 mbs1"),
            ("zero3", "dp8 zero3 mbs1"),
        ],
    ),
)
def test_a_layout_is_understood_as_on_the_command_line(client: TestClient, text: str, printed: str) -> None:
    """The page said of fsdp that a number of ranks is missing, which the command line takes from the machine."""
    query = {"model": "nano", "machine": "h100:8", "layout": text, "gbs": 8}
    assert client.get("/api/predict", params=query).json()["layout"] == printed
    degree = printed.partition(" ")[0]
    page = client.get("/plan", params=query).text
    assert (f"{degree} is filled in, for all 8 ranks" in page) == (not text.startswith("dp"))
    for address in ("/plan/config", "/plan/over-time", "/plan/changes"):
        assert client.get(address, params=query).status_code == 200, address
    compared = client.get("/api/compare", params=query | {"layout": [text, "dp8 zero1"]}).json()
    assert compared["variants"][0]["step"]["layout"] == printed


@pytest.mark.slow
def test_ratios_take_the_number_of_ranks_from_the_machine(client: TestClient) -> None:
    query = {"model": "nano", "machine": "h100:8", "layout": "fsdp", "gbs": 8}
    assert client.get("/api/ratios", params=query).status_code == 200


@pytest.mark.slow
def test_a_noise_scale_is_that_of_the_command(client: TestClient) -> None:
    words, query = CASES[0]
    noise = client.get("/api/ask/batch", params=query | {"noise": "4e6"}).json()
    assert noise == run_cli("ask", "batch", *words, "--noise", "4e6")
    outside = client.get("/api/ask/batch", params=query | {"noise": ".."})
    assert "outside of the folder" in outside.json()["detail"]


def test_search_questions_run_in_a_process(folder: Path) -> None:
    """In this one, where the server takes one of its own."""
    asked = {"question": {"model": "nano", "machine": "h100:2"}, "root": str(folder), "local": str(folder / "none")}
    assert worker.VERBS["ask gpus"](asked, lambda *done: None) == run_cli("ask", "gpus", "nano", "h100:2")


def test_the_ratios_api_answers_as_the_command_prints(folder: Path) -> None:
    question = {"model": "llama3-8b", "machine": "h100:8", "seq": 8192}
    asked = {"question": question, "root": str(folder), "local": str(folder / "none")}
    assert worker.compute_ratios(asked, lambda *done: None) == run_cli("ratios", "llama3-8b", "h100:8", "--seq", "8192")


@pytest.mark.slow
def test_the_search_api_answers_as_the_command_prints(folder: Path) -> None:
    """In this process, where the server takes one of its own."""
    words, query = CASES[0]
    query = {key: value for key, value in query.items() if key != "layout"} | {
        "where": "tp<=2 zero>=2 cp=1 pp=1",
        "top": 4,
    }
    result = worker.search({"question": query, "root": str(folder), "local": "none"}, lambda done, total: None)
    expected = run_cli("search", *words[:2], *words[3:], "--where", "tp<=2 zero>=2 cp=1 pp=1", "--top", "4")
    assert result.pop("seconds") > 0
    assert result == {key: value for key, value in expected.items() if key != "seconds"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "query"),    mark_share(3, [
        (["--by", "energy", "--assume", "grid=france"], {"by": "energy", "assume": ["grid=france"]}),
        (["--assume", "grid=france"], {"assume": ["grid=france"]}),  # which alone is of a run
        (["h100:4", "--tokens", "2T", "--by", "cost", "--price", "2.5/h"],
         {"machines": ["h100:4"], "tokens": "2T", "by": "cost", "price": ["2.5/h"]}),
        (["--gpu-counts", "1-2", "--deadline", "30d", "--tokens", "1e9"],
         {"gpu_counts": "1-2", "deadline": "30d", "tokens": "1e9"}),
        (["--keep", "dp2", "--by", "memory"], {"keep": "dp2", "by": "memory"}),
    ]),
)  # fmt: skip
def test_other_kinds_of_search_answer_as_the_command_prints(
    folder: Path, words: list[str], query: dict[str, Any]
) -> None:
    machines = [word for word in words if word.startswith("h100")]
    options = [word for word in words if word not in machines]
    where = "zero<=1 ac=none mbs=1"
    question = {"model": "nano", "machine": "h100:2", "gbs": 8, "where": where} | query
    asked = {"question": question, "root": str(folder), "local": str(folder / "none")}
    printed_ = run_cli("search", "nano", "h100:2", *machines, "--gbs", "8", "--where", where, *options)
    assert worker.search(asked, lambda *done: None) == printed_


@pytest.mark.parametrize(
    "asked",
    [{"keep": "dp2"}, {"also": ["fp8"]}, {"two": True}, {"front": 3}, {"top": 2}],
    ids=lambda asked: next(iter(asked)),
)
def test_single_machine_options_are_errors_with_several_machines(folder: Path, asked: dict[str, Any]) -> None:
    question = {"model": "nano", "machine": "h100:2", "gbs": 8, "machines": ["h100:4"]} | asked
    name = {"two": "2d"}.get(next(iter(asked)), next(iter(asked)))
    with pytest.raises(UserError, match=f"--{name}: valid for a search of one machine only"):
        worker.search({"question": question, "root": str(folder), "local": str(folder / "none")}, lambda *done: None)


@pytest.mark.slow
def test_the_plan_api_answers_as_the_command_prints(folder: Path) -> None:
    question = {"model": "nano", "machine": "h100:2", "tokens": "1e9", "where": "zero<=1 ac=none mbs=1 pp=1"}
    asked = {"question": question, "root": str(folder), "local": str(folder / "none")}
    words = ["nano", "h100:2", "--tokens", "1e9", "--where", "zero<=1 ac=none mbs=1 pp=1"]
    assert worker.plan(asked, lambda *done: None) == run_cli("plan", *words)


def test_the_plan_page_uses_the_requested_risk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any, risk: float, **__: Any) -> None:
        raise UserError(f"risk {risk}")

    monkeypatch.setattr(playbook, "build_playbook", stop)
    asked = {"question": {"model": "nano", "risk": "0.5"}, "root": str(folder), "local": str(folder / "none")}
    with pytest.raises(UserError, match=r"risk 0\.5"):
        worker.plan(asked, lambda *done: None)


DONE_HERE = {"json", "help", "job", "from", "gpus", "ignore"}  # what a page has instead: its address, its files
NOT_BY_A_PAGE = {"chart", "write", "measure", "degrees", "no_calibrate"}  # writes files, trains, prints more, measures


@pytest.mark.parametrize(
    ("command", "question"),
    [("search", SearchQuestion), ("ask", AskQuestion), ("plan", PlaybookQuestion), ("ratios", RatiosQuestion)],
)
def test_page_accepts_the_options_of_the_command(command: str, question: type[JobQuestion]) -> None:
    options = {
        name.removeprefix("--")
        for item in get_command(cli).commands[command].params  # type: ignore[attr-defined]
        for name in item.opts
        if name.startswith("--")
    }
    names = {"2d": "two"}
    fields = {names.get(name, name.replace("-", "_")) for name in options}
    assert fields - DONE_HERE - NOT_BY_A_PAGE <= set(question.model_fields)


def test_the_compare_api_answers_as_the_command_prints(client: TestClient) -> None:
    query = {"layout": ["dp8 zero3", "dp4 tp2 zero1", "dp3"], "machines": ["h200:8"], "gbs": 64, "precisions": "bf16"}
    words = ["llama3-8b", "h100:8", "h200:8", *query["layout"], "--gbs", "64", "--precisions", "bf16"]  # type: ignore[misc]
    assert client.get("/api/compare", params=query).json() == run_cli("compare", *words)
    several = [
        client.get("/api/compare", params=query | {"precisions": names}) for names in ("bf16,fp8", ["bf16", "fp8"])
    ]
    assert several[0].json() == several[1].json()
    assert (
        "compare takes 2 to 12 different steps, not 1"
        in client.get("/api/compare", params={"layout": "dp8"}).json()["detail"]
    )


@pytest.mark.slow
def test_the_dryrun_api_answers_as_the_command_prints(folder: Path) -> None:
    """In this process, where the server takes one of its own."""
    pytest.importorskip("torch")
    words = ["nano", "h100:4", "dp2 pp2 zero1", "--gbs", "8"]
    question = {"model": "nano", "machine": "h100:4", "layout": "dp2 pp2 zero1", "gbs": 8}
    said: list[tuple[int, int, str]] = []
    asked = {"question": question, "root": str(folder), "local": str(folder / "none")}
    result = worker.run_dry_run(asked, lambda *how_far: said.append(how_far))
    assert json.loads(json.dumps(result["data"])) == run_cli("dryrun", *words)
    assert show_bytes(result["data"]["dry_run"]["memory"]["peak_bytes"]) in result["html"]
    assert [line for *_, line in said] == [
        "PyTorch and the training code are loaded",
        "rank 1 of 2 runs its step",
        "rank 2 of 2 runs its step",
        "the pictures are drawn",
    ]


def test_a_model_is_a_file_of_the_folder_or_pasted(client: TestClient, folder: Path) -> None:
    file = client.get("/api/predict", params={"model": "own.toml"}).json()
    import tomllib

    pasted = client.post("/api/predict", json={"config": json.dumps(tomllib.loads(OWN))}).json()
    assert file["work"] == pasted["work"]
    assert (file["model"], pasted["model"]) == ("own", "pasted")
    wider = client.get("/api/predict", params={"model": "own.toml", "layers": 8}).json()
    assert wider["work"]["parameters"] > file["work"]["parameters"]
    assert wider["model"] == "own layers=8"


@pytest.mark.parametrize(
    ("query", "line"),
    [
        ({"layout": "dp9"}, "needs 9 ranks, but h100 has 8"),
        ({"layout": "zer1"}, "unknown layout token 'zer1'; did you mean zero1"),
        ({"model": "lama3-8b"}, "did you mean llama3-8b"),
        ({"gbs": "many"}, "gbs must be a whole number"),
        ({"layouts": "dp8"}, "layouts is not a parameter of this page"),
        ({"config": "{"}, "the pasted config is not valid JSON"),
        ({"set": "loss"}, "is not FIELD=VALUE"),
        ({"layers": 0}, "layers must be 1 or more"),
        ({"stack": "megatorn"}, "unknown stack"),
    ],
)
def test_a_user_error_is_a_one_line_error(client: TestClient, query: dict[str, Any], line: str) -> None:
    answer = client.get("/api/predict", params=query)
    assert answer.status_code == 422
    assert line in answer.json()["detail"]
    assert "\n" not in answer.json()["detail"]


@pytest.mark.usefixtures("disable_garbage_collection")
def test_unclosed_brackets_are_not_read_as_a_config(client: TestClient) -> None:
    answer = client.post("/api/predict", json={"config": "[" * 50_000})
    assert (answer.status_code, answer.json()["detail"][:25]) == (422, "the pasted config is not ")


def test_the_api_serves_its_own_documentation(client: TestClient) -> None:
    schema = client.get("/api/openapi.json").json()
    assert set(schema["paths"]) >= {"/api/predict", "/api/search", "/api/ask/{question}", "/api/catalog"}
    step = schema["components"]["schemas"]["Step"]
    assert set(step["properties"]) >= {"memory", "work", "traffic", "time", "mfu"}
    assert all(route.get("description") for verbs in schema["paths"].values() for route in verbs.values())

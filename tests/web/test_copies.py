"""What a page offers to copy gives the answer of the page: as a command line and as Python."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.selection import mark_share

pytest.importorskip("fastapi", reason="the page needs the extra web")

from starlette.testclient import TestClient

from fivefold.cli import app as cli
from fivefold.requests.settings import change_setting, load_settings, save_settings
from fivefold.web import worker
from fivefold.web.copies import MODEL_FILE, write_copies
from fivefold.web.pages.search import SearchPage
from fivefold.web.question import CompareQuestion, JobQuestion, PredictQuestion, SearchQuestion

SMALL: dict[str, Any] = {"model": "nano", "machine": "h100:2", "gbs": 8}
STEPS = [
    {"layout": "dp2 zero3 mbs1", "seq": 512, "stack": "torchtitan", "precision": "fp8", "attention": "flash2"},
    {"layout": "dp2 mbs2", "optimizer": "muon", "loss": "chunked", "documents": "separate"},
    {"layout": "tp2", "set": ["overlap=dp,pp", "learning_rate.peak=3e-4", "precision.moments_bytes=2,2"]},
    {"layout": "dp2 zero1", "stack": "megatron-core", "master_bytes": "2", "moments_bytes": "2,2"},
    {"layout": "dp2 zero3", "freeze": "embed_tokens,layers[0].attention"},
    {"layout": "dp2", "adapter": "lora:8", "set": ["adapter.targets=q_proj,v_proj"]},
    {
        "layout": "dp2", "adapter": "lora:8",
        "adapter_targets": "q_proj,v_proj", "modules_to_save": "embed_tokens,lm_head",
        "rank_pattern": "q_proj:4", "alpha_pattern": "q_proj:8,v_proj:4",
    },
    {"model": "qwen3-next-80b-a3b", "layout": "dp2 zero3", "fused_scans": "true"},
    {"layout": "dp2 zero3 offload=parameters", "stack": "fsdp2", "precision": "bf16-grad16"},
    {
        "model": "gemma3-4b", "layout": "dp2 zero3", "seq": 2048,
        "images": 2, "image_tokens": 256, "freeze_vision_tower": True, "freeze_projector": True,
    },
    {"layout": "dp2", "machine": "h100:2 memory=40GiB price=3", "set": ["recv_buffers=preallocated"]},
]  # fmt: skip
WHERE = "dp=2 zero=1 ac=none mbs=1 order=default"
SEARCHES = [
    {"where": WHERE, "top": 3, "also": ["fp8"], "memory": "40GiB", "exact": True, "front": 2},
    {"where": WHERE, "by": "cost", "price": ["h100=2.5/h"], "risk": 0.2, "within": 0.1},
    {"where": WHERE, "machines": ["a100:2"], "tokens": "1e9", "by": "cost", "price": ["h100=2", "a100=1"]},
    {
        "where": WHERE,
        "deadline": "30d",
        "gpu_counts": "1-2",
        "tokens": 1e9,
        "assume": ["failures=1"],
        "memory": "40GiB",
    },
    {"keep": "dp2", "by": "memory", "memory": "40GiB"},
]


def run_command(text: str) -> Any:
    words = shlex.split(text)
    assert words[0] == "fivefold"
    result = CliRunner().invoke(cli, [*words[1:], "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.stdout + result.stderr
    return json.loads(result.stdout)


def run_python(text: str) -> Any:
    names: dict[str, Any] = {}
    exec(text, names)
    return json.loads(names["answer"].model_dump_json())


def drop_field(answer: dict[str, Any], field: str) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name != field}


def drop_seconds(answer: dict[str, Any]) -> dict[str, Any]:
    return drop_field(answer, "seconds")


@pytest.mark.parametrize("asked", STEPS, ids=lambda asked: asked["layout"])
def test_a_step_is_the_same_by_command_and_in_python(client: TestClient, asked: dict[str, Any]) -> None:
    copies = write_copies(PredictQuestion(**SMALL | asked), "predict")
    answer = client.get("/api/predict", params=SMALL | asked).json()
    assert run_command(copies.command) == answer
    assert run_python(copies.python) == answer
    assert not copies.file


@pytest.mark.slow
@pytest.mark.parametrize("asked", mark_share(2, SEARCHES), ids=lambda asked: " ".join(asked))
def test_a_search_is_the_same_by_command_and_in_python(folder: Path, asked: dict[str, Any]) -> None:
    question = SearchQuestion(**SMALL | asked)
    copies = write_copies(question, "search")
    request = {"question": question.model_dump(mode="json"), "root": str(folder), "local": "none"}
    answer = drop_seconds(worker.search(request, lambda *done: None))
    assert drop_seconds(run_command(copies.command)) == answer
    in_python = json.dumps(drop_seconds(run_python(copies.python)))
    for setting in (" memory=40GiB", " price=2.5"):  # of the machine, whose name says so
        in_python = in_python.replace(setting, "")
    assert drop_arguments(json.loads(in_python)) == drop_arguments(answer)


def drop_arguments(answer: dict[str, Any]) -> dict[str, Any]:
    """The answer without the machines as they were typed."""
    offers = [drop_field(offer, "machine_argument") for offer in answer.get("offers", ())]
    return answer | {"offers": offers} if offers else answer


def test_a_comparison_is_the_same_by_command_and_in_python(client: TestClient) -> None:
    asked = {"layout": ["dp2", "tp2"], "machines": ["a100:2"], "stacks": ["fivefold", "torchtitan"]}
    copies = write_copies(CompareQuestion(**SMALL | asked), "compare")
    answer = client.get("/api/compare", params=SMALL | asked).json()
    assert run_command(copies.command) == answer
    assert run_python(copies.python) == answer


def test_the_search_page_asks_what_the_command_asks() -> None:
    """No default of the page changes the search, so that both propose the same layout."""
    assert write_copies(SearchPage(), "search").command == "fivefold search llama3-8b h100:8"


def test_a_changed_model_is_a_file(client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = SMALL | {"layers": 3}
    copies = write_copies(PredictQuestion(**asked | {"layout": "dp2"}), "predict")
    assert copies.file == MODEL_FILE
    monkeypatch.chdir(tmp_path)
    (tmp_path / MODEL_FILE).write_text(client.get(JobQuestion(**asked).url("/plan/model")).text)
    answer = client.get("/api/predict", params=asked | {"layout": "dp2"}).json()
    for copied in (run_command(copies.command), run_python(copies.python)):
        assert copied["work"] == answer["work"]
        assert copied["memory"] == answer["memory"]


def test_user_settings_apply_to_pages_and_what_they_copy(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    settings = load_settings()
    for key, value in {"stack": "torchtitan", "machine": "h100:2", "prices.h100": "2.5"}.items():
        settings = change_setting(settings, key, value)
    save_settings(settings)
    asked = SMALL | {"layout": "dp2"}
    answer = client.get("/api/predict", params=asked).json()
    assert answer["job"]["stack"]["name"] == "torchtitan"
    copies = write_copies(PredictQuestion(**asked), "predict")
    assert drop_field(run_command(copies.command), "settings") == answer
    assert run_python(copies.python) == answer
    page = client.get("/plan", params=asked).text
    assert "torchtitan (your setting)" in page
    assert "user settings: stack=torchtitan, prices.h100=2.5 (" in page
    assert "at $2.5" in page
    assert client.get("/", follow_redirects=False).headers["location"].endswith("?machine=h100:2")
    assert client.get("/api/predict", params=asked | {"stack": "fivefold"}).json()["job"]["stack"]["name"] == "fivefold"

"""What was asked, in the words of the terminal, on every page that answers; and ranks that stay idle."""

from __future__ import annotations

import re

import pytest
from starlette.testclient import TestClient

pytest.importorskip("fastapi", reason="the page needs the extra web")

from fivefold.web.question import spell_field

SAID = "seq 512, global batch 16; defaults: bf16, AdamW, software fivefold"
ASKED = {"model": "tiny", "machine": "h100:2", "seq": "512", "gbs": "16"}


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/plan", {"layout": "dp2"}),
        ("/compare", {"layout": ["dp2", "tp2"]}),
        pytest.param("/search/events", {}, marks=pytest.mark.processes),
    ],
)  # fmt: skip
def test_an_answer_on_a_page_begins_with_the_question(
    client: TestClient, path: str, more: dict[str, str | list[str]]
) -> None:
    assert SAID in client.get(path, params=ASKED | more).text


@pytest.mark.parametrize(("path", "layout"), [("/plan", ["dp4"]), ("/compare", ["dp4", "dp8"])])
def test_idle_ranks_are_reported(client: TestClient, path: str, layout: list[str]) -> None:
    text = client.get(path, params={"model": "tiny", "machine": "h100:8", "layout": layout}).text
    assert text.count("uses 4 of the 8 ranks of h100; 4 stay idle") == 1


def test_a_number_of_tokens_is_spelled_as_people_write_it(client: TestClient) -> None:
    assert [spell_field("tokens", value) for value in (2e12, 1.5e9, 3e6, 512.0)] == ["2T", "1.5B", "3M", "512"]
    assert spell_field("price", 2e12) == "2e12"
    page = client.get("/search", params=ASKED | {"tokens": "1.5e9"}).text
    assert 'name="tokens" type="text" value="1.5B"' in page
    assert "tokens=1.5B" in page


def test_a_page_that_does_not_exist_is_not_found(client: TestClient) -> None:
    assert "<h1>Page not found</h1>" in client.get("/nothing").text
    assert "must be a number, such as 2e12 or 2T" in client.get("/ask", params={"tokens": "x"}).text


def test_only_the_keyword_that_another_value_makes_valid_is_marked_as_wrong(client: TestClient) -> None:
    text = client.get("/plan", params={"model": "llama3-8b", "machine": "h100:8", "layout": "dp7", "gbs": "64"}).text
    assert re.findall(r'data-key="([^"]+)"[^>]* class="chosen wrong"', text) == ["dp 7"]


def test_an_empty_model_field_is_an_error(client: TestClient) -> None:
    asked = ASKED | {"model": "", "layout": "dp2"}
    page = client.get("/plan", params=asked).text
    assert "name a model, such as llama3-8b or a file, or paste a config.json" in page
    assert "model=&amp;" in page  # in the links to other pages too
    assert client.get("/api/predict", params=asked).status_code == 422
    config = '{"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8}'
    assert client.get("/api/predict", params=asked | {"config": config}).json()["model"] == "pasted"


def test_an_empty_machine_field_is_an_error(client: TestClient) -> None:
    asked = ASKED | {"machine": "", "layout": "dp2"}
    page = client.get("/plan", params=asked).text
    assert "name a machine, such as h100:8, or a file" in page
    assert "machine=&amp;" in page or 'machine="' in page
    assert client.get("/api/predict", params=asked).status_code == 422


def test_the_start_page_keeps_the_question(client: TestClient) -> None:
    question = "model=tiny&machine=h100:2&set=a&set=b"
    assert client.get(f"/?{question}", follow_redirects=False).headers["location"] == f"/plan?{question}"
    assert client.get("/", follow_redirects=False).headers["location"] == "/plan"


def test_the_first_page_carries_no_batch_to_the_others(client: TestClient) -> None:
    """It carried 64 sequences: a run of 1 T tokens had 1.9 million steps, where ``ask run`` takes what is advised."""
    page = client.get("/").text
    assert "defaults: seq 4096, global batch 8, bf16, AdamW, software fivefold" in page
    assert re.search(r'name="gbs" type="number" value="" [^>]*placeholder="8"', page, re.DOTALL)
    assert "30.52 M steps of 8 sequences (1,024 are advised)" in page
    pages = re.findall(r'<a href="/(search|ask|compare|dryrun|sweep|learn/index)([^"]*)"', page)
    assert len(pages) >= 6
    assert {question for _, question in pages} == {""}
    assert re.search(r'name="gbs" [^>]*placeholder="as advised"', client.get("/ask?question=run").text, re.DOTALL)
    assert "steps of 64 sequences," in client.get("/plan?gbs=64&price=2").text


@pytest.mark.parametrize(
    ("path", "layouts"),
    [
        ("/plan", ["hsdp"]),
        ("/compare", ["hsdp", "fsdp"]),
        pytest.param("/ask/events", ["hsdp"], marks=pytest.mark.processes),
    ],
)
def test_what_the_machine_fills_in_of_a_layout_is_said_once(client: TestClient, path: str, layouts: list[str]) -> None:
    asked = {"model": "tiny", "machine": "h100:16", "layout": layouts, "seq": "512"}
    text = client.get(path, params=asked).text
    assert text.count("hsdp shards over the 8 ranks of dp and cp in one node: zero3/8") == 1

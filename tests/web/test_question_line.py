"""What was asked, in the words of the terminal, on every page that answers; and ranks that stay idle."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

pytest.importorskip("fastapi", reason="the page needs the extra web")

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
def test_an_answer_says_what_was_asked(client: TestClient, path: str, more: dict[str, str | list[str]]) -> None:
    assert SAID in client.get(path, params=ASKED | more).text


@pytest.mark.parametrize(("path", "layout"), [("/plan", ["dp4"]), ("/compare", ["dp4", "dp8"])])
def test_idle_ranks_are_reported(client: TestClient, path: str, layout: list[str]) -> None:
    text = client.get(path, params={"model": "tiny", "machine": "h100:8", "layout": layout}).text
    assert text.count("uses 4 of the 8 ranks of h100; 4 stay idle") == 1

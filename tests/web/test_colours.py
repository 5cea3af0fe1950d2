"""Colours of the cards: green says one thing in each, that a verdict is good or one kind of part."""

from __future__ import annotations

import re

import pytest
from fastapi.testclient import TestClient

from fivefold.rendering.palette import KINDS

PAGES = (
    "/plan?model=mixtral-8x7b&machine=h100:32&layout=dp4+tp2+pp4+ep4+zb1p+zero1&gbs=64",
    "/plan?model=llama3-8b&machine=h100:8&layout=dp8+zero3+ac%3Dfull&gbs=64",
    "/compare?model=llama3-8b&machine=h100:8&layout=dp8+zero3&layout=dp2+pp4+zb1p+zero1&gbs=64",
)


@pytest.mark.parametrize("address", PAGES)
def test_green_has_one_meaning_in_each_card(client: TestClient, address: str) -> None:
    html = re.sub(r"<style.*?</style>", "", client.get(address).text, flags=re.DOTALL)
    cards = re.findall(r"<section.*?</section>|<dl class=\"figures\".*?</dl>", html, flags=re.DOTALL)
    assert len(cards) >= 3
    for card in cards:
        words = {word for names in re.findall(r'class="([^"]*)"', card) for word in names.split()}
        meanings = {word for word in words if KINDS.get(word.removeprefix("k-")) == "green"} | words & {"good"}
        assert len(meanings) <= 1, (meanings, card[:200])

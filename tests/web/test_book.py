from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from starlette.testclient import TestClient

from fivefold.web.book import chapter, chapters
from fivefold.web.mathml import mathml


@pytest.mark.parametrize("name", chapters())
def test_a_chapter_is_whole(name: str, client: TestClient) -> None:
    found = chapter(name)
    assert f"<h1>{found.title}" in found.html.replace("&amp;", "&")
    assert "$$" not in found.html
    assert '.md"' not in found.html
    for formula in re.findall(r"<math.*?</math>", found.html, re.DOTALL):
        ElementTree.fromstring(formula)  # well-formed
        assert "\\" not in formula
    for target in set(re.findall(r'href="([^"]+)"', found.html)):
        assert target.startswith(("/learn/", "https://", "#"))
        if target.startswith("/learn/"):
            assert client.get(target).status_code == 200
    answer = client.get(f"/learn/{name}?seq=2048&gbs=8")
    assert answer.status_code == 200
    assert ("Try it" in answer.text) == bool(found.live)


def test_the_index_names_every_chapter() -> None:
    from importlib.resources import files

    inside = {each.name.removesuffix(".md") for each in (files("fivefold.web") / "book").iterdir()}
    assert set(chapters()) == inside | {"notation"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"x^2", "<msup><mi>x</mi><mn>2</mn></msup>"),
        (r"\frac{a}{b+1}", "<mfrac><mrow><mi>a</mi></mrow><mrow><mi>b</mi><mo>+</mo><mn>1</mn></mrow></mfrac>"),
        (r"\max_{i} a", "<munder><mo>max</mo><mrow><mi>i</mi></mrow></munder><mi>a</mi>"),
        (r"\text{two words} \ge 1", "<mtext>two words</mtext><mo>≥</mo><mn>1</mn>"),
        (r"e^{R/M}", "<msup><mi>e</mi><mrow><mi>R</mi><mo>/</mo><mi>M</mi></mrow></msup>"),
    ],
)
def test_formulas(text: str, expected: str) -> None:
    assert mathml(text) == f'<math display="block">{expected}</math>'


@pytest.mark.parametrize("name", ["../notation", "nope", "%2e%2e", "index.md", ""])
def test_there_is_no_other_chapter(client: TestClient, name: str) -> None:
    assert client.get(f"/learn/{name}", follow_redirects=False).status_code in (404, 307)

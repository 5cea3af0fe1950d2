from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from starlette.testclient import TestClient

from fivefold.web.pages.learn import list_chapters, read_chapter


@pytest.mark.parametrize("name", list_chapters())
def test_a_chapter_has_all_its_parts(name: str, client: TestClient) -> None:
    result = read_chapter(name)
    assert f"<h1>{result.title}" in result.html.replace("&amp;", "&")
    assert "$$" not in result.html
    assert '.md"' not in result.html
    for formula in re.findall(r"<math.*?</math>", result.html, re.DOTALL):
        ElementTree.fromstring(formula)  # well-formed
        assert "\\" not in formula
    for target in set(re.findall(r'href="([^"]+)"', result.html)):
        assert target.startswith(("/learn/", "https://", "#"))
        if target.startswith("/learn/"):
            assert client.get(target).status_code == 200
    answer = client.get(f"/learn/{name}?seq=2048&gbs=8")
    assert answer.status_code == 200
    assert ("Try it" in answer.text) == bool(result.live)
    assert " style=" not in answer.text  # which the content security policy forbids


def test_numbers_of_a_table_are_aligned_by_a_class() -> None:
    assert re.search(r'<td class="n">[\d,]+</td>', read_chapter("published").html)


def test_formulas_are_drawn_by_the_browser() -> None:
    """A formula of the book, as MathML: a maximum over what stands below it, a sum, words."""
    html = read_chapter("memory").html
    assert "<mo>max</mo><mrow><mtext>moments</mtext></mrow>" in html
    assert "<mtext>peak</mtext><mo>=</mo>" in html.replace("&#x0003D;", "=")
    assert (
        len(re.findall("<math", read_chapter("ratios").html))
        == read_chapter("ratios").html.count('aria-label="formula ')
        == 2
    )


def test_the_index_links_every_chapter() -> None:
    from importlib.resources import files

    inside = {path.name.removesuffix(".md") for path in (files("fivefold.web") / "book").iterdir()}
    assert set(list_chapters()) == inside | {"notation"}


@pytest.mark.parametrize("name", ["../notation", "nope", "%2e%2e", "index.md", ""])
def test_there_is_no_other_chapter(client: TestClient, name: str) -> None:
    assert client.get(f"/learn/{name}", follow_redirects=False).status_code in (404, 307)

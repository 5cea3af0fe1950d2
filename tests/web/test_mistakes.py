"""A question that is not valid keeps its controls; the reason stands in place of the answer and next to its control."""

from __future__ import annotations

import re
from typing import Any

import pytest
from starlette.testclient import TestClient

from fivefold.errors import UserError
from fivefold.web.site import WebServer
from tests.web.browser import NEEDS_CHROMIUM, PLAN, list_violations

playwright = pytest.importorskip("playwright.sync_api")

FIELDS = {  # addresses of questions that are not valid, and the control to correct
    "/plan?seq=abc": "seq",
    "/plan?seq=abc&gbs=x": "seq",
    "/plan?nothing=1": "nothing",  # which no control has
    "/plan?model=llama9": "model",
    "/plan?model=&machine=": "model",
    "/plan?machine=h9:2": "machine",
    "/plan?layout=zz": "layout",
    "/plan?config=%7Bx": "config",
    "/plan?run_config=zz": "run_config",
    "/plan?adapter=foo": "adapter",
    "/plan?freeze=zzz": "freeze",
    "/plan?set=foo%3D1": "set",
    "/plan?rank_pattern=zz&adapter=lora:8": "rank_pattern",
    "/learn/memory?gbs=x": "gbs",
    "/learn/memory?layout=zz": "layout",
    "/ask?question=changes&layout=zz&run=1": "layout",
    "/ask?tokens=x&run=1": "tokens",
    "/search?top=0&run=1": "top",
    "/search?machine=h9:2&run=1": "machine",
    "/search?where=cp%3Dx&run=1": "where",
    "/search?keep=zz&run=1": "keep",
    "/compare?layout=dp8&layout=zz": "layout",
    "/dryrun?layout=zz&run=1": "layout",
    "/sweep?across=zz": "across",
    "/sweep/start?model=llama9&run=1": "model",
    "/trace?step=x&run=1": "step",
    "/explain?layout=zz&run=1": "layout",
}


@pytest.mark.parametrize("address", FIELDS)
def test_a_question_that_is_not_valid_keeps_its_controls(client: TestClient, address: str) -> None:
    answer = client.get(address)
    assert 'id="asking"' in answer.text
    (field,) = re.findall(r'<p class="mistake" role="alert" data-field="(\w+)" data-entry="\d+">', answer.text)
    assert field == FIELDS[address]
    assert "figure" not in answer.text.partition('id="answer"')[2]


@pytest.mark.parametrize(
    ("address", "entry"),
    [
        ("layout=zz&layout=dp8", 0),
        ("layout=dp8&layout=zz&layout=tp8", 1),
        ("layout=dp8&machines=a100:8&machines=h9:2", 1),
    ],
)
def test_the_wrong_entry_of_a_list_is_named(client: TestClient, address: str, entry: int) -> None:
    assert f'data-entry="{entry}">' in client.get(f"/compare?{address}").text


def test_a_question_without_an_answer_names_no_control(client: TestClient) -> None:
    text = client.get("/plan", params={"model": "gpt2", "layout": "tp8"}).text
    assert '<p class="mistake" role="alert">' in text
    assert "data-field" not in text


def test_a_reason_that_has_passed_is_said(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file may be complete by the time the control to correct is looked for."""

    def fail(*_: object) -> None:
        raise UserError("own.toml is being written")

    monkeypatch.setattr(WebServer, "resolve", fail)
    assert "own.toml is being written" in client.get(PLAN).text


def test_a_page_without_controls_says_what_is_wrong(client: TestClient) -> None:
    assert "<h1>This is not possible</h1>" in client.get("/runs", params={"smooth": "x"}).text
    assert client.get("/api/predict", params={"seq": "abc"}).json()["detail"].startswith("seq must be")


@NEEDS_CHROMIUM
def test_the_reason_stands_beside_its_control_until_that_is_corrected(page: Any) -> None:
    page.goto(PLAN)
    model = page.locator("[name=model]")
    model.fill("llama9")
    note = page.locator(".field", has=model).locator("small", has_text="unknown model")
    playwright.expect(note).to_be_visible()
    playwright.expect(model).to_have_attribute("aria-invalid", "true")
    assert model.get_attribute("aria-describedby") == note.get_attribute("id")
    assert list_violations(page) == []
    page.reload()
    playwright.expect(note).to_be_visible()
    playwright.expect(model).to_have_value("llama9")
    model.fill("nano")
    playwright.expect(page.locator("dl.figures")).to_be_visible()
    playwright.expect(note).to_have_count(0)
    assert model.get_attribute("aria-invalid") is None


@pytest.mark.long  # the test above has a field
@NEEDS_CHROMIUM
def test_the_reason_stands_beside_the_wrong_entry_of_a_list(page: Any) -> None:
    page.goto("/compare?model=nano&machine=h100:2&layout=dp2&layout=zz&gbs=8&seq=512")
    wrong = page.locator("[name=layout]").nth(1)
    playwright.expect(wrong).to_have_attribute("aria-invalid", "true")
    playwright.expect(page.locator("[name=layout][aria-invalid]")).to_have_count(1)
    wrong.fill("tp2")
    wrong.blur()
    playwright.expect(page.locator("#answer table").first).to_be_visible()
    playwright.expect(page.locator("[name=layout][aria-invalid]")).to_have_count(0)


@pytest.mark.long  # the test above has a field
@NEEDS_CHROMIUM
def test_a_number_that_is_none_is_corrected_where_it_stands(page: Any, said_by_browser: list[str]) -> None:
    page.goto("/ask?model=nano&machine=h100:2&gbs=8&seq=512&question=run&tokens=lots&run=1")
    said_by_browser.clear()  # the browser reports the status of the page
    tokens = page.locator("[name=tokens]")
    playwright.expect(tokens).to_have_value("lots")
    playwright.expect(page.locator(".field", has=tokens)).to_contain_text("must be a number, such as 2e12 or 2T")
    playwright.expect(page.locator("#stop")).to_be_hidden()
    tokens.fill("1B")
    page.get_by_role("button", name="Ask", exact=True).click()
    playwright.expect(page.locator("#answer table").first).to_be_visible()
    assert tokens.get_attribute("aria-invalid") is None


@pytest.mark.long  # test_pages.py stops a search
@NEEDS_CHROMIUM
def test_stop_before_a_second_search_has_begun_does_not_stop_the_first(page: Any) -> None:
    page.goto("/search?model=nano&machine=h100:2&gbs=8&seq=512&run=1")
    playwright.expect(page.locator("#answer h2").first).to_be_visible()
    playwright.expect(page.locator("#stop")).to_be_hidden()
    stops: list[str] = []
    page.route("**/search/events/stop*", lambda route: stops.append(route.request.url) or route.abort())
    page.route("**/search/events?*", lambda route: None)  # an answer that does not begin
    page.locator("#asking [name=gbs]").fill("16")
    page.get_by_role("button", name="Search", exact=True).click()
    page.locator("#stop").click()
    playwright.expect(page.locator("#answer")).to_have_text("Stopped before there was an answer.")
    playwright.expect(page.locator("#stop")).to_be_hidden()
    assert stops == []

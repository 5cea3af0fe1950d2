"""Controls, address and answer say the same after every change, Back and Forward, on every page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from fivefold.sweeps.rows_file import write
from fivefold.web.app import create
from tests.selection import mark_share
from tests.web.browser import COMPARE, NEEDS_CHROMIUM, PLAN, is_within_window
from tests.web.test_runs import write_run
from tests.web.test_sweep import row

playwright = pytest.importorskip("playwright.sync_api", reason="the pages are driven by playwright")
pytestmark = NEEDS_CHROMIUM

SIDE = ("Paste or choose a config", "Paste a config.json", "Change its shape", "Any other field")
CHANGES = {  # page → what is opened there, and controls with their new values, one after another
    PLAN: (SIDE, [("layout", "dp4 tp2"), ("layers", "16"),
                  ("run_config", "base_model: Qwen/Qwen3-8B\nsequence_len: 512\nmicro_batch_size: 1\n")]),
    "/plan?model=llama3-8b&machine=h100:8&gbs=64": (
        SIDE, [("precision", "fp8"), ("set", "loss=chunked"), ("model", "llama3.2-1b")],
    ),
    COMPARE: ((), [("layout", "dp2 tp4"), ("machines", "h200:8"), ("gbs", "32"), ("precisions", "fp8")]),
    "/learn/memory?gbs=64": ((), [("layout", "dp4 tp2"), ("gbs", "32")]),
    "/sweep?file=followed.csv": ((), [("across", "dp"), ("value", "peak_bytes"), ("down", "zero")]),
    "/search?model=nano&machine=h100:2&gbs=8": (
        ("Any other field", "More: precisions", "A full training run"),
        [("by", "memory"), ("where", "tp=1"), ("exact", "yes"), ("also", "fp8"), ("machines", "b200:1")],
    ),
    "/dryrun?model=nano&machine=h100:4": (("Any other field",), [("layout", "dp4"), ("set", "loss=chunked")]),
}  # fmt: skip


def controls(page: Any) -> list[Any]:
    """What the controls of the question say."""
    said: list[Any] = page.evaluate(
        """() => [...document.querySelectorAll("#asking, form[action]")].flatMap((form) => [...form.elements])
            .filter((each) => each.name)
            .map((each) => [each.name, each.type === "checkbox" ? each.checked : each.value])"""
    )
    return [said, page.locator("#asked > summary").all_text_contents(), page.title()]


def wait_until_settled(page: Any) -> None:
    playwright.expect(page.locator("body.busy, #going:visible")).to_have_count(0)


@pytest.mark.parametrize("path", mark_share(7, CHANGES))
def test_every_control_follows_the_back_and_forward_buttons(page: Any, folder: Path, path: str) -> None:
    write([row("llama3-8b", text) for text in ("dp8 zero3", "dp4 tp2 zero1")], folder / "followed.csv")
    result = 'event: found\ndata: "<p class=dim>answered</p>"\n\n'
    page.route("**/events?*", lambda route: route.fulfill(body=result, content_type="text/event-stream"))
    page.goto(path)
    opened, changes = CHANGES[path]
    for text in opened:
        page.locator("summary", has_text=text).click()
    seen = [(page.url, controls(page))]
    for name, value in changes:
        field, before = page.locator(f"[name={name}]").last, page.url
        if value == "yes":
            field.check()
        elif field.evaluate("each => each.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)
        if page.locator("#stop").count():
            page.locator("main button:not(#stop):visible").first.click()
        page.wait_for_url(lambda url, before=before: url != before)
        wait_until_settled(page)
        seen.append((page.url, controls(page)))
    assert len({url for url, _ in seen}) == len(seen)
    for walk, expected in ((page.go_back, seen[-2::-1]), (page.go_forward, seen[1:])):
        for url, said in expected:
            walk()
            page.wait_for_url(url)
            wait_until_settled(page)
            assert controls(page) == said
    if page.locator("#stop").count():
        page.go_back()
        playwright.expect(page.locator("#answer")).to_have_text("answered")


@pytest.mark.long  # test_pages.py clicks once
def test_compare_has_as_many_fields_after_many_clicks(page: Any) -> None:
    page.goto("/compare?model=llama3-8b&machine=h100:8&gbs=64")
    page.get_by_role("link", name="An example").click()
    playwright.expect(page.locator(".variants li")).to_have_count(3)
    before, address = controls(page), page.url
    for name in ("model", "gbs", "layout", "machines"):
        page.locator(f"[name={name}]").first.click()
        page.keyboard.press("Enter")
        wait_until_settled(page)
    assert (controls(page), page.url) == (before, address)
    assert page.evaluate("history.length") == 3  # the empty page, Compare, the example


@pytest.mark.long  # the first test has the buttons
def test_pressing_enter_does_not_undo_the_back_button(page: Any) -> None:
    page.goto(PLAN)
    layout = page.locator("input[name=layout]")
    layout.fill("dp4 tp2 zero1")
    page.wait_for_url(re.compile("tp2"))
    page.go_back()
    playwright.expect(layout).to_have_value("dp8 zero3 mbs1")
    address = page.url
    layout.press("Enter")
    wait_until_settled(page)
    assert (layout.input_value(), page.url) == ("dp8 zero3 mbs1", address)


def test_the_runs_page_shows_runs_that_start_later(page: Any, tmp_path: Path) -> None:
    with TestClient(create(tmp_path, local=tmp_path / "none"), base_url="http://127.0.0.1:1") as client:
        page.route("**/runs", lambda route: route.fulfill(body=client.get("/runs").text, content_type="text/html"))
        page.clock.install()
        page.goto("/runs")
        assert "There is no run here yet" in page.locator("#answer").inner_text()
        write_run(tmp_path / "b", steps=3, ended=False)
        page.clock.run_for(6_000)
        rows = page.locator("#answer tbody tr")
        playwright.expect(rows).to_have_count(1)
        page.locator("th", has_text="run").first.click(position={"x": 40, "y": 3})
        write_run(tmp_path / "a", steps=4, ended=False)
        page.clock.run_for(6_000)
        playwright.expect(rows).to_have_count(2)
        assert [item.inner_text().split("\t")[1] for item in rows.all()] == ["a", "b"]  # still sorted by name


@pytest.mark.long  # test_mistakes.py has a reason next to its control
def test_a_bad_machine_leaves_no_empty_card(page: Any) -> None:
    page.goto("/plan?machine=h101:8")
    assert "once model, machine and job are valid" in page.locator("#controls").inner_text()
    page.goto("/plan?layout=nonsense")
    page.locator("#controls a").click()
    playwright.expect(page.locator("input[name=layout]")).to_have_value("dp8 zero3 mbs1")
    playwright.expect(page.get_by_role("group", name="tensor")).to_be_visible()


@pytest.mark.long  # `test_a_chosen_question…` has a narrow window
def test_every_page_can_be_reached_in_a_narrow_window(page: Any) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    page.goto("/runs")
    for link in page.locator("header nav a").all():
        box = link.bounding_box()
        assert 0 <= box["x"] <= 390 - box["width"], link.inner_text()
    assert is_within_window(page)


@pytest.mark.long  # test_mistakes.py has errors
def test_an_error_of_a_late_answer_is_a_one_line_error(page: Any) -> None:
    body = '<body><header>x</header><main><p class="mistake">takes too long</p></main></body>'
    page.route("**/plan/changes?*", lambda route: route.fulfill(content_type="text/html", body=body))
    page.goto(PLAN)
    page.get_by_text("What one more change would gain").click()
    playwright.expect(page.locator("#changes")).to_have_text("takes too long")


def test_a_picture_of_the_docs_is_complete(page: Any) -> None:
    """No text is cut by the edge or lies over another one, and the labels of an axis all stand at their ticks."""
    for path in sorted((Path(__file__).parents[2] / "docs" / "pictures").glob("*.svg")):
        page.set_content(f"<body style='margin:0'>{path.read_text(encoding='utf-8')}</body>")
        edge, texts = page.evaluate(
            """() => {
                const places = (each) => Object.values(each.getBoundingClientRect().toJSON()); // x y width height …
                const texts = [...document.querySelectorAll("svg text")].filter((each) => each.textContent);
                return [places(document.querySelector("svg")), texts.map((each) => [each.textContent, places(each)])];
            }"""
        )
        assert [text for text, (x, _, width, *_) in texts if x < -1 or x + width > edge[2] + 1] == [], path.name
        headings = [(text, box) for text, box in texts if len(text) > 12]
        over = [
            (text, other)
            for at, (text, (x, y, width, height, *_)) in enumerate(headings)
            for other, (left, top, wide, high, *_) in headings[:at]
            if max(x, left) + 1 < min(x + width, left + wide) and max(y, top) + 3 < min(y + height, top + high)
        ]
        assert over == [], path.name
        anchors = page.evaluate(
            """() => [...document.querySelectorAll(".role-axis-label")].map((each) =>
                [...new Set([...each.children].map((text) => text.getAttribute("text-anchor")))])"""
        )
        assert [anchor for anchor in anchors if len(anchor) > 1] == [], path.name

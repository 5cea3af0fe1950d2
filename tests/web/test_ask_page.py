"""The page Ask: every question of ``ask`` is answered as tables whose layouts link to their plans."""

from __future__ import annotations

import asyncio
import re
from html import unescape
from pathlib import Path
from typing import Any, get_args
from urllib.parse import parse_qsl, urlsplit

import pytest

pytest.importorskip("fastapi", reason="the page needs the extra web")

from starlette.testclient import TestClient

from fivefold.requests.answers import QUESTIONS
from fivefold.requests.commands import Question
from fivefold.web import worker
from fivefold.web.copies import write_copies
from fivefold.web.pages.ask import REPLIES, AskPage, render_replies
from fivefold.web.pages.stream import FAILED, Stream, format_event
from fivefold.web.question import AskQuestion
from fivefold.web.site import WebServer
from tests.event_loop import run_in_thread
from tests.selection import mark_share
from tests.web.test_copies import run_command

SMALL: dict[str, Any] = {"model": "nano", "machine": "h100:2", "gbs": 8, "seq": 512}
MORE = {"tokens": "2e9", "price": ["2.5"], "assume": ["failures=1"]}


def ask(folder: Path, asked: AskPage) -> list[Any]:
    request = {"question": asked.convert(AskPage).model_dump(mode="json"), "root": str(folder), "local": "none"}
    for name in ("question", "run"):
        request["question"].pop(name)
    return REPLIES.validate_python(worker.VERBS[f"ask {asked.question}"](request, lambda *done: None))


def test_the_page_has_every_question() -> None:
    assert set(QUESTIONS) == set(get_args(Question))


@pytest.mark.slow
@pytest.mark.filterwarnings("default::fivefold.errors.UsageWarning")
@pytest.mark.parametrize("question", mark_share(3, QUESTIONS))
def test_answers_are_those_of_the_copied_command(client: TestClient, folder: Path, question: str) -> None:
    more = MORE | {"layout": "dp2 zero1 mbs1"} | ({"deadline": "30d"} if question == "tokens" else {})
    asked = AskPage(**SMALL | more | {"question": question})
    replies = ask(folder, asked)
    plain = [reply.model_dump(mode="json") for reply in replies]
    copies = write_copies(asked, "ask")
    assert run_command(copies.command) == plain
    names: dict[str, Any] = {}
    exec(copies.python, names)
    assert [reply.model_dump(mode="json") for reply in names["answer"]] == plain
    response = client.get(f"/api/ask/{question}", params=SMALL | more)
    assert response.status_code == 200
    assert response.json() == plain
    text = render_replies(asked, replies, plan_fields={})
    assert text.count("<table") == {"run": 4, "tokens": 4, "sequence": 2}.get(question, 1)
    for url in re.findall(r'href="([^"]+)"', text):
        answer = client.get(url.replace("&amp;", "&"))
        assert answer.status_code == 200
        assert 'class="mistake"' not in answer.text


def test_changes_of_the_job_do_not_link_to_a_plan_without_them(folder: Path) -> None:
    asked = AskPage(**SMALL | {"question": "changes", "layout": "dp2 zero1 mbs1"})
    replies = ask(folder, asked)
    text = render_replies(asked, replies, plan_fields={})
    of_layout = [reply for reply in replies if reply.layout != "dp2 zero1 mbs1"]
    assert 0 < text.count('<a href="/plan') == len(of_layout) < len(replies)


def test_the_longest_sequence_with_tensors_in_host_memory_links_to_its_plan(folder: Path) -> None:
    asked = AskPage(**SMALL | {"question": "sequence", "layout": "dp2 zero1 mbs1"})
    (lengths,) = ask(folder, asked)
    layout = "dp2 zero1 mbs1 offload=activations"
    offloaded = lengths.answer.replace(question="offloaded", layout=layout, value=lengths.answer.value + 256)
    text = render_replies(asked, [lengths.replace(offloaded=offloaded)], plan_fields={})
    plans = [AskPage(**dict(parse_qsl(urlsplit(unescape(url)).query))) for url in re.findall(r'href="([^"]+)"', text)]
    rows = (lengths.longest, offloaded, lengths.answer)
    assert [(plan.layout, plan.seq) for plan in plans] == [(row.layout, int(row.value)) for row in rows]


def test_an_answer_that_cannot_be_shown_is_one_line_and_a_traceback(tmp_path: Path) -> None:
    site = WebServer(tmp_path, local=tmp_path / "none")

    def fail(*_: Any) -> str:
        raise LookupError("a row without a link")

    asked = AskPage(**SMALL | {"question": "micro-batch", "layout": "dp2"})
    events = Stream(site, "ask micro-batch").answer(asked.convert(AskQuestion), fail).body_iterator
    read = list[Any]()

    async def read_all() -> None:
        async for event in events:
            read.append(event)

    with pytest.raises(LookupError):
        run_in_thread(asyncio.run, read_all())
    assert read[-1] == format_event("mistake", FAILED)


def test_a_chosen_question_is_answered(page: Any) -> None:
    from playwright.sync_api import expect

    from tests.web.browser import is_within_window, list_violations

    page.goto("/ask?model=nano&machine=h100:2&gbs=8&seq=512")
    field = page.locator("input[name=layout]")
    field.fill("dp2 zero1 mbs1")
    page.get_by_label("question").select_option("run")
    expect(page.locator("input[name=tokens]")).to_be_visible()
    expect(field).to_have_value("dp2 zero1 mbs1")
    expect(page.locator("#answer .card")).to_have_count(0)
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(page.locator("#answer")).to_contain_text("Goodput by checkpoint interval")
    assert list_violations(page) == []
    old = page.get_by_text("the answer to the question before your last change; Ask gives the new one")
    expect(old).to_be_hidden()
    page.locator("input[name=gbs]").fill("16")
    expect(old).to_be_visible()
    assert list_violations(page) == []
    page.locator("input[name=gbs]").fill("8")
    expect(old).to_be_hidden()
    page.locator("input[name=gbs]").fill("16")
    page.get_by_role("button", name="Ask", exact=True).click()
    page.wait_for_url(re.compile("gbs=16"))
    expect(old).to_be_hidden()
    expect(page.locator("#answer")).to_contain_text("Goodput by checkpoint interval")
    page.get_by_label("question").select_option("gpus")
    expect(page.locator("input[name=tokens]")).to_have_count(0)
    expect(field).to_have_count(0)
    page.go_back()
    expect(page.locator("#answer")).to_contain_text("Goodput by checkpoint interval")
    expect(page.get_by_label("question")).to_have_value("run")
    page.set_viewport_size({"width": 390, "height": 800})
    assert is_within_window(page)
    page.get_by_label("question").select_option("micro-batch")
    page.wait_for_url(re.compile("question=micro-batch"))
    page.get_by_role("button", name="Ask", exact=True).click()
    page.wait_for_url(re.compile("(?=.*question=micro-batch).*run=1"))  # from now on the former answer is gone
    page.locator("#answer td a").first.click()
    page.wait_for_url(re.compile("/plan.*layout=dp2"))


@pytest.mark.processes
def test_an_answer_names_the_control_for_a_price_and_no_batch_that_it_chooses(client: TestClient) -> None:
    """It said of a missing price: “dollars per GPU and hour” DOLLARS per GPU hour."""
    asked = SMALL | {"layout": "dp2"}
    run = client.get("/ask/events", params=asked | {"question": "run"}).text
    assert "no price is known; give one with \\u201cdollars per GPU and hour\\u201d, such as 2.2" in run
    del asked["gbs"]
    batch = client.get("/ask/events", params=asked | {"question": "batch"}).text
    assert "global batch 8" not in batch
    assert "Global batches of dp2" in batch

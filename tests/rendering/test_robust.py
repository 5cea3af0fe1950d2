"""What a layout loses, as text, as HTML and on the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.planner.search import search
from fivefold.rendering import html
from fivefold.rendering.robust import summarize
from fivefold.rendering.search import render_page
from fivefold.results.search_result import Regret, Robustness, ScenarioResult, SearchResult
from fivefold.web.pages.search import SearchPage, render_result
from fivefold.web.site import WebServer
from tests.planner.search.test_search import FEW, NODE, SMALL
from tests.rendering.test_search import print_page

SCENARIOS = (
    ScenarioResult(name="as predicted", source="", best="dp8 zero1 mbs1", best_seconds=1.0, regret=0.01),
    ScenarioResult(name="one rank 8 % slower", source="arXiv:1", best="dp8 zero0 mbs1", best_seconds=1.1, regret=0.034),
)
ROWS = (
    Regret(layout="dp8 zero0 mbs1", note="", step_seconds=1.01, memory_bytes=2**30, expected=0.022, worst=0.034,
           worst_scenario="one rank 8 % slower"),
    Regret(layout="dp8 zero1 mbs1", note="the fastest", step_seconds=1.0, memory_bytes=2**29, expected=None, worst=None,
           worst_scenario="one rank 8 % slower"),
)  # fmt: skip


@pytest.fixture(scope="module")
def search_result() -> SearchResult:
    plain = search(model=SMALL, machine=NODE, job=FEW, top=2, axes=("tp",), placements=False, recomputations=("none",))
    return plain.replace(by="robust", robust=Robustness(scenarios=SCENARIOS, rows=ROWS))


def test_text_html_and_page_show_where_time_is_lost(search_result: SearchResult, tmp_path: Path) -> None:
    asked = SearchPage(model="llama3-8b", machine="h100:8", by="robust")
    for told in (
        print_page(render_page(search_result), width=160),
        html.render_search(search_result),
        render_result(WebServer(tmp_path, local=tmp_path), asked, search_result),
    ):
        for words in (
            "dp8 zero0 mbs1",
            "3.4%",
            "2.2%",
            "one rank 8 % slower",
            "does not fit",
            "the fastest",
            "arXiv:1",
        ):
            assert words in told, words
    assert search_result.table()[0]["step.layout"] == search_result.best[0].step.layout


def test_robust_result_is_summarized_in_one_line() -> None:
    assert summarize(Robustness(scenarios=SCENARIOS, rows=ROWS)) == (
        "step time 1.01 s, peak memory 1.00 GiB; at worst 3.4% slower than the best layout of a scenario "
        "(one rank 8 % slower), 2.2% on average over 2"
    )
    assert "and no other layout does" in summarize(Robustness(scenarios=SCENARIOS, rows=ROWS[1:]))
    best = ROWS[0].replace(worst=0.0, expected=0.0)
    assert summarize(Robustness(scenarios=SCENARIOS, rows=(best,))).endswith("the best in each of 2 scenarios")

"""A line or column that is added to a view is shown by the terminal, in HTML and on the page, with no other change.

``tests/architecture/additions`` adds columns to the operations of a step and to a sweep.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fivefold
from fivefold.planner.search import search as run_search
from fivefold.rendering import html, step_view, table
from fivefold.rendering import search as search_view
from fivefold.rendering.grid import Column, Grid, find_tone, make_grid
from fivefold.web.pages.search import SearchPage, render_result
from fivefold.web.site import WebServer
from tests.planner.search.test_search import FEW, NODE, SMALL
from tests.printed import to_text

pytest.importorskip("fastapi", reason="the page needs the extra web")
from starlette.testclient import TestClient

from fivefold.web.app import create

ADDED = "an added column"


@pytest.fixture
def read_page(tmp_path: Path) -> Callable[..., str]:
    """Return the page at an address of a server over ``tmp_path``."""

    def read(address: str, **values: Any) -> str:
        with TestClient(create(tmp_path, local=tmp_path / "none"), base_url="http://127.0.0.1:1") as client:
            return client.get(address, params=values).text

    return read


@pytest.mark.slow
def test_an_added_key_figure_is_shown_in_terminal_html_and_web_page(
    monkeypatch: pytest.MonkeyPatch, read_page: Callable[..., str]
) -> None:
    work = step_view.list_work
    monkeypatch.setattr(step_view, "list_work", lambda step: (*work(step), (ADDED, f"{step.world} ranks of it")))
    step = fivefold.predict("nano", "h100:2", "dp2", seq=256, gbs=4)
    page = read_page("/plan", model="nano", machine="h100:2", layout="dp2", seq=256, gbs=4)
    for text in (to_text(table.step(step)), html.render_step(step), page):
        assert ADDED in text
        assert "2 ranks of it" in text


def test_an_added_column_of_a_search_is_shown_in_terminal_html_and_web_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    column: Column[Any] = Column(ADDED, lambda row: row[1].step.world, lambda ranks: f"{ranks} ranks of it")
    monkeypatch.setattr(search_view, "RANKED", (*search_view.RANKED, column))
    result = run_search(
        model=SMALL, machine=NODE, job=FEW, top=2, axes=("tp",), placements=False, recomputations=("none",)
    )
    page = render_result(WebServer(tmp_path, local=tmp_path), SearchPage(model="llama3-8b", machine="h100:8"), result)
    for text in (to_text(search_view.render_page(result), width=200), html.render_search(result), page):
        assert ADDED in text
        assert f"{result.best[0].step.world} ranks of it" in text


def test_wide_columns_are_for_pages_and_empty_ones_for_none() -> None:
    columns: tuple[Column[int], ...] = (
        Column("number", lambda number: number),
        Column("square", lambda number: number**2, is_wide=True),
        Column("none", lambda number: None, is_wide=True),
    )
    grid = make_grid(columns, [3, 4])
    assert grid.headings == ("number", "square")
    assert grid.rows == (("3", "9"), ("4", "16"))
    assert grid.values == ((3, 9), (4, 16))
    assert "square" not in to_text(grid)
    assert make_grid(columns, [3]).drop_columns(["number"]) == Grid(("square",), (("9",),), (), (), ((9,),), (3,))


def test_a_missing_value_is_a_dash_and_a_colour_a_tone() -> None:
    columns: tuple[Column[float | None], ...] = (Column("share", lambda share: share, "{:.0%}".format),)
    assert make_grid(columns, [None, 0.5]).rows == (("–",), ("50%",))
    from rich.text import Text

    tones = [
        find_tone(cell) for cell in ("x", Text("x"), Text("x", "bold green"), Text("x", "yellow"), Text("x", "red"))
    ]
    assert tones == ["", "", "good", "warn", "bad"]

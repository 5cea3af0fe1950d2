"""A column that is added to a view is shown by the terminal, in HTML and on the page, with no other change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fivefold
from fivefold.layout.spec import Layout
from fivefold.planner.search import search as run_search
from fivefold.rendering import html, report, step_view, table
from fivefold.rendering import search as search_view
from fivefold.rendering.grid import Column, Grid, find_tone, make_grid
from fivefold.rendering.sweep import table as sweep_view
from fivefold.results.sweep_row import Row, of_layout, of_step
from fivefold.step import Operation
from fivefold.web.pages.search import SearchPage, shown
from fivefold.web.site import Site
from tests.planner.search.test_search import FEW, NODE, SMALL
from tests.printed import to_text

pytest.importorskip("fastapi", reason="the page needs the extra web")
from starlette.testclient import TestClient

from fivefold.sweeps.rows_file import write
from fivefold.web.app import create

ADDED = "an added column"


@pytest.fixture
def read_page(tmp_path: Path) -> Callable[..., str]:
    """Return the page at an address of a server over ``tmp_path``."""

    def read(address: str, **values: Any) -> str:
        with TestClient(create(tmp_path, local=tmp_path / "none"), base_url="http://127.0.0.1:1") as client:
            return client.get(address, params=values).text

    return read


def test_a_column_of_a_step_is_shown_everywhere(monkeypatch: pytest.MonkeyPatch, read_page: Callable[..., str]) -> None:
    column = Column[Operation](ADDED, lambda op: op.moved_bytes, lambda size: f"{size} moved")
    monkeypatch.setattr(step_view, "OPERATIONS", (*step_view.OPERATIONS, column))
    step = fivefold.predict("nano", "h100:2", "dp2", seq=256, gbs=4)
    pages = (
        to_text(table.operations(step), width=160),
        "".join(report.operations(step)),
        read_page("/plan", model="nano", machine="h100:2", layout="dp2", seq=256, gbs=4),
    )
    for page in pages:
        assert ADDED in page
        assert f"{step.operations[0].moved_bytes} moved" in page


def test_a_line_of_work_is_shown_everywhere(monkeypatch: pytest.MonkeyPatch, read_page: Callable[..., str]) -> None:
    work = step_view.list_work
    monkeypatch.setattr(step_view, "list_work", lambda step: (*work(step), (ADDED, f"{step.world} ranks of it")))
    step = fivefold.predict("nano", "h100:2", "dp2", seq=256, gbs=4)
    page = read_page("/plan", model="nano", machine="h100:2", layout="dp2", seq=256, gbs=4)
    for text in (to_text(table.step(step)), html.step(step), page):
        assert ADDED in text
        assert "2 ranks of it" in text


def test_a_column_of_a_search_is_shown_everywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    column: Column[Any] = Column(ADDED, lambda row: row[1].step.world, lambda ranks: f"{ranks} ranks of it")
    monkeypatch.setattr(search_view, "RANKED", (*search_view.RANKED, column))
    result = run_search(model=SMALL, machine=NODE, job=FEW, top=2, axes=("tp",), placements=False,
                        recomputations=("none",))  # fmt: skip
    page = shown(Site(tmp_path, local=tmp_path), SearchPage(model="llama3-8b", machine="h100:8"), result)
    for text in (to_text(search_view.page(result), width=200), html.search(result), page):
        assert ADDED in text
        assert f"{result.best[0].step.world} ranks of it" in text


def test_a_column_of_a_sweep_is_shown_everywhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, read_page: Callable[..., str]
) -> None:
    monkeypatch.setattr(
        sweep_view, "ROWS", (*sweep_view.ROWS, Column[Row](ADDED, lambda row: row.zero, lambda zero: f"stage {zero}"))
    )
    step = fivefold.predict("nano", "h100:2", "dp2 zero1 mbs1", seq=256, gbs=4)
    row = Row.model_validate(
        {"model": "nano", "machine": "h100", "ranks": 2, "sequence": 256, "batch": 4, "precision": "bf16",
         "stack": "fivefold", "status": "fits", **of_layout(Layout.parse("dp2 zero1 mbs1")), **of_step(step)}
    )  # fmt: skip
    write([row], tmp_path / "rows.jsonl")
    pages = (
        to_text(sweep_view.page([row])),
        "".join(report.of_rows([row])),
        fivefold.display.Rows([row])._repr_html_(),
        read_page("/sweep", file="rows.jsonl"),
    )
    for page in pages:
        assert ADDED in page
        assert "stage 1" in page


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
    assert make_grid(columns, [3]).without(["number"]) == Grid(("square",), (("9",),), (), (), ((9,),))


def test_a_missing_value_is_a_dash_and_a_colour_a_tone() -> None:
    columns: tuple[Column[float | None], ...] = (Column("share", lambda share: share, "{:.0%}".format),)
    assert make_grid(columns, [None, 0.5]).rows == (("–",), ("50%",))
    from rich.text import Text

    tones = [
        find_tone(cell) for cell in ("x", Text("x"), Text("x", "bold green"), Text("x", "yellow"), Text("x", "red"))
    ]
    assert tones == ["", "", "good", "warn", "bad"]

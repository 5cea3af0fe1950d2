from __future__ import annotations

import pytest
from rich.text import Text

from fivefold.rendering.grid import Grid
from tests.printed import to_text

GRID = Grid(("name", "size"), (("a name of many words", "123,456,789"), ("b[0]", Text("7"))), words=("name",))


def test_wide_enough_is_columns() -> None:
    lines = to_text(GRID, width=60).splitlines()
    assert lines[0].split() == ["name", "size"]
    assert lines[2] == "a name of many words  123,456,789"
    assert lines[3].split() == ["b[0]", "7"]


def test_words_fold_before_numbers_do() -> None:
    lines = to_text(GRID, width=22).splitlines()
    assert lines[2].split() == ["a", "name", "123,456,789"]


def test_numbers_with_their_unit_are_not_cut() -> None:
    units = Grid(("name", "time"), (("words", "31.20 s (+3.1%)"),), words=("name",))
    assert "31.20 s (+3.1%)" in to_text(units, width=22)
    assert "time 31.20 s (+3.1%)" in to_text(units, width=20)  # a card


def test_too_narrow_is_cards() -> None:
    text = to_text(GRID, width=17)
    assert "size 123,456,789" in text
    assert "size 7" in text


@pytest.mark.parametrize("width", [1, 2, 5, 11])
def test_any_width_prints(width: int) -> None:
    assert all(len(line) <= width for line in to_text(GRID, width=width).splitlines())


def test_no_rows() -> None:
    assert "name" in to_text(Grid(("name",), (), words=("name",)))

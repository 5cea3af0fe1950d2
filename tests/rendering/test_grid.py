from __future__ import annotations

import pytest
from rich.text import Text

from fivefold.rendering.grid import Grid
from fivefold.rendering.sections import AnswerSection, render_sections
from tests.printed import to_text

GRID = Grid(("name", "size"), (("a name of many words", "123,456,789"), ("b[0]", Text("7"))), words=("name",))


def test_a_wide_table_is_printed_in_columns() -> None:
    lines = to_text(GRID, width=60).splitlines()
    assert lines[0].split() == ["name", "size"]
    assert lines[2] == "a name of many words  123,456,789"
    assert lines[3].split() == ["b[0]", "7"]


def test_text_wraps_before_numbers_do() -> None:
    lines = to_text(GRID, width=22).splitlines()
    assert lines[2].split() == ["a", "name", "123,456,789"]


def test_no_word_is_cut_where_another_column_can_wrap() -> None:
    cells = ("dp64 ep32 zero3 mbs1 ac=moe", "112.87 GiB", "mixer.core.scan")
    grid = Grid(("layout", "peak", "most time in"), (cells,), words=("layout", "most time in"))
    assert "mixer.core.scan" in to_text(grid, width=36)


def test_numbers_with_their_unit_are_not_cut() -> None:
    units = Grid(("name", "time"), (("words", "31.20 s (+3.1%)"),), words=("name",))
    assert "31.20 s (+3.1%)" in to_text(units, width=22)
    assert "time 31.20 s (+3.1%)" in to_text(units, width=20)  # a card


def test_a_table_too_wide_for_the_terminal_is_printed_as_cards() -> None:
    text = to_text(GRID, width=17)
    assert "size 123,456,789" in text
    assert "size 7" in text


@pytest.mark.parametrize("width", [1, 2, 5, 11])
def test_a_table_is_printed_at_any_width(width: int) -> None:
    assert all(len(line) <= width for line in to_text(GRID, width=width).splitlines())


def test_a_table_without_rows_shows_its_headings() -> None:
    assert "name" in to_text(Grid(("name",), (), words=("name",)))


def test_many_rows_keep_the_columns_that_fit_and_name_the_others() -> None:
    headings = ("source", "cases", "bias", "mean", "worst", "regret")
    cells = ("s0", "12", "+1.5%", "3.5%", "+12.0%", "0.5%")
    grid = Grid(headings, (cells,) * 3, words=("source",))
    full = to_text(grid, width=60).splitlines()
    assert full[0].split() == list(headings)
    assert len(full) == 2 + 3
    narrow = to_text(grid, width=32).splitlines()
    assert narrow[0].split() == list(headings[:4])
    assert narrow[2].split() == list(cells[:4])
    assert " ".join(" ".join(narrow[5:]).split()) == "too narrow to show: worst, regret"
    for cards in (to_text(grid, width=16), to_text(Grid(headings, (cells,), words=("source",)), width=32)):
        assert "not shown" not in cards
        assert "regret" in cards


def test_columns_are_as_wide_as_headings_of_two_words() -> None:
    headings = ("source", *(f"left out {at}" for at in range(6)))
    grid = Grid(headings, (("kempnerforge", *["1.4%"] * 6),) * 3, words=("source",))
    lines = to_text(grid, width=60).splitlines()
    assert len(lines) == 2 + 3 + 1  # every row on one line
    assert lines[0].split() == ["source", *" ".join(headings[1:4]).split()]
    assert lines[2].split()[0] == "kempnerforge"


def test_sections_have_a_blank_line_between_them_and_none_before_the_first() -> None:
    sections = [AnswerSection((Text("one"),), "First"), AnswerSection((Text("two"),), "Second", "a remark")]
    assert to_text(render_sections(sections)).split("\n")[:5] == ["First", "one", "", "Second  a remark", "two"]

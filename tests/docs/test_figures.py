"""What counts as a figure of a page."""

from __future__ import annotations

import pytest

from tests.docs.figures import list_code, list_figures


@pytest.mark.parametrize(
    ("text", "figures"),
    [
        ("half within 4.3%, nine tenths within 12 %.", ["4.3%", "12 %"]),
        ("takes 1.50 GiB, 12.3 ms and 2 min 05 s", ["1.50 GiB", "12.3 ms", "2 min", "05 s"]),
        ("| `dp2 tp8 zero3/2` | 1,234 runs | +3.1% |", ["dp2", "tp8", "zero3/2", "1,234", "+3.1%"]),
        ("no figure here", []),
    ],
)
def test_figures_are_words_with_digits_and_their_units(text: str, figures: list[str]) -> None:
    assert list_figures(text) == figures


def test_only_changed_figures_and_units_count_as_a_change_of_a_page() -> None:
    assert list_figures("It takes 3.2 s, which is long.") == list_figures("A step: 3.2 s")
    assert list_figures("3.2 s") != list_figures("3.2 ms")
    assert list_figures("3.2 s") != list_figures("3.3 s")


def test_text_between_backticks_is_code() -> None:
    assert list_code("take `dp2` or `--where 'tp=1'`") == ["dp2", "--where 'tp=1'"]

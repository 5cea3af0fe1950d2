"""Numbers with units, as options take them."""

from __future__ import annotations

import pytest

from fivefold.requests.words import parse_length


def test_lengths_are_numbers_or_multiples_of_1024_and_1048576() -> None:
    assert [parse_length(text) for text in ("8192", "8k", "32K", "1M")] == [8192, 8192, 32_768, 2**20]
    assert parse_length(512) == 512  # from Python


@pytest.mark.parametrize("text", ["", "k", "8kk", "8.5k", "-8", "٨"])
def test_another_text_is_an_error_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="must be a whole number of tokens, such as 8192 or 8k"):
        parse_length(text)

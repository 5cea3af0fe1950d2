"""The documents are in the field's terms, in lines that fit."""

from __future__ import annotations

import pytest

from tests.docs.prose import find_faults, list_faults, list_pages


def test_documents_have_no_private_words_and_no_long_lines() -> None:
    pages = list_pages()
    assert len(pages) > 100
    assert list_faults(pages) == []


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("What is let go and computed again", ["let go"]),
        ("Nobody's shards lie beside the whole weight.", ["Nobody's", "beside", "whole"]),
        ("The rehearsal is quicker.", ["rehearsal", "quicker"]),
        ("A whole number, `beside`, and a [link](beside/whole.md)", []),
        ("```sh\nrehearse beside\n```\nplain", []),
        ("x " * 61, ["122 columns"]),
        ("| a table | " + "x" * 120 + " |", []),
    ],
)
def test_private_words_are_found_in_text_and_not_in_code(text: str, faults: list[str]) -> None:
    assert [fault for _, fault in find_faults(text)] == faults

"""Frees the syntax trees of all files, a few million objects, after the last test that looks through them."""

from __future__ import annotations

import pytest

from tests.architecture.sources import parse_file, read_text


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Forget all files if the next test is one of another folder."""
    if nextitem is None or nextitem.path.parent != item.path.parent:
        parse_file.cache_clear()
        read_text.cache_clear()

"""Runs a command line in the process of the test."""

from __future__ import annotations

import pytest

from fivefold import cli


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> int | str | None:
    """Run ``fivefold WORDS`` and return its exit code."""
    monkeypatch.setattr("sys.argv", ["fivefold", *map(str, words)])
    with pytest.raises(SystemExit) as done:
        cli.main()
    return done.value.code

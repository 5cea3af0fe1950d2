"""Runs a command line in the process of the test."""

from __future__ import annotations

import pytest

from fivefold.cli import command_line


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> int | str | None:
    """Run ``fivefold WORDS`` and return its exit code."""
    monkeypatch.setattr("sys.argv", ["fivefold", *map(str, words)])
    with pytest.raises(SystemExit) as done:
        command_line.main()
    return done.value.code

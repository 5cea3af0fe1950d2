"""The bar of a long command shows how much is done in one line, however long the name of what it does is."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console
from rich.text import Text

from fivefold.rendering import progress

LAYOUT = "best so far 24.74 s dp64 tp2 pp16 ep64 v2 zero1 dualpipev mbs1 ac=norm+act"


@pytest.mark.parametrize(
    ("what", "done", "total", "count"),
    [(LAYOUT, 2_000_000_000, 3_851_856_448, "52 %"), ("matmuls", 30, 120, "30/120"), ("MiB", 1234, 0, "1,234")],
)
def test_a_bar_is_one_line_with_its_count(
    monkeypatch: pytest.MonkeyPatch, what: str, done: int, total: int, count: str
) -> None:
    terminal = StringIO()
    console = Console(file=terminal, force_terminal=True, width=80)
    monkeypatch.setattr(progress, "Console", lambda file: console)
    with progress.show_progress("searching") as report:
        report(what, done, total)
    lines = [Text.from_ansi(part).plain for line in terminal.getvalue().splitlines() for part in line.split("\r")]
    [shown] = {line.rstrip() for line in lines if what[:8] in line}
    assert len(shown) <= 80
    assert f" {count} " in f"{shown} "

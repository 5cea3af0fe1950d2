"""The table of docs/reference/stacks.md is the catalog; ``FIVEFOLD_FREEZE=1`` writes it anew."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from fivefold.stack.catalog import ENTRIES, STACKS
from fivefold.stack.entry import Fact

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "stacks.md"
BEGIN, END = "FIVEFOLD_FREEZE=1 -->\n", "<!-- end -->"


def facts(stated: Mapping[str, Fact]) -> str:
    return " ".join(f"`{field}={show(fact.value)}`" for field, fact in stated.items()) or "–"


def show(value: object) -> str:
    return ",".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value).lower()


def table() -> str:
    rows = [
        f"| `{name}` | {version or '–'} | {family} | {facts(stated)} | {facts(runs)} |"
        for name, version, family, stated, runs in ENTRIES
    ]
    return (
        "\n".join(("| stack | version or commit | family | does otherwise | runs |", "|---|---|---|---|---|", *rows))
        + "\n"
    )


def test_the_page_of_stacks_shows_the_catalog() -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    result, _, after = rest.partition(END)
    if os.environ.get("FIVEFOLD_FREEZE"):
        PAGE.write_text(before + BEGIN + table() + END + after, encoding="utf-8")
        result = table()
    assert result == table()


def test_the_readme_has_the_number_of_other_stacks() -> None:
    assert len(STACKS) == 1 + 19  # with ours
    assert "[19 other trainers](docs/reference/stacks.md)" in (ROOT / "README.md").read_text(encoding="utf-8")

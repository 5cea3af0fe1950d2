"""The example notebooks run, and print what they show; the cells from a training on are run by ``make endure``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.examples.notebooks import FOLDER, execute
from tests.selection import mark_share

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"), key=lambda path: (not path.name.startswith("2-"), path.name))


def read(path: Path) -> dict[str, Any]:
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return notebook


def list_texts(notebook: dict[str, Any]) -> list[str]:
    """What each cell says as text."""
    cells = [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return ["".join("".join(item.get("text") or item["data"]["text/plain"]) for item in cell) for cell in cells]


@pytest.mark.slow
@pytest.mark.parametrize("path", mark_share(len(NOTEBOOKS), NOTEBOOKS), ids=lambda path: path.name)
def test_a_notebook_shows_the_outputs_of_its_cells(path: Path) -> None:
    notebook = read(path)
    if "3-" in path.name:
        pytest.importorskip("vl_convert")
    cells = notebook["cells"]
    ends = next((at for at, cell in enumerate(cells) if "trains" in cell["metadata"].get("tags", [])), len(cells))
    notebook = notebook | {"cells": cells[:ends]}
    for now, shown in zip(list_texts(execute(notebook)), list_texts(notebook), strict=True):
        assert are_similar(now, shown), f"{shown!r} is now {now!r}: python -m tests.examples.notebooks writes them anew"


NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w])")


def are_similar(now: str, shown: str) -> bool:
    """Whether two texts have the same words, and numbers within a tenth: planner constants are set now and then."""
    numbers = [[float(item.replace(",", "")) for item in NUMBER.findall(text)] for text in (now, shown)]
    return NUMBER.sub("#", now) == NUMBER.sub("#", shown) and numbers[0] == pytest.approx(numbers[1], rel=0.1)


def test_a_cell_with_the_same_text_is_reported() -> None:
    assert are_similar("dp8 zero1: 6.60 s, 1,024 rows", "dp8 zero1: 6.53 s, 1,024 rows")
    assert not are_similar("dp8 zero1: 6.60 s", "dp8 zero1: 5.53 s")
    assert not are_similar("dp8 zero1: 6.60 s", "dp4 zero1: 6.60 s")


def test_the_three_notebooks_are_stored_with_their_outputs() -> None:
    assert len(NOTEBOOKS) == 3
    for path in NOTEBOOKS:
        notebook = read(path)
        assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
        code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
        ids = [cell["id"] for cell in notebook["cells"]]
        assert len(set(ids)) == len(ids)
        kinds = [kind for cell in code for item in cell["outputs"] for kind in item.get("data", {})]
        assert {"text/html", "image/svg+xml"} & set(kinds), "a page or a picture is shown"

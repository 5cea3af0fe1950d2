"""The planner's book, and the guide to Python, prove themselves: the python blocks of each chapter run, in order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BOOK = ROOT / "docs" / "how-a-step-costs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    "chapter", [*sorted(BOOK.glob("*.md")), ROOT / "docs" / "python.md"], ids=lambda path: path.name
)
def test_what_the_chapter_asserts_holds(chapter: Path) -> None:
    text = chapter.read_text(encoding="utf-8")
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) == text.count("```python"), "a python block is not closed, or is indented"
    assert not blocks or "assert " in text, "a block that asserts nothing proves nothing"
    namespace: dict[str, object] = {"__name__": chapter.stem}
    for block in blocks:
        before = text.count("\n", 0, block.start(1))  # so that a traceback names the line of the chapter
        exec(compile("\n" * before + block[1], str(chapter), "exec"), namespace)


def test_the_book_has_chapters() -> None:
    assert list(BOOK.glob("*.md")), f"{BOOK} is empty"

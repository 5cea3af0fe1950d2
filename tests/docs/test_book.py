"""The planner's book, and the guide to Python, prove themselves: the python blocks of each chapter run, in order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BOOK = ROOT / "docs" / "explanation" / "how-a-step-costs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    "chapter", [*sorted(BOOK.glob("*.md")), ROOT / "docs" / "how-to" / "python.md"], ids=lambda path: path.name
)
def test_assertions_in_the_code_of_a_chapter_hold(chapter: Path) -> None:
    text = chapter.read_text(encoding="utf-8")
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) == text.count("```python"), "a python block is not closed, or is indented"
    assert not blocks or "assert " in text, "a block that asserts nothing proves nothing"
    namespace: dict[str, object] = {"__name__": chapter.stem}
    for block in blocks:
        before = text.count("\n", 0, block.start(1))  # so that a traceback names the line of the chapter
        exec(compile("\n" * before + block[1], str(chapter), "exec"), namespace)


@pytest.mark.parametrize("page", ["README.md", "docs/how-to/watch.md"])
def test_code_blocks_of_a_page_run_with_a_small_training_loop(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a small model, its optimizer, batches and loss in their names."""
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(8, 8)
    namespace = {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "batches": [torch.ones(4, 8)] * 4,
        "loss": lambda model, batch: model(batch).square().mean(),
    }
    (block,) = BLOCK.finditer((ROOT / page).read_text(encoding="utf-8"))
    exec(compile(block[1], page, "exec"), namespace)
    assert page == "README.md" or (tmp_path / "runs" / "mine" / "step.json").exists()


def test_the_guide_has_chapters() -> None:
    assert list(BOOK.glob("*.md")), f"{BOOK} is empty"

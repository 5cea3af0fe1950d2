"""Each tutorial, the README and the opening page: the commands run, and the figures shown are those that they print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.tutorials import PAGES, ROOT, find_columns, list_examples, list_fixed_figures, run_page, select_lines
from tests.selection import mark_share


def has_slow(page: Path) -> bool:
    """Return whether some commands of a page are left to ``make endure``."""
    return any(example.is_slow for example in list_examples(page.read_text(encoding="utf-8")))


TUTORIALS = [page for page in PAGES if page.parent.name == "getting-started"]
FIGURES = ["55.92 GiB", "80", "1,358", "12"]
OUTPUT = "a\nb 1\n\nc 2\nd 3\ne 4\n\nf 5\n"


@pytest.mark.parametrize(
    ("page", "with_slow"),
    [
        *mark_share(2, [pytest.param(page, False, id=page.stem) for page in PAGES]),
        *(pytest.param(page, True, id=f"{page.stem}-slow", marks=pytest.mark.long) for page in PAGES if has_slow(page)),
    ],
)
def test_a_page_shows_what_its_commands_print(page: Path, with_slow: bool) -> None:
    for example, lines in run_page(page, with_slow=with_slow):
        if example.output:
            now = list_fixed_figures(lines, is_measured=example.is_measured)
            shown = list_fixed_figures(example.output["body"].splitlines(), is_measured=example.is_measured)
            assert shown == now, f"figures have changed: python -m tests.docs.tutorials --slow {page.stem}"


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_has_its_required_sections(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "\nAfter this page you can" in text
    assert "\n## What to read next\n" in text
    assert len(list(list_examples(text))) > 1
    widest = max(len(line) for block in re.findall(r"^```.*?^```", text, re.M | re.S) for line in block.splitlines())
    assert widest <= find_columns(page)


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_python_code_in_a_tutorial_is_taken_from_the_examples(page: Path) -> None:
    """The tutorials show excerpts of ``examples/``, which run."""
    scripts = {
        line.strip() for file in (ROOT / "examples").glob("*.py") for line in file.read_text("utf-8").splitlines()
    }
    for block in re.findall(r"(?<!-->\n)^```python\n(.*?)^```", page.read_text("utf-8"), flags=re.M | re.S):
        assert [line for line in block.splitlines() if line.strip() not in scripts | {"...", ""}] == []


@pytest.mark.parametrize(
    ("shown", "lines"),
    [
        ("", ["a", "b 1", "", "c 2", "d 3", "e 4", "", "f 5"]),
        ("1", ["a", "b 1", "…"]),
        ("1 2", ["a", "b 1", "", "c 2", "d 3", "e 4", "…"]),
        ("1 3", ["a", "b 1", "", "…", "", "f 5"]),
        ("2:1-2", ["…", "", "c 2", "d 3", "…"]),
        ("1:1-1 2:2-3 3", ["a", "…", "d 3", "e 4", "", "f 5"]),
    ],
)
def test_the_selected_paragraphs_of_an_output_are_shown(shown: str, lines: list[str]) -> None:
    assert select_lines(OUTPUT, shown) == lines


def test_changed_figures_are_detected_and_changed_words_are_not() -> None:
    before, after = (
        ["peak 55.92 GiB of 80", "1,358 layouts in 1.09 s: 12 evaluated"],
        ["memory 55.92 GiB of 80", "1,358 layouts in 2 s: 12 evaluated"],
    )
    assert list_fixed_figures(before, is_measured=False) == list_fixed_figures(after, is_measured=False) == FIGURES
    evaluated = [before[0], before[1].replace("12 evaluated", "7 evaluated")]
    assert list_fixed_figures(evaluated, is_measured=False) != FIGURES
    assert list_fixed_figures(["peak 55.93 GiB of 80"], is_measured=False) != list_fixed_figures(
        before[:1], is_measured=False
    )
    assert list_fixed_figures(["parameters 4.85 M 4.85 M exact", "step 3 s"], is_measured=True) == ["4.85 M", "4.85 M"]


def test_the_readme_is_one_screen_and_its_first_lines_say_what_is_not_proven() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120
    assert [line for line in lines if len(line) > 120] == []
    assert "No GPU has run" in " ".join(lines[:20])
    assert {f"docs/getting-started/{page.name}" for page in TUTORIALS} <= set(
        re.findall(r"\]\(([^)]+)\)", "".join(lines))
    )

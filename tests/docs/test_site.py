"""The site without its tool: every page has a place, every link leads somewhere, every command is there."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from fivefold.cli import app
from tests.api.standalone import check_standalone

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", flags=re.MULTILINE | re.DOTALL)
MADE = {"index.md", "contributing.md", "changelog.md", "reference/cheat-sheet.md"}  # when the site is built
COMMANDS: Any = get_command(app)


@pytest.fixture(scope="module")
def site() -> Any:
    sys.path.insert(0, str(DOCS / "site"))
    try:
        return importlib.import_module("pages")
    finally:
        sys.path.remove(str(DOCS / "site"))


def test_every_page_has_one_place_in_the_navigation(site: Any) -> None:
    own = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    placed = [name for names in site.order_pages(own).values() for name in names]
    assert len(placed) == len(set(placed))
    assert set(placed) == own | MADE, "a page without a place, or a place without a page"


def test_docs_have_four_parts() -> None:
    """A page stands under a tutorial, a how-to, the reference or an explanation, but for three at the top."""
    top = {path.relative_to(DOCS).parts[0] for path in DOCS.rglob("*.md")}
    folders = {"getting-started", "how-to", "reference", "explanation"}
    assert top - folders <= {"index.md", "notation.md"}


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("quick start", "index.md"), ("FSDP", "how-to/fsdp.md"), ("HSDP", "how-to/fsdp.md"), ("LoRA", "how-to/lora.md"),
        ("MFU", "explanation/mfu.md"), ("out of memory", "how-to/troubleshooting.md"),
        ("glossary", "reference/glossary.md"), ("configuration", "reference/configuration.md"),
    ],
)  # fmt: skip
def test_words_that_are_searched_for_stand_in_a_heading_of_their_page(words: str, page: str) -> None:
    """The search of the site ranks headings first."""
    headings = re.findall(r"^##? (.+)$", (DOCS / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert any(words.lower() in heading.lower() for heading in headings)


def anchors(path: Path) -> set[str]:
    """What can be linked to in a page: its headings, as code hosts name them."""
    result: set[str] = set()
    for line in CODE.sub(lambda block: block[0] if block[0].count("\n") == 0 else "", path.read_text()).splitlines():
        if line.startswith("#"):
            words = re.sub(r"[^\w\- ]", "", line.lstrip("#").strip().lower().replace("`", ""))
            result.add(words.replace(" ", "-"))
    return result


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_in_a_page_have_existing_targets(page: Path) -> None:
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'src="([^"]+)"', text):
        place, _, anchor = target.partition("#")
        if "://" in place:
            continue
        path = (page.parent / place).resolve() if place else page
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
            broken.append(target)
    assert broken == []


GENERATED = re.compile(
    r"reference/(commands|configuration|results|python|models|machine-catalog|keys)\.md|how-to/configs/published\.md|"
    r"explanation/(planning-questions\.md|measurements/|how-a-step-costs/(published|schedules)\.md)"
)


def test_prose_is_wrapped() -> None:
    """No line of a page that is written by hand is over 120 columns, except tables, pictures and code."""
    long = []
    for page in DOCS.rglob("*.md"):
        name, fenced = page.relative_to(DOCS).as_posix(), False
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            fenced ^= line.lstrip().startswith("```")
            free = fenced or line.lstrip().startswith(("|", "!", "#", "<", "$$")) or " " not in line.strip()
            if len(line) > 120 and not free and not GENERATED.match(name):
                long.append(f"{name}:{number}")
    assert long == []


def lines(page: Path) -> list[list[str]]:
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    text = "\n".join(blocks).replace("\\\n", " ")
    return [shlex.split(line.removeprefix("$ "), comments=True) for line in text.splitlines() if "fivefold" in line]


@pytest.mark.parametrize("page", [path for path in PAGES if path.name != "CHANGELOG.md"], ids=lambda path: path.name)
def test_commands_and_options_in_a_page_exist(page: Path) -> None:
    """In shell blocks and in the text."""
    for words in [*lines(page), *inline_commands(page)]:
        if "fivefold" not in words or words[words.index("fivefold") + 1 :] == []:
            continue
        name, *rest = words[words.index("fivefold") + 1 :]
        assert name in COMMANDS.commands or name.startswith("--"), f"{page.name}: no command {name!r}"
        if name.startswith("--"):
            continue
        known = {"--help"}.union(*([*param.opts, *param.secondary_opts] for param in COMMANDS.commands[name].params))
        loose = name == "read"  # which takes a launch line of another software as it is
        strange = [word for word in rest if word.startswith("--") and word.partition("=")[0] not in known]
        assert loose or strange == [], f"{page.name}: fivefold {name}"


def inline_commands(page: Path) -> list[list[str]]:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [span.split() for span in re.findall(r"`(fivefold [^`]+)`", text)]


def test_code_blocks_have_the_class_by_which_printed_tables_scroll_on_narrow_screens(site: Any) -> None:
    assert ".language-text code" in site.CSS
    assert "pymdownx.highlight: {pygments_lang_class: true}" in site.CONFIG


def test_the_cheat_sheet_is_generated(site: Any) -> None:
    text = site.reference.write_cheat_sheet()
    check_standalone(text)
    plain = unescape(text)
    for name in (*COMMANDS.commands, "zero3/8", "--gbs", "ff.predict", "Keywords of a layout", "ac=none"):
        assert name in plain, name


def test_math_is_drawn_without_a_script(site: Any) -> None:
    pytest.importorskip("latex2mathml")
    assert "<math" in site.convert_math("so $x^2$ is")
    assert site.convert_math("`$x` costs $5") == "`$x` costs $5"


def test_every_test_that_a_page_names_exists() -> None:
    named = {
        (page, file)
        for page in PAGES
        if page.name != "CHANGELOG.md"
        for file in re.findall(r"(?<![\w:/])tests/[\w/]+\.py", page.read_text("utf-8"))  # not repository:tests/…
    }
    assert len(named) > 20
    assert [(page.name, file) for page, file in sorted(named) if not (ROOT / file).exists()] == []

"""Build the pages of the site: copy ``docs/``, put its pages in order, and write the configuration of Zensical.

    python docs/site/pages.py build/docs        then: zensical build -f build/docs/mkdocs.yml

Pages of ``docs/`` are copied unchanged, except that links that leave it become plain text and math becomes MathML.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import reference

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NAV: dict[str, list[str]] = {
    "Home": ["index.md"],
    "Getting started": [
        "getting-started/plan-a-run.md", "getting-started/fit-a-model.md", "getting-started/find-a-layout.md",
        "getting-started/train-and-compare.md", "getting-started/fine-tune.md", "getting-started/why-is-it-slow.md",
        "getting-started/why-did-it-fail.md", "getting-started/calibrate.md",
    ],
    "How-to": [
        "how-to/fsdp.md", "how-to/lora.md", "how-to/conversations.md", "how-to/preferences.md", "how-to/images.md",
        "how-to/troubleshooting.md",
        "how-to/explain.md", "how-to/traces.md",
        "how-to/doctor.md", "how-to/watch.md", "how-to/trainer-callback.md", "how-to/numerics.md", "how-to/configs/*",
        "how-to/hugging-face.md",
        "how-to/settings.md", "how-to/multi-node.md", "how-to/sweeps.md", "how-to/python.md", "how-to/web.md",
        "how-to/report.md", "how-to/assistants.md", "how-to/pictures.md", "how-to/generation.md",
    ],
    "Reference": [
        "reference/commands.md", "reference/cheat-sheet.md", "reference/configuration.md", "notation.md",
        "reference/coming-from-other-trainers.md", "reference/glossary.md", "reference/python.md",
        "reference/results.md", "reference/json.md", "reference/formats.md", "reference/models.md",
        "reference/families.md",        "reference/machines.md", "reference/machine-catalog.md",
        "reference/stacks.md", "reference/keys.md", "reference/precision.md", "reference/optimizers.md",
        "reference/features.md", "changelog.md", "contributing.md",
    ],
    "Explanation": [
        "explanation/faq.md", "explanation/mfu.md", "explanation/other-tools.md", "explanation/how-a-step-costs/*",
        "explanation/dry-run.md", "explanation/dry-run-and-gpu.md", "explanation/diagnosis.md",
        "explanation/trainer.md", "explanation/measuring.md", "explanation/time-model.md",
        "explanation/fault-tolerance.md", "explanation/planning-questions.md",
    ],
    "Decisions": ["explanation/decisions/*"],
    "Measurements": ["explanation/measurements/*"],
}  # fmt: skip
OUTSIDE = {"contributing.md": ROOT / "CONTRIBUTING.md", "changelog.md": ROOT / "CHANGELOG.md"}
CHEAT_SHEET = """# Cheat sheet

[One page to print](sheet.html): commands, keywords of a layout, options of a job, functions of the Python API.
"""


def convert_page(text: str, page: Path, known: set[str]) -> str:
    """Return a page of the site: math as MathML, and links out of ``docs`` as plain text."""
    blocks = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(
        part if part.startswith("```") else convert_links(convert_math(part), page, known) for part in blocks
    )


def convert_math(text: str) -> str:
    """Return ``$$ … $$`` and ``$ … $`` outside of code as MathML, which browsers draw without a script."""
    if "$" not in text:
        return text
    from latex2mathml.converter import convert

    text = re.sub(r"\$\$(.+?)\$\$", lambda found: convert(found[1].strip(), display="block"), text, flags=re.DOTALL)
    parts = re.split(r"(`[^`\n]*`)", text)
    return "".join(
        part
        if part.startswith("`")
        else re.sub(r"(?<![\w$])\$([^$\n]+)\$(?!\w)", lambda found: convert(found[1]), part)
        for part in parts
    )


def convert_links(text: str, page: Path, known: set[str]) -> str:
    """Return the text with links to pages of the site, and the words of links to other files."""

    def link(match: re.Match[str]) -> str:
        words, target = match[1], match[2]
        if "://" in target or target.startswith("#"):
            return match[0]
        place = (DOCS / page).parent / target.partition("#")[0]
        try:
            name = place.resolve().relative_to(DOCS).as_posix()
        except ValueError:
            name = ""
        return match[0] if name in known else words

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", link, text)


def order_pages(known: set[str]) -> dict[str, list[str]]:
    """Return the pages of each part in order; ``*`` stands for all pages of a folder, its index first."""
    parts = {}
    for part, names in NAV.items():
        pages: list[str] = []
        for name in names:
            if name.endswith("/*"):
                folder = sorted(page for page in known if page.startswith(name[:-1]) and page.endswith(".md"))
                pages += sorted(folder, key=lambda page: not page.endswith("index.md"))
            else:
                pages.append(name)
        parts[part] = pages
    return parts


CONFIG = """site_name: Fivefold
site_description: Plan, dry-run, train and verify the training step of a large language model.
docs_dir: pages
site_dir: site
use_directory_urls: false
theme:
  name: material
  font: false
  features: [navigation.tabs, navigation.sections, navigation.footer, toc.follow, search.highlight, content.code.copy]
  palette:
    - {media: "(prefers-color-scheme: light)", scheme: default, toggle: {icon: material/weather-night, name: dark}}
    - {media: "(prefers-color-scheme: dark)", scheme: slate, toggle: {icon: material/weather-sunny, name: light}}
markdown_extensions:
  - tables
  - attr_list
  - md_in_html
  - toc: {permalink: true}
  - pymdownx.highlight: {pygments_lang_class: true}  # the class by which the style sheet knows printed tables
  - pymdownx.superfences
plugins: [search]
extra_css: [extra.css]
"""
CSS = """\
[data-md-color-scheme=default] .md-nav__link--active { color: #3046c0; }  /* the theme's color is too pale */
.md-grid { max-width: 76rem; }  /* so that lines of 120 characters fit between both menus */
.md-typeset pre > code { font-size: .6rem; white-space: pre-wrap; overflow-wrap: anywhere; }
@media (max-width: 76em) { .md-typeset .language-text code { white-space: pre; } }  /* narrow: tables scroll */
.md-typeset table:not([class]) { font-size: .66rem; }
"""


def main() -> None:
    """Write pages and configuration into the folder that is named."""
    target = Path(sys.argv[1])
    shutil.rmtree(target, ignore_errors=True)
    pages = target / "pages"
    reference.main()
    shutil.copytree(DOCS, pages, ignore=shutil.ignore_patterns("site", "*.csv", "*.jsonl", "machines"))
    known = {path.relative_to(pages).as_posix() for path in pages.rglob("*") if path.is_file()}
    outside = OUTSIDE if "index.md" in known else OUTSIDE | {"index.md": ROOT / "README.md"}
    for path in pages.rglob("*.md"):
        name = path.relative_to(pages)
        path.write_text(convert_page(path.read_text(encoding="utf-8"), name, known), encoding="utf-8")
    for page, path in outside.items():
        text = path.read_text(encoding="utf-8").replace("](docs/", "](").replace('src="docs/', 'src="')
        (pages / page).write_text(convert_page(text, Path(page), known), encoding="utf-8")
    (pages / "reference/cheat-sheet.md").write_text(CHEAT_SHEET, encoding="utf-8")
    (pages / "reference/sheet.html").write_text(reference.write_cheat_sheet(), encoding="utf-8")
    (pages / "extra.css").write_text(CSS, encoding="utf-8")
    lines = [CONFIG.rstrip(), "nav:"]
    for part, names in order_pages(known | set(outside) | {"reference/cheat-sheet.md"}).items():
        lines += [f"  - {part}:", *(f"      - {name}" for name in names)] if names else []
    (target / "mkdocs.yml").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""The order of the site, and the pages that are made: reference of commands, Python and records, and the cheat sheet.

    python docs/site/pages.py build/docs        then: zensical build -f build/docs/mkdocs.yml

Pages of ``docs/`` are copied as they are; links that leave it become plain text; math becomes MathML.
"""

from __future__ import annotations

import inspect
import json
import re
import shutil
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any, get_type_hints

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RECORDS = ("fivefold.step:Step", "fivefold.results.search_result:SearchResult", "fivefold.job:Job",
           "fivefold.trainer.run:Run",
           "fivefold.model.spec:Model", "fivefold.machine.spec:Machine",
           "fivefold.results.sweep_row:Row")  # fmt: skip
NAV: dict[str, list[str]] = {
    "Home": ["index.md"],
    "Getting started": ["getting-started/*"],
    "How-to": [
        "how-to/configs/*", "how-to/sweeps.md", "how-to/python.md", "how-to/web.md", "how-to/report.md",
        "how-to/pictures.md", "how-to/hugging-face.md", "how-to/multi-node.md", "how-to/generation.md",
        "how-to/numerics.md", "how-to/doctor.md", "how-to/explain.md", "how-to/traces.md", "how-to/watch.md",
    ],
    "Reference": [
        "reference/features.md", "reference/commands.md", "reference/cheat-sheet.md", "notation.md",
        "reference/records.md", "reference/python.md", "reference/machines.md", "reference/stacks.md",
        "reference/precision.md", "reference/optimizers.md", "release-notes.md", "changelog.md", "contributing.md",
    ],
    "Explanation": [
        "explanation/how-a-step-costs/*", "explanation/dry-run.md", "explanation/dry-run-and-gpu.md",
        "explanation/trainer.md", "explanation/measuring.md", "explanation/time-model.md",
        "explanation/fault-tolerance.md", "explanation/planning-questions.md",
    ],
    "Decisions": ["explanation/decisions/*"],
    "Measurements": ["explanation/measurements/*"],
}  # fmt: skip


def commands() -> Iterator[tuple[str, Any]]:
    """Every command by name."""
    from typer.main import get_command

    from fivefold.cli import app

    yield from sorted(get_command(app).commands.items())  # type: ignore[attr-defined]


def first_sentence(text: str | None) -> str:
    """Of a docstring, as one line."""
    return " ".join((text or "").replace("``", "").split()).partition(". ")[0].rstrip(".") + "."


def of_commands() -> str:
    """The reference of the command line."""
    parts = [
        "# Commands",
        "",
        "Every command prints data to stdout and all else to stderr; a mistake is one line and exit code 2.",
    ]
    for name, command in commands():
        arguments = [each for each in command.params if each.param_type_name == "argument"]
        words = " ".join(
            each.metavar or (each.name.upper() if each.required else f"[{each.name.upper()}]") for each in arguments
        )
        parts += [
            "",
            f"## {name}",
            "",
            " ".join((command.help or "").split()),
            "",
            f"`fivefold {name} {words}`".replace(" `", "`"),
            "",
        ]
        options = [each for each in command.params if each not in arguments and each.name != "help"]
        parts += ["| option | | default |", "| --- | --- | --- |"] if options else []
        for each in sorted(options, key=lambda option: option.opts[0]):
            usual = "" if each.default in (None, False, (), []) or callable(each.default) else f"`{each.default}`"
            parts.append(f"| `{'` `'.join([*each.opts, *each.secondary_opts])}` | {cell(each.help or '')} | {usual} |")
    return "\n".join(parts) + "\n"


def of_python() -> str:
    """The reference of ``import fivefold as ff``."""
    import fivefold as ff

    parts = [
        "# Python",
        "",
        "`import fivefold as ff`: functions with the options of the commands ([guide](../how-to/python.md)).",
    ]
    for name in sorted(ff.__all__):
        what = getattr(ff, name)
        if not inspect.isfunction(what):
            continue
        signature = str(inspect.signature(what)).replace("typing.", "")
        parts += ["", f"## ff.{name}", "", f"```text\nff.{name}{signature}\n```", "", inspect.getdoc(what) or ""]
    return "\n".join(parts) + "\n"


def of_records() -> str:
    """The reference of records: the fields of JSON, run files and job files."""
    from importlib import import_module

    parts = [
        "# Records",
        "",
        "What `--json` prints and files hold. A quantity says its unit; sizes are bytes, times seconds.",
    ]
    seen: set[type] = set()
    todo = []
    for place in RECORDS:
        module, _, name = place.partition(":")
        todo.append(getattr(import_module(module), name))
    while todo:
        record = todo.pop(0)
        if record in seen:
            continue
        seen.add(record)
        doc = (inspect.getdoc(record) or "").replace("``", "`")
        parts += ["", f"## {record.__name__}", "", doc, "", "| field | type | default |", "| --- | --- | --- |"]
        hints = get_type_hints(record)
        for field, info in record.model_fields.items():
            usual = "" if info.is_required() else f"`{shortened(info.get_default(call_default_factory=True))}`"
            parts.append(f"| `{field}` | `{cell(kind(hints.get(field)))}` | {cell(usual)} |")
            todo += [each for each in inner(info.annotation) if each not in seen]
    return "\n".join(parts) + "\n"


def inner(annotation: Any) -> list[type]:
    """Records in the type of a field."""
    from pydantic import BaseModel

    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [each for part in getattr(annotation, "__args__", ()) for each in inner(part)]


def kind(annotation: Any) -> str:
    """A type as people write it."""
    text = str(getattr(annotation, "__name__", annotation) if isinstance(annotation, type) else annotation)
    text = re.sub(r"typing\.Annotated\[(\w+),[^\]]*\]+", r"\1", text)
    return re.sub(r"(?:fivefold|typing)\.(?:\w+\.)*", "", text)


def shortened(value: object) -> str:
    """A default, cut where it is long."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}…"


def cell(text: str) -> str:
    """Text within a table."""
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def layout_words() -> list[tuple[str, str]]:
    """The words of a layout, from the table of the notation."""
    text = (DOCS / "notation.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]*?) \| ([^|]*?) \|", text, flags=re.MULTILINE)
    words = re.compile(r"`(dp|tp|pp|cp|ep|etp|v|zero|mbs|ac=|cp=|nosp|gpipe)")
    return [row for row in rows if words.match(row[0])]


def cheat_sheet() -> str:
    """One page to print: commands, words of a layout, words of a job, verbs in Python."""
    import fivefold as ff
    from fivefold.rendering.elements import STYLE
    from fivefold.requests.commands import JobOptions
    from fivefold.requests.schema import describe_fields

    def rows(pairs: list[tuple[str, str]]) -> str:
        return "".join(f"<dt><code>{escape(name)}</code></dt><dd>{escape(text)}</dd>" for name, text in pairs)

    called = {name: getattr(ff, name) for name in sorted(ff.__all__) if name[0].islower()}
    verbs = [(f"ff.{name}", first_sentence(inspect.getdoc(what)))
             for name, what in called.items()]  # fmt: skip
    lists = {
        "Commands": [(name, first_sentence(command.help)) for name, command in commands()],
        "Words of a layout": [(words.replace("`", ""), meaning.replace("`", "")) for words, meaning in layout_words()],
        "Words of a job": [(f"--{name}", text) for name, text in describe_fields(JobOptions)],
        "In Python: import fivefold as ff": verbs,
    }  # fmt: skip
    body = "".join(f"<section><h2>{name}</h2><dl>{rows(pairs)}</dl></section>" for name, pairs in lists.items())
    style = """
    body{margin:0;padding:6mm}.fivefold{max-width:none;columns:4;column-gap:5mm;font-size:8.8px;line-height:1.25}
    .fivefold h2{font-size:12px;margin:2mm 0 1mm;border:0;padding:0;break-after:avoid}.fivefold code{font-size:8.6px}
    h1{font:600 15px system-ui;margin:0 0 2mm}dl{margin:0}dt{break-after:avoid;margin-top:.6mm}dd{margin:0 0 0 3mm}
    @page{size:A4 landscape;margin:6mm}@media print{body{padding:0}}
    @media screen and (max-width:900px){.fivefold{columns:1}}
    """
    return ('<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Fivefold: cheat sheet</title>'
            '<meta name="viewport" content="width=device-width,initial-scale=1">'
            f"<style>{STYLE}{style}</style></head><body><h1>Fivefold {ff.__version__}</h1>"
            f'<main class="fivefold">{body}</main></body></html>\n')  # fmt: skip


def copied(text: str, page: Path, known: set[str]) -> str:
    """A page of the site: math as MathML; of links out of ``docs`` the words."""
    blocks = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else linked(mathml(part), page, known) for part in blocks)


def mathml(text: str) -> str:
    """``$$ … $$`` and ``$ … $`` outside of code as MathML, which browsers draw without a script."""
    if "$" not in text:
        return text
    from latex2mathml.converter import convert

    text = re.sub(r"\$\$(.+?)\$\$", lambda found: convert(found[1].strip(), display="block"), text, flags=re.DOTALL)
    parts = re.split(r"(`[^`\n]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"(?<![\w$])\$([^$\n]+)\$(?!\w)",
                   lambda found: convert(found[1]), part) for part in parts)  # fmt: skip


def linked(text: str, page: Path, known: set[str]) -> str:
    """Links to pages of the site stay; of others the words."""

    def link(found: re.Match[str]) -> str:
        words, target = found[1], found[2]
        if "://" in target or target.startswith("#"):
            return found[0]
        place = (DOCS / page).parent / target.partition("#")[0]
        try:
            name = place.resolve().relative_to(DOCS).as_posix()
        except ValueError:
            name = ""
        return found[0] if name in known else words

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", link, text)


def nav(known: set[str]) -> dict[str, list[str]]:
    """The pages of each part, in order; ``*`` are all of a folder."""
    found = {}
    for part, names in NAV.items():
        pages: list[str] = []
        for name in names:
            if name.endswith("/*"):
                mine = sorted(each for each in known if each.startswith(name[:-1]) and each.endswith(".md"))
                pages += sorted(mine, key=lambda each: not each.endswith("index.md"))
            else:
                pages.append(name)
        found[part] = pages
    return found


CONFIG = """site_name: Fivefold
site_description: Plans, rehearses, trains and proves the training step of a large language model.
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
markdown_extensions: [tables, attr_list, md_in_html, toc: {permalink: true}, pymdownx.highlight, pymdownx.superfences]
plugins: [search]
extra_css: [extra.css]
"""
CSS = "[data-md-color-scheme=default] .md-nav__link--active { color: #3046c0; }\n"  # which the theme has too pale


def main() -> None:
    """Write pages and configuration into the folder that is named."""
    target = Path(sys.argv[1])
    shutil.rmtree(target, ignore_errors=True)
    pages = target / "pages"
    shutil.copytree(DOCS, pages, ignore=shutil.ignore_patterns("site", "*.csv", "*.jsonl", "machines"))
    sheet = "[One page, to print](sheet.html): commands, words of a layout and of a job, verbs in Python."
    made = {"reference/commands.md": of_commands(), "reference/python.md": of_python(),
            "reference/records.md": of_records(),
            "reference/cheat-sheet.md": f"# Cheat sheet\n\n{sheet}\n"}  # fmt: skip
    own = {path.relative_to(pages).as_posix() for path in pages.rglob("*") if path.is_file()}
    outside = {"contributing.md": ROOT / "CONTRIBUTING.md", "changelog.md": ROOT / "CHANGELOG.md"}
    if not (DOCS / "index.md").exists():
        outside["index.md"] = ROOT / "README.md"
    for path in [*pages.rglob("*.md")]:
        name = path.relative_to(pages)
        path.write_text(copied(path.read_text(encoding="utf-8"), name, own), encoding="utf-8")
    for name, path in outside.items():
        text = path.read_text(encoding="utf-8").replace("](docs/", "](").replace('src="docs/', 'src="')
        (pages / name).write_text(copied(text, Path(name), own), encoding="utf-8")
    (pages / "reference").mkdir(exist_ok=True)
    for name, text in made.items():
        (pages / name).write_text(text, encoding="utf-8")
    (pages / "reference/sheet.html").write_text(cheat_sheet(), encoding="utf-8")
    (pages / "extra.css").write_text(CSS, encoding="utf-8")
    known = own | set(made) | set(outside)
    lines = [CONFIG.rstrip(), "nav:"]
    for part, names in nav(known).items():
        lines += [f"  - {part}:", *(f"      - {name}" for name in names)]
    (target / "mkdocs.yml").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Run the commands of the tutorials, and write what they print into the pages.

    python -m tests.docs.tutorials                    what `make test` runs (`make figures` does this, too)
    python -m tests.docs.tutorials --slow             also what trains or measures (ten minutes)
    python -m tests.docs.tutorials --slow calibrate   some pages

A page is a sequence of blocks. A ``sh`` block is run in a temporary folder that has a copy of ``examples/``; all blocks
of a page run in the same folder, in order. The ``text`` block that follows it shows what it printed. Comments of HTML,
which readers do not see, say what to do with a block:

- ``<!-- not run: REASON -->`` before a ``sh`` block: it needs a cluster, a GPU or a network.
- ``<!-- exit 3 -->`` before a ``sh`` block: the exit code that is expected, if it is not 0.
- ``<!-- shown: 1 3:1-4 6 -->`` before a ``text`` block: which paragraphs of the output are shown, and which of their
  lines. A line with "…" stands for what is left out. Without the comment all of it is shown.
- ``<!-- shown: 1 3; measured -->`` or ``<!-- measured -->``: the figures are of the computer that made the page. Only
  lines whose last word is ``exact`` are compared.
- ``<!-- columns: 120 -->`` anywhere in a page: the width of its terminal, if it is not 100.
- ``<!-- slow -->`` before a ``sh`` block: it trains, measures or takes long, so that only ``make endure`` runs it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.docs.figures import list_figures

ROOT = Path(__file__).parents[2]
OTHER_PAGES = (
    "docs/index.md",
    *(f"docs/how-to/{name}.md" for name in ("conversations", "fsdp", "settings")),
    *(f"docs/explanation/{name}.md" for name in ("mfu", "how-a-step-costs/search")),
    "README.md",
)
PAGES = [*sorted((ROOT / "docs" / "getting-started").glob("*.md")), *(ROOT / page for page in OTHER_PAGES)]
COLUMNS = 100
SHELL = re.compile(r"[|<>;&$`*\n]|^(?!fivefold )", flags=re.MULTILINE)
BLOCK = re.compile(
    r"(?:<!-- (?P<how>(?:not run|exit|slow|shown|measured)[^>]*) -->\n+)?^```(?P<kind>sh|text)\n(?P<body>.*?)^```$",
    flags=re.MULTILINE | re.DOTALL,
)
PROGRESS = re.compile(r"^[\w ]*\wing .*: [\d,]+(?: of [\d,]+)?\n", flags=re.MULTILINE)  # overwritten in a terminal
VARYING = re.compile(r"(?<=layouts in )\S+ m?s|(?<=\.py:)\d+")  # the time of a search; lines of our code


class Example(NamedTuple):
    """A ``sh`` block that is run, and the ``text`` block that shows its output, if there is one."""

    commands: str
    exit_code: int
    is_slow: bool
    shown: str  # which paragraphs
    is_measured: bool
    output: re.Match[str] | None


def find_columns(page: Path) -> int:
    """Return the width of the terminal of a page."""
    width = re.search(r"<!-- columns: (\d+) -->", page.read_text(encoding="utf-8"))
    return int(width[1]) if width else COLUMNS


def list_examples(text: str) -> Iterator[Example]:
    """Yield the examples of a page in order."""
    blocks = list(BLOCK.finditer(text))
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        how = block["how"] or ""
        if block["kind"] == "text" or how.startswith("not run"):
            continue
        output = following if following and following["kind"] == "text" else None
        shown = ((output["how"] if output else "") or "").removeprefix("shown:")
        exit_code = int(how.removeprefix("exit ")) if how.startswith("exit ") else 0
        yield Example(
            block["body"],
            exit_code,
            how == "slow",
            shown.removesuffix("measured").strip(" ;"),
            shown.endswith("measured"),
            output,
        )


def run_commands(commands: str, folder: Path, columns: int) -> tuple[int, str]:
    """Run a ``sh`` block in ``folder``; return its exit code and what it printed, with stderr at the end."""
    environment = os.environ | {
        "COLUMNS": str(columns),
        "NO_COLOR": "1",
        "HOME": str(folder),
        "XDG_CACHE_HOME": str(folder / ".cache"),
        "XDG_CONFIG_HOME": str(folder / ".config"),
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    joined = commands.replace("\\\n", " ").rstrip("\n")
    calls = [["sh", "-ec", joined]]
    if not any(SHELL.search(line) for line in joined.splitlines()):
        calls = [[sys.executable, "-m", "fivefold", *shlex.split(line)[1:]] for line in joined.splitlines()]
    printed = ""
    for call in calls:
        ended = subprocess.run(call, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        printed += ended.stdout + ended.stderr
        if ended.returncode:
            break
    return ended.returncode, PROGRESS.sub("", printed)


def select_lines(printed: str, shown: str) -> list[str]:
    """Return the lines of the output that the page shows, by paragraphs such as ``1 3:1-4``; empty: all of them."""
    lines = [line.rstrip() for line in printed.strip("\n").splitlines()]
    if not shown:
        return lines
    starts = [i for i, line in enumerate(lines) if line and (i == 0 or not lines[i - 1])]
    ends = [next((i for i in range(start, len(lines)) if not lines[i]), len(lines)) for start in starts]
    selected, position = list[str](), 0
    for choice in shown.split():
        number, _, part = choice.partition(":")
        first, _, last = part.partition("-")
        start, end = starts[int(number) - 1], ends[int(number) - 1]
        begin = start + (int(first) - 1 if first else 0)
        stop = min(end, start + int(last)) if last else end
        if any(lines[position:begin]):
            blank = [""] if begin == start else []
            selected += [*(blank if selected else []), "…", *blank]
        elif selected:
            selected.append("")
        selected += lines[begin:stop]
        position = stop
    return [*selected, "…"] if any(lines[position:]) else selected


def wrap_line(line: str, columns: int) -> list[str]:
    """Return a line as a terminal of ``columns`` shows it."""
    return textwrap.wrap(line, columns) if len(line) > columns else [line]


def list_fixed_figures(lines: list[str], *, is_measured: bool) -> list[str]:
    """Return the figures of an output that have to be the same whenever and wherever it is printed."""
    fixed = [line for line in lines if not is_measured or line.endswith("exact")]
    return list_figures(VARYING.sub("", " ".join(fixed)))


def run_page(page: Path, *, with_slow: bool) -> list[tuple[Example, list[str]]]:
    """Run the examples of a page; return each with the lines that it should show."""
    columns = find_columns(page)
    done = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(ROOT / "examples", folder / "examples")
        for example in list_examples(page.read_text(encoding="utf-8")):
            if example.is_slow and not with_slow:
                continue
            code, printed = run_commands(example.commands, folder, columns)
            printed = printed.replace(f"{folder}/", "")
            assert code == example.exit_code, f"{page.name}: exit code {code} of\n{example.commands}\n{printed}"
            lines = select_lines(printed, example.shown) if example.output else []
            done.append((example, [part for line in lines for part in wrap_line(line, columns)]))
    return done


def update_page(page: Path, *, with_slow: bool) -> None:
    """Write what the commands print into the page."""
    text = page.read_text(encoding="utf-8")
    for example, lines in reversed(run_page(page, with_slow=with_slow)):
        if example.output:
            start, end = example.output.span("body")
            printed = "\n".join(lines) + "\n"
            if VARYING.sub("", printed) != VARYING.sub("", example.output["body"]):
                text = text[:start] + printed + text[end:]
    page.write_text(text, encoding="utf-8")


def main(words: list[str]) -> None:
    """Update the pages of these names, or all of them; with ``--slow`` also what trains or measures."""
    names = [word for word in words if word != "--slow"]
    if unknown := set(names) - {page.stem for page in PAGES}:
        raise SystemExit(
            f"no page is called {', '.join(sorted(unknown))}; there are {', '.join(p.stem for p in PAGES)}"
        )
    for page in PAGES:
        if not names or page.stem in names:
            update_page(page, with_slow="--slow" in words)
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    main(sys.argv[1:])

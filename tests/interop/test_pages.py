"""The commands in ``docs/how-to/configs`` print the figures of the pages; ``FIVEFOLD_FREEZE=1`` rewrites the pages."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path

import pytest

from fivefold.cli import command_line
from tests.docs.figures import list_figures
from tests.interop.test_published import HERE

FOLDER = HERE.parents[2] / "docs" / "how-to" / "configs"
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.stem not in ("index", "published"))
BLOCK = re.compile(r"```sh\n(fivefold [^\n]*)\n```\n\n```text\n(.*?)```", flags=re.DOTALL)
NUMBER = re.compile(r"\d+(?:\.\d+)?")  # predictions may move by 5 %
SPREAD = re.compile(r"^expected step time [^;]*;([^(]*).*\n", flags=re.MULTILINE)  # moves with every run that is scored
LINES = 14  # of an output that are shown


def output(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr("sys.argv", shlex.split(command))
    with pytest.raises(SystemExit):
        command_line.main()
    said = capsys.readouterr()
    lines = [line.rstrip() for line in (said.out + said.err).strip("\n").splitlines()]
    return "\n".join([*lines[:LINES], *(["…"] if len(lines) > LINES else [])]) + "\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_shows_what_its_commands_print(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(HERE, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "110")
    text = page.read_text(encoding="utf-8")
    assert len(BLOCK.findall(text)) >= 4
    wanted = BLOCK.sub(
        lambda result: f"```sh\n{result[1]}\n```\n\n```text\n{output(result[1], monkeypatch, capsys)}```", text
    )
    if os.environ.get("FIVEFOLD_FREEZE"):
        page.write_text(wanted, encoding="utf-8")
    shown = page.read_text(encoding="utf-8")
    spreads = ["".join(SPREAD.findall(item)) for item in (shown, wanted)]
    assert numbers(spreads[0]) == pytest.approx(numbers(spreads[1]), rel=0.3, abs=0.5)
    shown, wanted = (SPREAD.sub("", item) for item in (shown, wanted))
    assert [NUMBER.sub("0", figure) for figure in list_figures(shown)] == [
        NUMBER.sub("0", figure) for figure in list_figures(wanted)
    ]
    assert numbers(shown) == pytest.approx(numbers(wanted), rel=0.05, abs=0.5)


def numbers(text: str) -> list[float]:
    return [float(result) for result in NUMBER.findall(text)]


def test_each_page_is_listed() -> None:
    index = (FOLDER / "index.md").read_text(encoding="utf-8")
    assert [page.name for page in PAGES if f"({page.name})" not in index] == []
    assert len(PAGES) == 9

"""Each recipe of CONTRIBUTING's "How to add" is followed in a copy of the package, and what must then work is run.

A folder of ``additions`` holds what a maintainer writes for one addition: the files under ``new``, and what
``inserts.toml`` puts into files that exist. They are counted: the files of the package that the addition touches.
``uses.py`` is then run; ``make test`` runs all of them in one process.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "additions"
MAX_FILES = {
    "chip": 1,
    "model": 1,
    "precision": 1,
    "family": 1,
    "activation": 1,
    "schedule": 1,
    "optimizer": 2,
    "collective": 2,
    "loss": 2,
    "change": 1,
    "column": 2,
    "sweep_column": 2,
    "command": 3,
}
ONE_FOLDER = {"format": "interop/megacorp"}  # all of whose files are new
LEFT_OUT = {"activation", "loss", "column", "family"}  # whose uses take two seconds each; `make endure` runs them
RUNNER = """
import json, os, runpy, sys, traceback
sys.path.insert(0, sys.argv[1])
failures = {}
for name in sys.argv[2:]:
    try:
        runpy.run_path(os.path.join(sys.argv[1], name, "uses.py"))
        failures[name] = ""
    except BaseException:
        failures[name] = traceback.format_exc()
print(json.dumps(failures))
"""


class Insert(NamedTuple):
    """Text that is put before or after a place of a file, which must be there once."""

    file: str
    text: str
    before: str = ""
    after: str = ""

    def apply(self, package: Path) -> None:
        path, place = package / self.file, self.before or self.after
        content = path.read_text(encoding="utf-8")
        assert content.count(place) == 1, f"{self.file} has {place!r} {content.count(place)} times, not once"
        new = self.text + place if self.before else place + self.text
        path.write_text(content.replace(place, new), encoding="utf-8")


def list_new(name: str) -> list[str]:
    """Return the files that an addition creates."""
    folder = FOLDER / name / "new"
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))


def read_inserts(name: str) -> list[Insert]:
    """Return what an addition puts into files that exist."""
    path = FOLDER / name / "inserts.toml"
    rows: list[dict[str, Any]] = tomllib.loads(path.read_text(encoding="utf-8"))["inserts"] if path.exists() else []
    return [Insert(**row) for row in rows]


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> dict[str, str]:
    """Make all additions to a copy of the package, and run their uses; return by name how each failed, if it did."""
    folder = tmp_path_factory.mktemp("copy")
    package = folder / "fivefold"
    shutil.copytree(ROOT / "fivefold", package)  # with its bytecode, which is valid as times are copied, too
    names = [*MAX_FILES, *ONE_FOLDER]
    for name in names:
        for file in list_new(name):
            assert not (package / file).exists(), file
            (package / file).parent.mkdir(exist_ok=True)
            shutil.copy(FOLDER / name / "new" / file, package / file)
        for insert in read_inserts(name):
            insert.apply(package)
    used = [name for name in names if (name in LEFT_OUT) == pytestconfig.getoption("--long")]
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, str(FOLDER), *used],
        cwd=folder,
        check=False,
        timeout=280,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long if name in LEFT_OUT else ()) for name in (*MAX_FILES, *ONE_FOLDER)],
)
def test_an_added_chip_family_schedule_or_optimizer_works(name: str, failures: dict[str, str]) -> None:
    if failures[name]:
        pytest.fail(failures[name], pytrace=False)


@pytest.mark.parametrize("name", MAX_FILES)
def test_an_addition_touches_few_files(name: str) -> None:
    touched = {*list_new(name), *(insert.file for insert in read_inserts(name))}
    assert 0 < len(touched) <= MAX_FILES[name], touched


@pytest.mark.parametrize("name", ONE_FOLDER)
def test_an_addition_is_one_folder(name: str) -> None:
    assert {str(Path(file).parent) for file in list_new(name)} == {ONE_FOLDER[name]}
    assert read_inserts(name) == []


def test_every_addition_is_in_the_table() -> None:
    assert {path.name for path in FOLDER.iterdir() if path.is_dir() and (path / "uses.py").exists()} == {
        *MAX_FILES,
        *ONE_FOLDER,
    }


@pytest.mark.parametrize("name", [*MAX_FILES, *ONE_FOLDER])
def test_contributing_names_the_files_of_each_addition(name: str) -> None:
    recipes = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## How to add")[2]
    folders = [str(Path(file).parent) for file in list_new(name)]
    named = {*(insert.file for insert in read_inserts(name)), *(folder.removesuffix("/megacorp") for folder in folders)}
    assert [path for path in named if path not in recipes] == []


def test_code_that_contributing_names_is_there() -> None:
    """Every word of four letters or more in backticks is a word of the code or the name of a file."""
    text = re.sub(r"```.*?```", "", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    named = set(re.findall(r"\b\w{4,}", " ".join(re.findall(r"`([^`]+)`", text))))
    files = [ROOT / "Makefile", *(path for folder in ("fivefold", "tests") for path in (ROOT / folder).rglob("*.py"))]
    known = {path.stem for path in files}
    assert named - known.union(*(re.findall(r"\w+", path.read_text(encoding="utf-8")) for path in files)) == set()

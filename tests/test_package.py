"""The package: every file of data travels, its facts agree, and the base answers with nothing but what it names.

Built, installed into empty environments and measured by ``tests.endure.package``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

import fivefold
from fivefold.requests.extras import EXTRAS
from tests.selection import mark_share

ROOT = Path(__file__).parents[1]
FACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = FACTS["project"]
# What the base package may load: what it names, and what those bring.
BASE = (
    "numpy pydantic typer rich yaml pydantic_core annotated_types typing_extensions typing_inspection click shellingham"
)

BASE += " markdown_it mdurl pygments annotated_doc"


def test_every_data_file_is_in_the_package() -> None:
    patterns = FACTS["tool"]["setuptools"]["package-data"]["fivefold"]
    listed = subprocess.run(["git", "ls-files", "fivefold"], cwd=ROOT, capture_output=True, text=True, check=False)
    files = [line.removeprefix("fivefold/") for line in listed.stdout.splitlines()]
    if not files:
        pytest.skip("no git here, so which files belong to the package is not known")
    links = {name: ROOT / "fivefold" / name for name in files if (ROOT / "fivefold" / name).is_dir()}
    files += [f"{name}/{file.name}" for name, folder in links.items() for file in folder.iterdir()]
    data = [name for name in files if not name.endswith(".py") and name not in links]
    assert "web/book/index.md" in data
    assert "planner/time/errors.csv" in data
    assert [
        name
        for name in data
        if not any(fnmatch(name, pattern) and name.count("/") == pattern.count("/") for pattern in patterns)
    ] == []


def test_version_and_license_agree_in_all_files() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert PROJECT["version"] == fivefold.__version__ == str(citation["version"])
    assert PROJECT["license"] == citation["license"] == "Apache-2.0"
    assert "Version 2.0, January 2004" in (ROOT / "LICENSE").read_text()
    assert PROJECT["description"] == citation["abstract"]
    assert "urls" not in PROJECT, "a URL that is named must be ours, and answer"
    first = PROJECT["requires-python"].removeprefix(">=")
    assert f"Programming Language :: Python :: {first}" in PROJECT["classifiers"]


def test_github_runs_the_same_checks_as_make() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/check.yml").read_text())["jobs"]
    assert jobs["check"]["steps"][-1]["run"] == ".ci/run"
    assert os.access(ROOT / ".ci/run", os.X_OK)
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.md"):
        head = yaml.safe_load(path.read_text().split("---\n")[1])
        assert set(head) == {"name", "about", "labels"}


def test_the_dockerfile_copies_existing_files() -> None:
    words = [line.split()[1:-1] for line in (ROOT / "Dockerfile").read_text().splitlines() if line.startswith("COPY")]
    copied = [name for names in words for name in names]
    assert [name for name in copied if not (ROOT / name).exists()] == []
    links = [path.resolve().relative_to(ROOT) for path in (ROOT / "fivefold").rglob("*") if path.is_symlink()]
    assert links, "the page's book is a link to the docs"
    assert [link for link in links if link.parts[0] not in copied] == []
    extras = re.search(r"'\.\[(.*?)\]'", (ROOT / "Dockerfile").read_text())
    assert extras
    assert set(extras[1].split(",")) <= set(PROJECT["optional-dependencies"])


BARE = f"""
import sys
allowed = set({BASE!r}.split()) | set(sys.stdlib_module_names) | {{"fivefold"}}
class Empty:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in allowed and not top.startswith("_"):
            raise ModuleNotFoundError(f"No module named {{top!r}}", name=top)
sys.meta_path.insert(0, Empty())
from fivefold.cli.command_line import main
main()
"""


@pytest.mark.parametrize(
    ("words", "said"),
    mark_share(
        3,
        [
            (("report", "nano", "h100:2", "dp2"), ""),
            (("predict", "llama3-8b", "h100:8", "dp8 zero3 mbs1"), "MFU"),
            (("--version",), f"fivefold {fivefold.__version__}\n"),
        ],
    ),
)
def test_planning_commands_work_without_optional_packages(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    """No torch, no Altair, no pyarrow: whatever the base does not name cannot be imported."""
    ended = subprocess.run(
        [sys.executable, "-c", BARE, *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    assert said in ended.stdout
    assert words[0] != "report" or (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("words", "needs"),
    mark_share(
        3,
        [
            (("dryrun", "nano", "h100:2", "dp2"), "torch, of the extra train"),
            (("draw", "masks"), "the extra show"),
            (("mcp",), "the extra mcp"),
        ],
    ),
)
def test_a_missing_extra_is_an_error_of_one_line(words: tuple[str, ...], needs: str, tmp_path: Path) -> None:
    (tmp_path / "fivefold").mkdir()
    machine = (ROOT / "examples/machines/complete.toml").read_text()
    (tmp_path / "fivefold/local.toml").write_text(machine)
    ended = subprocess.run(
        [sys.executable, "-c", BARE, *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path)},
    )
    assert (ended.returncode, ended.stdout) == (2, ""), ended.stderr
    assert needs in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("call", "line"),
    [
        ("ff.dryrun('nano', 'h100:2', 'dp2')", "this needs torch, of the extra train: pip install 'fivefold[train]'"),
        ("ff.watch(None, None)", "torch, of the extra train"),
    ],
)
def test_a_missing_extra_is_an_error_of_one_line_in_the_python_api(call: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "fivefold").mkdir()
    (tmp_path / "fivefold/local.toml").write_text((ROOT / "examples/machines/complete.toml").read_text())
    bare = BARE.rpartition("from fivefold")[0]
    code = f"{bare}import fivefold as ff\ntry:\n    {call}\nexcept ff.UserError as mistake:\n    print(mistake)\n"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path)},
    )
    assert line in ended.stdout, ended.stderr
    assert ended.stdout.count("\n") == 1


def test_every_extra_is_known_by_its_packages() -> None:
    names = {"vl-convert-python": "vl_convert"}
    for extra, packages in PROJECT["optional-dependencies"].items():
        bare = {re.split(r"[<>=;\[ ]", package)[0] for package in packages}
        if extra != "dev":
            listed = {names.get(item, item) for item in bare}
            assert {name for name, of in EXTRAS.items() if of == extra} <= listed <= EXTRAS.keys()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("fivefold predict llama3-7", {"llama3-70b"}),
        ("fivefold predict llama3-8b h100:8 dp8 --stack torchti", {"torchtitan"}),
        ("fivefold predict llama3-8b h100:8 dp8 --precision mxf", {"mxfp8"}),
    ],
)
def test_shell_completion_offers_the_expected_words(line: str, expected: set[str]) -> None:
    words = {"_FIVEFOLD_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    code = "import sys; sys.argv = ['fivefold']; from fivefold.cli.command_line import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | words,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert set(ended.stdout.split()) == expected

"""Decisions agree with the tree where that can be read from it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
DECISIONS = ROOT / "docs" / "explanation" / "decisions"


def test_every_dependency_is_in_the_decision_on_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {"base": project["dependencies"], **project["optional-dependencies"]}
    wanted = {(extra, re.split(r"[<>=;\[ ]", line)[0]) for extra, lines in extras.items() for line in lines}
    text = (DECISIONS / "005-dependencies.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| ([^|]+) \|", text, flags=re.MULTILINE)
    assert {(extra, name) for extra, names in rows for name in names.strip().split(", ")} - {
        ("extra", "library")
    } == wanted


FILES = re.compile(r"`((?:fivefold|trainer|planner|dry_run|interop|machine|model|layout|profiling|cli)/[\w/]+\.py)`")


def test_every_file_that_a_decision_names_exists() -> None:
    named = {(page.name, path) for page in DECISIONS.glob("*.md") for path in FILES.findall(page.read_text("utf-8"))}
    assert len(named) > 10
    folders = (ROOT, ROOT / "fivefold")
    assert [(page, path) for page, path in sorted(named) if not any((base / path).exists() for base in folders)] == []

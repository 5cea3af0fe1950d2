"""The generated pages of ``docs/reference`` are up to date; ``FIVEFOLD_FREEZE=1`` writes them again."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import fivefold as ff
from fivefold.cli import app

DOCS = Path(__file__).parents[2] / "docs"
COMMANDS: Any = get_command(app)


@pytest.fixture(scope="module")
def reference() -> Any:
    sys.path.insert(0, str(DOCS / "site"))
    try:
        return importlib.import_module("reference")
    finally:
        sys.path.remove(str(DOCS / "site"))


@pytest.mark.parametrize(
    "name",
    [
        *(f"{name}.md" for name in ("commands", "configuration", "results", "python", "models")),
        *("families.md", "machine-catalog.md", "keys.md", "fivefold.1"),
    ],
)
def test_a_generated_page_is_up_to_date(reference: Any, name: str) -> None:
    page, text = DOCS / "reference" / name, reference.PAGES[name]()
    if os.environ.get("FIVEFOLD_FREEZE"):
        page.write_text(text, encoding="utf-8")
    assert page.read_text(encoding="utf-8") == text, "run python docs/site/reference.py"


def test_every_page_is_tested(reference: Any) -> None:
    assert len(reference.PAGES) == 9


def test_every_command_option_and_function_is_listed(reference: Any) -> None:
    commands, python = reference.write_commands(), reference.write_python()
    for name, command in COMMANDS.commands.items():
        assert f"## {name}\n" in commands
        assert all(f"`{param.opts[0]}`" in commands for param in command.params if param.opts[0].startswith("--"))
    assert all(f"## ff.{name}\n" in python for name in ff.__all__ if name[0].islower())
    assert "<" not in re.sub(r"`[^`]*`", "", commands.replace("<br>", "")), "what looks like a tag would vanish"


def test_every_key_that_a_user_types_has_a_help_text(reference: Any) -> None:
    records, without = list_undocumented(reference, [section.record for section in reference.SECTIONS])
    assert records > 15
    assert without == []


def test_every_field_of_a_result_has_a_meaning(reference: Any) -> None:
    records, without = list_undocumented(reference, reference.RESULTS)
    assert records > 15
    assert without == []


def list_undocumented(reference: Any, names: Iterable[str]) -> tuple[int, list[str]]:
    """Return the number of records that these ones contain, and their fields without a text."""
    todo = [reference.load(name) for name in names]
    seen: set[Any] = set()
    without = []
    while todo:
        record = todo.pop()
        if record in seen or record.__name__ in reference.MEASURED:
            continue
        seen.add(record)
        without += [f"{record.__name__}.{name}" for name, text in reference.describe_fields(record).items() if not text]
        todo += [
            nested for field in record.model_fields.values() for nested in reference.inner_records(field.annotation)
        ]
    return len(seen), without


def test_help_is_the_comment_of_a_field(reference: Any) -> None:
    from fivefold.stack.spec import Stack
    from fivefold.trainer.run import Run

    assert reference.describe_fields(Run)["evaluate_every"].startswith("steps between")  # at the end of its line
    assert reference.describe_fields(Stack)["scatter_gather_tensors"].startswith(
        "without sequence parallelism"
    )  # above it

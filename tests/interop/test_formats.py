"""A format is one folder with four modules; ``tests/architecture/additions/format`` adds one."""

from __future__ import annotations

from pathlib import Path

from fivefold.cli.completion import complete_format as complete_formats
from fivefold.interop.registry import FORMATS, list_written

ROOT = Path(__file__).parents[2]
FOLDERS = {  # formats by folder, of those that are read; our own run file has no keys of another software
    form.parse.__module__.split(".")[2]: form for form in FORMATS if form.parse is not None and form.stack != "fivefold"
}
MODULES = {"__init__", "keys", "parse", "to_job", "emit"}
# Tables of what a software has, and readers of what is its own.
DATA = {
    "nemo", "adapters", "axolotl_deepspeed", "builders", "data", "dialects", "effects", "flavors", "freeze",
    "harmless", "shipped", "swift",
}  # fmt: skip


def test_every_format_that_is_written_is_a_choice() -> None:
    assert complete_formats("") == list_written()


def test_every_format_has_the_same_four_modules() -> None:
    for name, form in FOLDERS.items():
        present = {path.stem for path in (ROOT / "fivefold" / "interop" / name).glob("*.py")}
        assert present - DATA <= MODULES, name
        assert form.to_job is not None
        assert form.emit is not None
        functions = {"parse": form.parse, "to_job": form.to_job, "emit": form.emit}
        assert all(function.__module__.endswith(f".{module}") for module, function in functions.items() if function)
        assert form.keys, name
    assert len(FOLDERS) == 7


def test_every_format_that_is_written_is_on_the_page() -> None:
    page = (ROOT / "docs" / "how-to" / "configs" / "index.md").read_text(encoding="utf-8")
    assert [name for name in list_written() if f"--to {name}" not in page] == []

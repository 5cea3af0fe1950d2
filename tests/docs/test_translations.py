"""The tables of ``coming-from-other-trainers.md`` agree with the tables by which configs of that software are read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fivefold.interop.keys import Key
from fivefold.interop.registry import FORMATS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "coming-from-other-trainers.md"
SECTIONS = {  # heading on the page: name of the table, prefix that the page leaves out
    "torchtitan": ("torchtitan", ""),
    "Megatron-LM and Megatron-Core": ("megatron", ""),
    "DeepSpeed": ("deepspeed", "deepspeed."),
    "Accelerate and the Hugging Face Trainer": ("accelerate", ""),
}
WRITTEN = {  # how a user writes a field, where not by its name
    "dp": r"`dpN", "tp": r"`tpN`", "pp": r"`ppN`", "cp": r"`cpN", "ep": r"`epN`", "etp": r"`etpN`", "v": r"`vN`",
    "mbs": r"`mbsN`", "zero": r"zero\d|fsdp|hsdp|ddp", "shard_group": r"zero\d/S|hsdp/S", "schedule": "1f1b",
    "sp": "nosp", "cp_kind": "cp=ulysses", "sequence": "--seq", "global_batch": "--gbs", "precision": "--precision",
    "ac": "ac=", "attention": "--attention",
}  # fmt: skip


def read_tables(section: str) -> dict[str, str]:
    """Return the keys of a section with what the page says to write instead."""
    text = PAGE.read_text(encoding="utf-8").partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", text, flags=re.MULTILINE))


def load_keys(section: str) -> dict[str, Key]:
    """Return the keys of a section's software by the names that the page uses."""
    name, prefix = SECTIONS[section]
    table = next(form.keys[name] for form in FORMATS if name in form.keys)
    return {key.removeprefix(prefix): entry for key, entry in table.items() if key.startswith(prefix)}


@pytest.mark.parametrize("section", SECTIONS)
def test_each_documented_key_sets_the_documented_field(section: str) -> None:
    rows, keys = read_tables(section), load_keys(section)
    assert len(rows) >= 10
    for key, cell in rows.items():
        assert key in keys, f"{section} has no key {key}"
        fields = [path.rpartition(".")[2] for path in re.findall(r"\b(?:layout|job)[\w.]*\.\w+", keys[key].means)]
        fields += ["shard_group"] if "shard group" in keys[key].means else []
        patterns = [WRITTEN.get(field, rf"\b{field}=") for field in fields]
        assert any(re.search(pattern, cell) for pattern in patterns), f"{key} sets {keys[key].means}, not {cell}"


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_that_is_one_field_of_the_layout_is_listed(section: str) -> None:
    rows, keys = read_tables(section), load_keys(section)
    wanted = {key for key, entry in keys.items() if entry.kind == "field" and entry.means.startswith("layout.")}
    assert wanted - rows.keys() == set()


def test_every_section_is_tested() -> None:
    headings = re.findall(r"^## (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert headings == list(SECTIONS)

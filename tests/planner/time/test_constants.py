"""The table of constants in the book is the code's: each with its value, and none that the table leaves out."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.published.constants import CONSTANTS, MEMORY_CONSTANTS, Constant, scale_constants, times
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine import kernel_efficiency
from fivefold.machine.catalog import resolve
from fivefold.machine.kernel_efficiency import KernelEfficiency
from fivefold.model.catalog import build_model
from fivefold.planner.predict import Planner
from fivefold.planner.time.constants import ALL, PUBLISHED, Constants, describe_constant
from tests.docs.figures import list_figures

ROOT = Path(__file__).parents[3]
TABLE = ROOT / "docs" / "explanation" / "how-a-step-costs" / "constants.md"
ROW = re.compile(r"^\| `([^`]+)` \| ([^|]+) \|", flags=re.MULTILINE)
PRICED = [*sorted((ROOT / "fivefold/planner/time").glob("*.py")), ROOT / "fivefold/machine/kernel_efficiency.py"]
# Words and sizes, not figures of the model: kinds of kernels, axes, bytes of a dtype, the table of errors and its use.
NO_FIGURES = {"KERNELS", "FUSED_INTO_SUM", "AXES", "TABLE", "WIDTH"}
# Chips: measured matmuls.
NO_FIGURES |= {name for name, value in vars(kernel_efficiency).items() if isinstance(value, KernelEfficiency)}
# 16 bytes in elements of 16 bits; a token that is sent once; the queries of a constant's block; of Transformer Engine
NO_FIGURES |= {"ALIGNED", "ONE_COPY", "ATTENTION_BLOCK", "MAX_HEAD_NORM_DIM", "NORM_BLOCKS"}
NO_FIGURES |= {
    "EAGER",
    "PLAIN",
    "PLAIN_LOSS_KERNELS",
    "ONE",
    "ROPE_APART",
}  # counts, which tests/planner/time/test_eager_kernels.py holds to the operations of modules
NO_FIGURES |= {
    "_TREE_SHARES",
    "SIMILAR_SOURCE_WEIGHT",
    "DOUBT",
    "QUANTILES",
    "LEVELS",
    "CACHED",
    "PRICED",
    "MIN_SOURCES",
}


def numbers(value: Any) -> list[float]:
    """All numbers of a constant, in order."""
    if isinstance(value, dict):
        return [number for item in value.values() for number in numbers(item)]
    if isinstance(value, tuple):
        return [number for item in value for number in numbers(item)]
    return [float(value)]


def list_varied_numbers(constant: Constant) -> list[float]:
    """The numbers that the sensitivity varies."""
    doubled = numbers((constant.scale or times)(constant.value, 2.0))
    return [was for was, now in zip(numbers(constant.value), doubled, strict=True) if was != now]


def read_printed_numbers() -> dict[str, list[float]]:
    """By constant: the numbers in the first table."""
    text = TABLE.read_text(encoding="utf-8").partition("## The table")[2].partition("\n## ")[0]
    return {name: [float(number) for number in cell.split(", ")] for name, cell in ROW.findall(text)}


def test_values_in_the_table_of_constants_equal_the_code() -> None:
    table = read_printed_numbers()
    assert set(table) == {constant.name for constant in CONSTANTS}
    for constant in CONSTANTS:
        assert table[constant.name] == pytest.approx(list_varied_numbers(constant), rel=1e-3), constant.name


def test_units_and_sources_in_the_table_of_constants_equal_the_code() -> None:
    text = TABLE.read_text(encoding="utf-8").partition("## The table")[2].partition("\n## ")[0]
    rows = [line.split(" | ") for line in text.splitlines() if ROW.match(line)]
    table = {cells[0].strip("| `"): cells for cells in rows}
    for name in Constants.model_fields:
        _, _, unit, where, meaning, source, *_ = table[name]
        known = describe_constant(name)
        assert unit == known.unit, name
        assert meaning, name
        assert list_figures(source) == list_figures(known.source), name
        assert where == "`planner/time/constants.py`"


def test_the_row_of_a_constant_says_what_it_was_fitted_to() -> None:
    text = TABLE.read_text(encoding="utf-8")
    rows = {line.split("`")[1]: line.lower() for line in text.splitlines()[::-1] if ROW.match(line)}
    for constant in (*CONSTANTS, *MEMORY_CONSTANTS):
        row = rows[constant.name]
        if constant.set_on == ALL:
            assert "estimate" in row or "all sources" in row, constant.name
        else:
            assert all(source.split("_")[0] in row.replace(" ", "") for source in constant.set_on), constant.name


def test_the_table_lists_every_constant_of_the_time_model() -> None:
    """Every numeric constant in planner/time and machine/kernel_efficiency, and the defaults of a chip's shares."""
    known = {re.split(r"[\[.]", constant.name)[0] for constant in CONSTANTS}
    for path in PRICED:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {target.id for target in targets if isinstance(target, ast.Name) and target.id.isupper()}
            figures = [
                part.value
                for part in ast.walk(node.value)
                if isinstance(part, ast.Constant) and isinstance(part.value, int | float)
            ]
            assert not figures or names <= known | NO_FIGURES, path.name


def test_memory_constants_in_the_table_equal_the_code() -> None:
    from fivefold.planner.counts.memory import allocator
    from fivefold.units import MIB

    text = TABLE.read_text(encoding="utf-8").partition("## Constants of memory")[2]
    shown = {name: cell.replace(" ", "") for name, cell in ROW.findall(text)}
    code = allocator.PUBLISHED._asdict()
    assert set(shown) == set(code)
    assert len(code) == 8
    for name, value in code.items():
        assert shown[name] == (f"{value // MIB}MiB" if name.endswith("_bytes") else str(value))


@pytest.mark.parametrize("name", Constants.model_fields)
def test_another_record_of_constants_changes_no_other_planner(name: str) -> None:
    """Two planners with different constants stand side by side; a constant is read from nowhere but its record."""
    other = scale_constants({name: 1.5})
    assert getattr(other, name) != getattr(PUBLISHED, name)
    assert [field for field in Constants.model_fields if getattr(other, field) != getattr(PUBLISHED, field)] == [name]
    assert Constants() == PUBLISHED


def test_a_planner_takes_its_constants() -> None:
    machine, layout = resolve("h100:16", local=Path("no")), Layout.parse("dp4 tp4 zero3 mbs1")
    job = Job(sequence=4096, global_batch=16)
    plain, slowed = (
        Planner(model=build_model("llama3-8b"), machine=machine, job=job, constants=scale_constants(factors))
        for factors in ({}, {"hidden_message_slowdown": 2.0})
    )
    stock = Planner(model=build_model("llama3-8b"), machine=machine, job=job).estimate(layout).step_time
    assert plain.estimate(layout).step_time == stock
    assert slowed.estimate(layout).step_time.compute > stock.compute
    assert Planner(model=build_model("llama3-8b"), machine=machine, job=job).estimate(layout).step_time == stock

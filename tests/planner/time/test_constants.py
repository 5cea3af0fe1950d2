"""The table of constants in the book is the code's: each with its value, and none that the table leaves out."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.published.constants import ALL, CONSTANTS, OF_MEMORY, Constant, scaled, times
from fivefold.machine import kernel_efficiency
from fivefold.machine.kernel_efficiency import KernelEfficiency

ROOT = Path(__file__).parents[3]
TABLE = ROOT / "docs" / "how-a-step-costs" / "constants.md"
ROW = re.compile(r"^\| `([^`]+)` \| ([^|]+) \|", flags=re.MULTILINE)
PRICED = [*sorted((ROOT / "fivefold/planner/time").glob("*.py")), ROOT / "fivefold/machine/kernel_efficiency.py"]
# Words and sizes, not figures of the model: kinds of kernels, axes, bytes of a dtype, the table of errors and its use.
NO_FIGURES = {"KERNELS", "FUSED_INTO_SUM", "AXES", "TABLE", "WIDTH"}
# Chips: measured matmuls.
NO_FIGURES |= {name for name, value in vars(kernel_efficiency).items() if isinstance(value, KernelEfficiency)}
NO_FIGURES |= {"ALIGNED"}  # 16 bytes in elements of 16 bits
NO_FIGURES |= {
    "EAGER",
    "ONE",
    "ROPE_APART",
}  # counts, which tests/planner/time/test_eager_kernels.py holds to the engine's operations
NO_FIGURES |= {"ALIKE", "DOUBT", "SPREAD", "LEVELS", "CACHED", "PRICED"}


def numbers(value: Any) -> list[float]:
    """All numbers of a constant, in order."""
    if isinstance(value, dict):
        return [number for each in value.values() for number in numbers(each)]
    if isinstance(value, tuple):
        return [number for each in value for number in numbers(each)]
    return [float(value)]


def varying(constant: Constant) -> list[float]:
    """The numbers that the sensitivity varies."""
    doubled = numbers((constant.scale or times)(constant.value, 2.0))
    return [was for was, now in zip(numbers(constant.value), doubled, strict=True) if was != now]


def printed() -> dict[str, list[float]]:
    """By constant: the numbers in the first table."""
    text = TABLE.read_text(encoding="utf-8").partition("## The table")[2].partition("\n## ")[0]
    return {name: [float(number) for number in cell.split(", ")] for name, cell in ROW.findall(text)}


def test_every_value_of_the_table_is_the_codes() -> None:
    table = printed()
    assert set(table) == {constant.name for constant in CONSTANTS}
    for constant in CONSTANTS:
        assert table[constant.name] == pytest.approx(varying(constant), rel=1e-3), constant.name


def test_the_row_of_a_constant_names_what_it_was_set_on() -> None:
    text = TABLE.read_text(encoding="utf-8")
    rows = {line.split("`")[1]: line.lower() for line in text.splitlines()[::-1] if ROW.match(line)}
    for constant in (*CONSTANTS, *OF_MEMORY):
        row = rows[constant.name]
        if constant.set_on == ALL:
            assert "estimate" in row or "no source" in row, constant.name
        else:
            assert all(source.split("_")[0] in row.replace(" ", "") for source in constant.set_on), constant.name


def test_no_constant_of_the_price_is_left_out() -> None:
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


def test_memorys_figures_are_the_codes() -> None:
    from fivefold.planner.counts.memory import allocator
    from fivefold.units import MIB

    text = TABLE.read_text(encoding="utf-8").partition("## Of memory")[2]
    shown = {name: cell.replace(" ", "") for name, cell in ROW.findall(text)}
    code = {name: getattr(allocator, name) for name in shown}
    assert len(code) == 5
    for name, value in code.items():
        assert shown[name] == (f"{value // MIB}MiB" if name.endswith("_BYTES") else str(value))


def test_a_constant_is_varied_wherever_it_was_imported_to() -> None:
    from fivefold.planner.time import data_parallel, durations, unit_time

    constant = next(each for each in CONSTANTS if each.name == "CONTENTION")
    with scaled({"CONTENTION": 2.0}):
        assert unit_time.CONTENTION == durations.CONTENTION == data_parallel.CONTENTION == 2 * constant.value
    assert unit_time.CONTENTION == durations.CONTENTION == data_parallel.CONTENTION == constant.value

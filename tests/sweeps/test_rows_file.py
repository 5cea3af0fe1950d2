"""Rows in Parquet, CSV and JSON lines, read back by pyarrow, csv and json."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fivefold.errors import RunFailure, UserError
from fivefold.results.sweep_row import SweepRow
from fivefold.sweeps.rows_file import check, write

LEAST = {
    "model": "nano",
    "machine": "h100",
    "ranks": 8,
    "recomputation": "none",
    "sequence": 64,
    "batch": 8,
    "precision": "bf16",
    "stack": "fivefold",
}
ROWS = [
    SweepRow(
        **LEAST, layout="dp8 zero3 mbs1", status="fits", dp=8, step_seconds=0.1 + 0.2, peak_bytes=2**62 + 1,
        mfu_non_causal=1e-300,
    ),
    SweepRow(**LEAST, layout='dp8, "zero"\nα', status="invalid", why="a, b\n'c' \"d\"; é 2²"),
]  # fmt: skip


def test_rows_are_written_as_parquet(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    write(ROWS, tmp_path / "new" / "rows.parquet")
    table = parquet.read_table(tmp_path / "new" / "rows.parquet")
    assert table.to_pylist() == [row.model_dump() for row in ROWS]
    assert str(table.schema.field("measured_step_seconds").type) == "double"  # though all are None
    assert str(table.schema.field("pp").type) == "int64"
    write([], tmp_path / "none.parquet")
    assert parquet.read_table(tmp_path / "none.parquet").schema == table.schema


def test_rows_are_written_as_csv(tmp_path: Path) -> None:
    write(ROWS, tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open(encoding="utf-8", newline="") as file:
        result = list(csv.DictReader(file))
    for line, row in zip(result, ROWS, strict=True):
        assert line == {name: "" if value is None else str(value) for name, value in row.model_dump().items()}
    assert float(result[0]["step_seconds"]) == 0.1 + 0.2


def test_rows_are_written_as_json_lines(tmp_path: Path) -> None:
    write(ROWS, tmp_path / "rows.jsonl")
    results: list[Any] = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [SweepRow(**result) for result in results] == ROWS


def test_unwritable_rows_file_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"rows are written as .parquet, .csv, .jsonl, not .xlsx"):
        check(Path("rows.xlsx"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    check(Path("rows.csv"))
    with pytest.raises(
        UserError, match=r"Parquet needs pyarrow: pip install 'fivefold\[train\]', or write .csv or .jsonl"
    ):
        check(Path("rows.parquet"))
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFailure, match="cannot be written: File exists"):
        write(ROWS, tmp_path / "file" / "rows.csv")


def test_a_file_is_complete_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(ROWS, tmp_path / "rows.csv")
    before = (tmp_path / "rows.csv").read_bytes()

    def fail_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(csv.DictWriter, "writerows", fail_full)
    with pytest.raises(RunFailure, match="No space left on device"):
        write(ROWS, tmp_path / "rows.csv")
    assert (tmp_path / "rows.csv").read_bytes() == before
    assert list(tmp_path.iterdir()) == [tmp_path / "rows.csv"]

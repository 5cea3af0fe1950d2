"""Writes and reads rows as Parquet, CSV or JSON lines, chosen by the file's suffix. Files are written atomically."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any, get_args

from fivefold.atomic_file import replace_file
from fivefold.bounded_file import ROWS_BYTES
from fivefold.errors import UserError
from fivefold.results.sweep_row import SweepRow
from fivefold.text_files import read_lines, read_text

SUFFIXES = (".parquet", ".csv", ".jsonl")


def check(path: Path) -> None:
    """Raise ``UserError`` if rows cannot be written to ``path``: an unknown suffix, or Parquet without pyarrow."""
    if path.suffix not in SUFFIXES:
        raise UserError(
            f"--out {path}: rows are written as {', '.join(SUFFIXES)}, not {path.suffix or 'without a suffix'}"
        )
    if path.suffix == ".parquet":
        _import_pyarrow()


def write(rows: Sequence[SweepRow], path: Path) -> None:
    """Write ``rows`` with one column per field; raises ``RunFailure`` if the disk is full."""
    values = [row.model_dump() for row in rows]
    with replace_file(path, contents="the table", advice="name another file with --out") as file:
        {".parquet": _write_parquet, ".csv": _write_csv, ".jsonl": _write_jsonl}[path.suffix](values, file)


def _write_jsonl(values: list[dict[str, Any]], path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in values)


def _write_csv(values: list[dict[str, Any]], path: Path) -> None:
    """Write rows as CSV; None is an empty cell."""
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, fieldnames=list(SweepRow.model_fields))
        table.writeheader()
        table.writerows(values)


def _write_parquet(values: list[dict[str, Any]], path: Path) -> None:
    """Write rows as Parquet; each column has its field's type, even if all of its values are None."""
    arrow, parquet = _import_pyarrow()
    schema = arrow.schema(
        [(name, _choose_type(arrow, field.annotation)) for name, field in SweepRow.model_fields.items()]
    )
    parquet.write_table(arrow.Table.from_pylist(values, schema=schema), path)


def _choose_type(arrow: Any, annotation: Any) -> Any:
    kinds = set(get_args(annotation)) or {annotation}
    if int in kinds:
        return arrow.int64()
    return arrow.float64() if float in kinds else arrow.string()


def _import_pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UserError("Parquet needs pyarrow: pip install 'fivefold[train]', or write .csv or .jsonl") from None
    return pyarrow, parquet


def read(path: Path) -> list[SweepRow]:
    """Read the rows that ``write`` wrote; raises ``UserError`` if the file holds no rows."""
    values: list[Any]
    if path.suffix == ".jsonl":
        if not path.exists():
            raise UserError(f"{path}: no such file; name one that `fivefold sweep --out` wrote")
        values = read_lines(path)
    elif path.suffix == ".csv":
        lines = csv.DictReader(StringIO(read_text(path, kind="rows", most_bytes=ROWS_BYTES)))
        values = [{name: cell for name, cell in line.items() if cell != ""} for line in lines]
    else:
        values = _read_parquet_rows(path)
    if not all(isinstance(value, dict) for value in values):
        raise UserError(f"{path}: its lines are not rows of a sweep; name a file that `fivefold sweep --out` wrote")
    return [SweepRow.read(value, origin=f"{path}: row {place}") for place, value in enumerate(values, 1)]


def _read_parquet_rows(path: Path) -> list[Any]:
    _, parquet = _import_pyarrow()
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: not a regular file, which Parquet needs; name another")
    try:
        return list(parquet.read_table(path).to_pylist())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as Parquet: {str(error).splitlines()[0]}") from None

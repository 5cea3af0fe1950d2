"""Read and write a schedule table as CSV: a row per rank, a cell per action, no header; empty cells are ignored.

    F0.0, F0.1,       BW0.0, F0.2, BW0.1, BW0.2
        , F1.0, BW1.0, F1.1, BW1.1, F1.2, BW1.2

``F0.1`` is the forward of stage 0 for micro-batch 1; also B, W, BW and ``F1.3+BW1.2`` (see ``action.py``).
The rank that runs the forward of a stage holds its weights.
"""

from __future__ import annotations

import csv
from itertools import product
from pathlib import Path

from fivefold.atomic_file import replace_file
from fivefold.errors import UserError
from fivefold.layout.schedule.action import format_part, list_parts, parse
from fivefold.layout.schedule.columns import Row
from fivefold.layout.schedule.table import Table, check
from fivefold.text_files import read_text


def write_table(table: Table, path: Path) -> None:
    """Write the table to a file that ``read_table`` reads; ``RunFailure`` if it cannot be written."""
    with replace_file(path, contents="the schedule") as file:
        file.write_text("".join(",".join(map(str, row)) + "\n" for row in table.rows), encoding="utf-8")


def read_table(path: Path) -> Table:
    """Read and check a table, named after the file; a ``UserError`` gives row, cell and reason."""
    lines = read_text(path, kind="UTF-8 text").splitlines()
    try:
        rows = tuple(_parse_row(cells, number) for number, cells in enumerate(csv.reader(lines), start=1))
    except (csv.Error, UserError) as error:
        raise UserError(f"{path}: {error}") from None
    try:
        table = Table.from_rows(path.stem, rows, _find_paths(rows))
        check(table)
    except UserError as error:
        raise UserError(f"{path}: {error} (row 1 is rank 0)") from None
    return table


def _parse_row(cells: list[str], number: int) -> Row:
    """Parse the cells of one rank into its actions; an error names row and cell."""
    actions = []
    for column, cell in enumerate(cells, start=1):
        try:
            actions += [parse(cell.strip())] if cell.strip() else []
        except UserError as error:
            raise UserError(f"row {number}, cell {column}: {error}") from None
    if not actions:
        raise UserError(f"row {number} has no action; each row is a rank, drop it")
    return tuple(actions)


def _find_paths(rows: tuple[Row, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the rank of each stage by micro-batch, from the forwards; ``UserError`` if one is missing."""
    rank_of_forward = {
        part: rank for rank, row in enumerate(rows) for action in row for part in list_parts(action) if part[0] == "F"
    }
    if not rank_of_forward:
        raise UserError("no row has a forward; write F0.0 for stage 0, micro-batch 0")
    stages = range(1 + max(stage for _, stage, _ in rank_of_forward))
    micro_batches = range(1 + max(micro_batch for *_, micro_batch in rank_of_forward))
    missing = next(
        (
            stage_and_batch
            for stage_and_batch in product(stages, micro_batches)
            if ("F", *stage_and_batch) not in rank_of_forward
        ),
        None,
    )
    if missing is not None:
        counts = f"{len(stages)} stages and {len(micro_batches)} micro-batches"
        raise UserError(f"{format_part(('F', *missing))} never runs, though other rows have {counts}; add it")
    return tuple(tuple(rank_of_forward["F", stage, i] for stage in stages) for i in micro_batches)

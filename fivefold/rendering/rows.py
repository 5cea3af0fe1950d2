"""Records of one kind as an HTML table for notebooks or as text, such as the rows of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from io import StringIO
from itertools import islice
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType

from fivefold.rendering.answers import list_sections
from fivefold.rendering.catalogs import list_machines, list_models, list_stacks
from fivefold.rendering.elements import build_paragraph, build_table, convert_grid, join_parts
from fivefold.rendering.point_charts import draw_cloud
from fivefold.rendering.sections import render_sections
from fivefold.rendering.sweep.table import make_row_grid
from fivefold.results.catalog import CatalogMachine, CatalogModel, CatalogStack
from fivefold.results.run_estimate import RunEstimate
from fivefold.results.search_result import Batch, Change, FineTune, Lengths, QuestionAnswer
from fivefold.results.sweep_row import SweepRow as SweepRow
from fivefold.units import show_bytes, show_count, show_flops, show_seconds

if TYPE_CHECKING:
    from fivefold.display import Rows

MAX_ROWS = 60  # maximum rows of a table
QUESTIONS: Mapping[type, str] = {  # the question of ``ask`` whose answer is a record of this kind
    QuestionAnswer: "micro-batch",
    Batch: "batch",
    Change: "changes",
    FineTune: "finetune",
    Lengths: "sequence",
    RunEstimate: "run",
}
CATALOGS: Mapping[type, Callable[[Any], RenderableType]] = {
    CatalogModel: list_models,
    CatalogMachine: list_machines,
    CatalogStack: list_stacks,
}
TEXT_WIDTH = 100  # minimum columns of a table as text
AXES = (
    "model",
    "machine",
    "ranks",
    "sequence",
    "batch",
    "precision",
    "stack",
    "status",
    "why",
)  # columns before the figures


def render_rows(what: Rows[Any]) -> str:
    """Return records of one kind as a table; empty columns are left out, and for a sweep the columns of details."""
    rest = f"; {len(what) - MAX_ROWS:,} more are not shown" if len(what) > MAX_ROWS else ""
    count_line = build_paragraph(f"{len(what):,} rows{rest}", kind="soft")
    if all(isinstance(record, SweepRow) for record in what):
        return join_parts(
            count_line, *draw_cloud(what, within="notebook"), convert_grid(make_row_grid(what[:MAX_ROWS], axes=AXES))
        )
    values = [record.model_dump(mode="json") for record in islice(what, MAX_ROWS)]
    names = [
        name
        for name in dict.fromkeys(name for record in values for name in record)
        if any(record.get(name) not in (None, "", [], {}) for record in values)
    ]
    numbers = {name for name in names if all(_is_number(record.get(name)) for record in values)}
    cells = [[_format_cell(name, record.get(name)) for name in names] for record in values]
    headings = [name.removesuffix("_bytes").removesuffix("_seconds").replace("_", " ") for name in names]
    left = [name for name, full_name in zip(headings, names, strict=True) if full_name not in numbers]
    return join_parts(count_line, build_table(headings, cells, left=left))


def to_text(what: Rows[Any]) -> str:
    """Return records of one kind as the text that the terminal prints; without such a page, one line each."""
    kinds = {type(record) for record in what}
    kind = kinds.pop() if len(kinds) == 1 else object
    page: RenderableType
    if kind is SweepRow:
        page = make_row_grid(what[:MAX_ROWS], axes=AXES)
    elif kind in QUESTIONS:
        page = render_sections(list_sections(QUESTIONS[kind], what))
    elif kind in CATALOGS:
        page = CATALOGS[kind](what)
    else:
        return "\n".join(map(str, what))
    stream = StringIO()
    Console(file=stream, width=max(TEXT_WIDTH, get_terminal_size().columns)).print(page)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | None) and not isinstance(value, bool)


def _format_cell(name: str, value: Any) -> str:
    """Format a value by its type and by the unit at the end of its field's name."""
    if value is None or isinstance(value, bool):
        return {None: "", True: "yes", False: "no"}[value]
    if isinstance(value, int | float):
        if name.endswith("_bytes"):
            return show_bytes(value)
        if name.endswith("_seconds"):
            return show_seconds(value)
        if isinstance(value, int):
            return f"{value:,}"
        return f"{value:.4g}" if abs(value) < 1e4 else show_flops(value) if "flops" in name else show_count(value)
    return ", ".join(f"{key}={element}" for key, element in value.items()) if isinstance(value, Mapping) else str(value)

"""Table of two steps of one layout, predicted and measured, quantity by quantity."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from rich.text import Text

from fivefold.rendering.grid import Column, Grid, make_grid
from fivefold.results.step_comparison import QuantityComparison
from fivefold.units import show_bytes, show_count, show_flops, show_seconds


def render_table(rows: Sequence[QuantityComparison], *, headings: tuple[str, str] = ("predicted", "measured")) -> Grid:
    """Return the rows as a table; ``headings`` name the two steps, for example by their kinds."""
    first, second = headings
    columns = (
        Column[QuantityComparison]("quantity", attrgetter("quantity"), is_text=True),
        Column[QuantityComparison](first, lambda row: format_value(row, row.predicted)),
        Column[QuantityComparison](second, lambda row: format_value(row, row.measured)),
        Column[QuantityComparison]("difference", format_difference, lambda text: text),
    )
    return make_grid(columns, rows)


def format_value(row: QuantityComparison, value: float) -> str:
    """Return a value of a row in its unit."""
    if row.unit == "bytes":
        return show_bytes(value)
    if row.unit == "seconds":
        return show_seconds(value)
    return show_flops(value) if row.unit == "FLOPs" else show_count(value)


def format_difference(row: QuantityComparison) -> Text:
    """Return the last cell of a row: exact, or the difference."""
    if row.is_wrong:
        relative = f" ({row.error:+.2%})" if row.error is not None else ""
        return Text(f"off by {row.predicted - row.measured:+,}{relative}", style="bold red")
    if row.exact:
        return Text("exact", style="green")
    if row.error is None:
        return Text("not measured", style="dim")
    return Text(f"{row.error:+.1%}", style="red" if abs(row.error) > 0.1 else "")

"""A table of colours: the best value of each pair of settings, darker if it is better, with its number in the cell."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

SHADES = 9


class HeatCell(NamedTuple):
    """One cell: its number as text, the address it links to, and its shade, from 0 (worst)."""

    text: str
    href: str
    shade: int


class HeatTable(NamedTuple):
    """Columns and rows of a heat map, with the cells by row; None where there is none."""

    across: list[Any]
    rows: list[tuple[Any, list[HeatCell | None]]]


def build_table(
    cells: Mapping[tuple[Any, Any], tuple[float, str]], *, show: Callable[[float], str], less: bool
) -> HeatTable:
    """Return the heat map of cells by (down, across); ``less``: the smallest value is best."""
    sizes = [size for size, _ in cells.values()]
    smallest, span = min(sizes), max(sizes) - min(sizes) or 1.0

    def build_cell(place: tuple[Any, Any]) -> HeatCell | None:
        if place not in cells:
            return None
        size, href = cells[place]
        share = (size - smallest) / span
        return HeatCell(show(size), href, round((1 - share if less else share) * (SHADES - 1)))

    downs, acrosses = (sorted({place[side] for place in cells}, key=_order) for side in (0, 1))
    return HeatTable(acrosses, [(down, [build_cell((down, across)) for across in acrosses]) for down in downs])


def _order(value: Any) -> tuple[bool, Any]:
    return isinstance(value, str), value if value is not None else -1

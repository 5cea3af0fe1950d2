"""A table of colours: the best value of each pair of places, darker where it is better; each cell says its number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

SHADES = 9


class Cell(NamedTuple):
    """One cell: its number in words, the address behind it, and its shade, from 0 (worst) on."""

    text: str
    href: str
    shade: int


class Table(NamedTuple):
    """Places across and down, and the cells by rows; None where there is none."""

    across: list[Any]
    rows: list[tuple[Any, list[Cell | None]]]


def table(cells: Mapping[tuple[Any, Any], tuple[float, str]], *, show: Callable[[float], str], less: bool) -> Table:
    """The cells by (down, across); ``less``: the least is best."""
    sizes = [size for size, _ in cells.values()]
    low, span = min(sizes), max(sizes) - min(sizes) or 1.0

    def cell(place: tuple[Any, Any]) -> Cell | None:
        if place not in cells:
            return None
        size, href = cells[place]
        share = (size - low) / span
        return Cell(show(size), href, round((1 - share if less else share) * (SHADES - 1)))

    downs, acrosses = (sorted({place[side] for place in cells}, key=_order) for side in (0, 1))
    return Table(acrosses, [(down, [cell((down, across)) for across in acrosses]) for down in downs])


def _order(value: Any) -> tuple[bool, Any]:
    return isinstance(value, str), value if value is not None else -1

"""A plot: marks in a square of 1000 by 1000 that is stretched to the window; axes and text are not stretched.

Ticks and titles extend over the picture's edge, into the margin of the style sheet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, floor, log10

from fivefold.rendering.drawing.svg import build_element, format_percent, join_elements
from fivefold.rendering.elements import Raw
from fivefold.units import show_count

SIDE = 1000.0
MARGINS = {7: "", 12: "named", 29: "long"}  # maximum letters of a row's name → class of the margin


def choose_ticks(last: float, *, first: float = 0.0, about: int = 5) -> list[float]:
    """Return round numbers from ``first`` to ``last``."""
    span = last - first
    if span <= 0:
        return [first]
    power = 10.0 ** floor(log10(span / about))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * about >= span * 0.999)
    return [factor * step for factor in range(ceil(first / step - 1e-9), floor(last / step + 1e-9) + 1)]


def show_ticks(values: Sequence[float]) -> list[str]:
    """Format the numbers of an axis in one unit: 0, 5000, 10000 → ``"0"``, ``"5 k"``, ``"10 k"``."""
    has_units = max(map(abs, values), default=0.0) >= 1e4

    def show(value: float) -> str:
        number, _, unit = show_count(value).partition(" ") if has_units else (value, "", "")
        return f"{float(number):.6g} {unit}".rstrip()

    return [show(value) for value in values]


def choose_label_class(names: Iterable[str]) -> str:
    """Return the class of a picture whose rows have these names, which sets the width of its margin."""
    longest = max(map(len, names), default=0)
    return next((look for most, look in MARGINS.items() if longest <= most), "long")


def time_unit(largest: float) -> tuple[float, str]:
    """Return units per second for durations up to ``largest``, and the name of the unit."""
    return (1.0, "s") if largest >= 2 else (1e3, "ms")


def plot(
    marks: Raw,
    *,
    label: str,
    height: int,
    x: Sequence[tuple[float, str]],
    y: Sequence[tuple[float, str]],
    x_title: str = "",
    y_title: str = "",
    over: str = "",
    grid: bool = True,
    kind: str = "",
    role: str = "img",
) -> Raw:
    """Draw the picture.

    ``x``, ``y``: ticks as (share, text), from the left and top; ``over``: marks that are not stretched.
    """
    square = build_element(
        "svg", marks, viewBox="0 0 1000 1000", preserveAspectRatio="none", width="100%", height="100%", class_="marks"
    )
    titles = join_elements(_draw_titles(x_title, y_title))
    return build_element(
        "svg",
        _draw_grid(y) if grid else "",
        square,
        _draw_labels(x, y),
        titles,
        over,
        class_=" ".join(["chart", *kind.split(), *(["titled"] if y_title else [])]),
        height=height,
        role=role,
        aria_label=label,
    )


def _draw_grid(y: Sequence[tuple[float, str]]) -> Raw:
    return join_elements(
        build_element("line", x1=0, x2="100%", y1=format_percent(at), y2=format_percent(at), class_="grid")
        for at, _ in y
    )


def _draw_labels(x: Sequence[tuple[float, str]], y: Sequence[tuple[float, str]]) -> Raw:
    below = (build_element("text", text, x=format_percent(at), y="100%", dy=18, text_anchor="middle") for at, text in x)
    left = (build_element("text", text, x=-8, y=format_percent(at), dy="0.35em", text_anchor="end") for at, text in y)
    return join_elements((*below, *left))


def _draw_titles(x_title: str, y_title: str) -> Iterable[Raw]:
    if x_title:
        yield build_element("text", x_title, x="100%", y="100%", dy=33, text_anchor="end", class_="title")
    if y_title:
        yield build_element("text", y_title, x=-48, y=0, dy=-12, class_="title")

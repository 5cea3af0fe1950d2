"""A plot: marks in a square of 1000 by 1000 that is stretched to the window, axes and text that are not.

Ticks and titles hang over the picture's edge, into the margin that the style sheet leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import floor, log10

from markupsafe import Markup

from fivefold.units import GIB, MIB
from fivefold.web.drawing.svg import element, joined, percent

SIDE = 1000.0


def ticks(last: float, *, first: float = 0.0, about: int = 5) -> list[float]:
    """Round numbers from ``first`` to ``last``."""
    span = last - first
    if span <= 0:
        return [first]
    raw = span / about
    power = 10.0 ** floor(log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * 0.999)
    count = floor(last / step + 1e-9)
    begin = floor(first / step - 1e-9) + 1 if first > 0 else 0
    return [each * step for each in range(begin, count + 1)]


def byte_unit(largest: float) -> tuple[int, str]:
    """Bytes of the unit in which sizes up to ``largest`` are read, and its name."""
    return (GIB, "GiB") if largest >= GIB else (MIB, "MiB")


def time_unit(largest: float) -> tuple[float, str]:
    """Units per second in which durations up to ``largest`` are read, and their name."""
    return (1.0, "s") if largest >= 2 else (1e3, "ms")


def plot(
    marks: Markup, *, label: str, height: int, x: Sequence[tuple[float, str]], y: Sequence[tuple[float, str]],
    x_title: str = "", y_title: str = "", over: Markup | str = "", grid: bool = True, kind: str = "",
    role: str = "img",
) -> Markup:  # fmt: skip
    """The picture. ``x``, ``y``: ticks as (share, text), from the left and top; ``over``: unstretched marks."""
    square = element(
        "svg", marks, viewBox="0 0 1000 1000", preserveAspectRatio="none", width="100%", height="100%", class_="marks"
    )
    titles = joined(_titles(x_title, y_title))
    return element("svg", _grid(y) if grid else "", square, _labels(x, y), titles, over, class_=f"chart {kind}".strip(),
                   height=height, role=role, aria_label=label)  # fmt: skip


def _grid(y: Sequence[tuple[float, str]]) -> Markup:
    return joined(element("line", x1=0, x2="100%", y1=percent(at), y2=percent(at), class_="grid") for at, _ in y)


def _labels(x: Sequence[tuple[float, str]], y: Sequence[tuple[float, str]]) -> Markup:
    below = (element("text", text, x=percent(at), y="100%", dy=18, text_anchor="middle") for at, text in x)
    beside = (element("text", text, x=-8, y=percent(at), dy="0.35em", text_anchor="end") for at, text in y)
    return joined((*below, *beside))


def _titles(x_title: str, y_title: str) -> Iterable[Markup]:
    if x_title:
        yield element("text", x_title, x="100%", y="100%", dy=33, text_anchor="end", class_="title")
    if y_title:
        yield element("text", y_title, x=-8, y="100%", dy=18, text_anchor="end", class_="title")

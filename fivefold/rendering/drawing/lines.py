"""Curves over the steps of a run: loss, speed, memory, with the values of a step under the mouse."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from typing import NamedTuple

from fivefold.rendering.drawing.plot import SIDE, choose_ticks, plot, show_ticks
from fivefold.rendering.drawing.svg import build_element, format_percent, join_elements
from fivefold.rendering.elements import Raw

HEIGHT = 230
MAX_POINTS = 400  # maximum number of points of a curve that are drawn and shown under the mouse


class Curve(NamedTuple):
    """A curve. ``look``: its class; ``show``: writes a value as text."""

    name: str
    look: str
    points: Sequence[tuple[float, float]]
    show: Callable[[float], str] = "{:.4g}".format


def draw_lines(curves: Sequence[Curve], *, label: str, x_title: str = "step", y_title: str = "") -> Raw:
    """Draw the curves that have a finite point; return an empty text if none has."""
    curves = [item._replace(points=_thin([p for p in item.points if isfinite(p[1])])) for item in curves]
    curves = [item for item in curves if item.points]
    if not curves:
        return Raw("")
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.points]
    first, last = min(xs), max(max(xs), min(xs) + 1)
    low, high = min(ys), max(ys)
    margin = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    low = max(0.0, low - margin) if low >= 0 else low - margin
    high = high + margin

    def place_point(point: tuple[float, float]) -> tuple[float, float]:
        return (point[0] - first) / (last - first), 1 - (point[1] - low) / (high - low)

    y_ticks = choose_ticks(high, first=low)
    paths = (_draw_path([place_point(point) for point in curve.points], curve.look) for curve in curves)
    dots = (
        build_element("circle", cx=format_percent(x), cy=format_percent(y), r=3, class_=f"dot s-{curve.look}")
        for curve in curves
        if len(curve.points) <= 40
        for x, y in map(place_point, curve.points)
    )
    return plot(
        join_elements((*paths, *_draw_hover_columns(curves, first=first, last=last))),
        label=label,
        height=HEIGHT,
        x=[((item - first) / (last - first), f"{item:g}") for item in choose_ticks(last, first=first, about=6)],
        y=[(1 - (tick - low) / (high - low), text) for tick, text in zip(y_ticks, show_ticks(y_ticks), strict=True)],
        x_title=x_title,
        y_title=y_title,
        over=join_elements(dots),
    )


def _draw_path(points: Sequence[tuple[float, float]], look: str) -> Raw:
    line = "M" + "L".join(f"{x * SIDE:.1f} {y * SIDE:.1f}" for x, y in points)
    return build_element("path", d=line, class_=f"curve s-{look}")


def _thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most ``MAX_POINTS`` points: means of neighbours, at the position of the last of them."""
    group_size = -(-len(points) // MAX_POINTS) or 1
    groups = (points[i : i + group_size] for i in range(0, len(points), group_size))
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]


def _draw_hover_columns(curves: Sequence[Curve], *, first: float, last: float) -> Iterator[Raw]:
    """Yield invisible columns that show the nearest value of each curve under the mouse."""
    longest = max(curves, key=lambda curve: len(curve.points)).points
    width = SIDE / max(1, len(longest) - 1)
    cursors = [0] * len(curves)
    for x, _ in longest:
        tip_lines = [f"step {x:g}"]
        for index, curve in enumerate(curves):
            points = curve.points
            while cursors[index] + 1 < len(points) and abs(points[cursors[index] + 1][0] - x) <= abs(
                points[cursors[index]][0] - x
            ):
                cursors[index] += 1
            tip_lines.append(f"{curve.name}  {curve.show(points[cursors[index]][1])}")
        left = (x - first) / (last - first) * SIDE - width / 2
        yield build_element("rect", x=left, width=width, y=0, height=SIDE, class_="hit", data_tip="\n".join(tip_lines))

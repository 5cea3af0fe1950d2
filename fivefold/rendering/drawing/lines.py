"""Curves over the steps of a run: loss, speed, memory; what a curve says at a step is told under the mouse."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from typing import NamedTuple

from fivefold.rendering.drawing.plot import SIDE, plot, ticks
from fivefold.rendering.drawing.svg import element, joined, percent
from fivefold.rendering.elements import Raw

HEIGHT = 230
MOST = 400  # points of a curve that are drawn, and places at which they are told


class Curve(NamedTuple):
    """One curve. ``look``: its class; ``show``: a value in words."""

    name: str
    look: str
    points: Sequence[tuple[float, float]]
    show: Callable[[float], str] = "{:.4g}".format


def picture(curves: Sequence[Curve], *, label: str, x_title: str = "step", y_title: str = "") -> Raw:
    """The chart of curves that have a finite point; an empty text of none."""
    curves = [each._replace(points=_thin([p for p in each.points if isfinite(p[1])])) for each in curves]
    curves = [each for each in curves if each.points]
    if not curves:
        return Raw("")
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.points]
    first, last = min(xs), max(max(xs), min(xs) + 1)
    low, high = min(ys), max(ys)
    margin = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    low, high = (max(0.0, low - margin) if low >= 0 else low - margin), high + margin

    def at(point: tuple[float, float]) -> tuple[float, float]:
        return (point[0] - first) / (last - first), 1 - (point[1] - low) / (high - low)

    paths = (_path([at(point) for point in curve.points], curve.look) for curve in curves)
    dots = (
        element("circle", cx=percent(x), cy=percent(y), r=3, class_=f"dot s-{curve.look}")
        for curve in curves if len(curve.points) <= 40 for x, y in map(at, curve.points)
    )  # fmt: skip
    return plot(
        joined((*paths, *_places(curves, first=first, last=last))), label=label, height=HEIGHT,
        x=[((each - first) / (last - first), f"{each:g}") for each in ticks(last, first=first, about=6)],
        y=[(1 - (each - low) / (high - low), f"{each:.6g}") for each in ticks(high, first=low)],
        x_title=x_title, y_title=y_title, over=joined(dots),
    )  # fmt: skip


def _path(points: Sequence[tuple[float, float]], look: str) -> Raw:
    line = "M" + "L".join(f"{x * SIDE:.1f} {y * SIDE:.1f}" for x, y in points)
    return element("path", d=line, class_=f"curve s-{look}")


def _thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most ``MOST`` points: means of neighbours, at the last of them."""
    each = -(-len(points) // MOST) or 1
    runs = (points[i : i + each] for i in range(0, len(points), each))
    return [(run[-1][0], sum(y for _, y in run) / len(run)) for run in runs]


def _places(curves: Sequence[Curve], *, first: float, last: float) -> Iterator[Raw]:
    """Invisible columns that tell the nearest value of each curve."""
    longest = max(curves, key=lambda curve: len(curve.points)).points
    width = SIDE / max(1, len(longest) - 1)
    cursors = [0] * len(curves)
    for x, _ in longest:
        told = [f"step {x:g}"]
        for place, curve in enumerate(curves):
            points = curve.points
            while cursors[place] + 1 < len(points) and abs(points[cursors[place] + 1][0] - x) <= abs(
                points[cursors[place]][0] - x
            ):
                cursors[place] += 1
            told.append(f"{curve.name}  {curve.show(points[cursors[place]][1])}")
        left = (x - first) / (last - first) * SIDE - width / 2
        yield element("rect", x=left, width=width, y=0, height=SIDE, class_="hit", data_tip="\n".join(told))

"""Points in a plane, each a link to what it represents: a front of memory against time, the rows of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fivefold.rendering.drawing.plot import SIDE, choose_ticks, plot, show_ticks
from fivefold.rendering.drawing.svg import build_element, format_percent, join_elements
from fivefold.rendering.elements import Raw

HEIGHT = 280
MARGIN = 0.07  # share of the span that is left free around the points


class ScatterPoint(NamedTuple):
    """A point. ``tip``: the text under the mouse; ``look``: its class; ``text``: written next to it."""

    x: float
    y: float
    tip: str
    href: str = ""
    look: str = "dot"
    text: str = ""


def draw_scatter(
    points: Sequence[ScatterPoint], *, label: str, x_title: str, y_title: str, stairs: bool = False, zero: bool = False
) -> Raw:
    """Draw the chart; ``stairs``: points of the default look are joined as a front; ``zero``: both axes begin at 0."""
    first_x, last_x = _choose_range([point.x for point in points], zero=zero)
    first_y, last_y = _choose_range([point.y for point in points], zero=zero)

    def place_point(point: ScatterPoint) -> tuple[float, float]:
        return (point.x - first_x) / (last_x - first_x), 1 - (point.y - first_y) / (last_y - first_y)

    placed = [(point, *place_point(point)) for point in points]
    path = Raw("")
    if stairs and len(points) > 1:
        corners = sorted((x, y) for point, x, y in placed if point.look == "dot")
        steps = "".join(f"H{x * SIDE:.1f}V{y * SIDE:.1f}" for x, y in corners[1:])
        path = build_element(
            "path", d=f"M{corners[0][0] * SIDE:.1f} {corners[0][1] * SIDE:.1f}{steps}", class_="stairs"
        )
    y_ticks = choose_ticks(last_y, first=first_y)
    return plot(
        path,
        label=label,
        role="group",
        height=HEIGHT,
        x_title=x_title,
        y_title=y_title,
        x=[
            ((tick - first_x) / (last_x - first_x), f"{tick:g}")
            for tick in choose_ticks(last_x, first=first_x, about=6)
        ],
        y=[
            (1 - (tick - first_y) / (last_y - first_y), text)
            for tick, text in zip(y_ticks, show_ticks(y_ticks), strict=True)
        ],
        over=join_elements(_draw_dot(point, x, y) for point, x, y in placed),
    )


def _draw_dot(point: ScatterPoint, x: float, y: float) -> Raw:
    """Return a point with its text and tooltip, as a link if it has one."""
    dot = build_element(
        "circle", cx=format_percent(x), cy=format_percent(y), r=5, class_=point.look, data_tip=point.tip
    )
    if point.text:
        offset = {"dx": 9} if x < 0.6 else {"dx": -9, "text_anchor": "end"}
        dot = join_elements(
            (dot, build_element("text", point.text, x=format_percent(x), y=format_percent(y), dy=-9, **offset))
        )
    return build_element("a", dot, href=point.href, aria_label=point.tip) if point.href else dot


def _choose_range(values: Sequence[float], *, zero: bool) -> tuple[float, float]:
    low, high = (0.0 if zero else min(values)), max(values)
    margin = (high - low) * MARGIN or abs(high) * 0.1 or 1.0
    return (low if zero else max(0.0, low - margin) if low >= 0 else low - margin), high + margin

"""Parts of a total as one stacked bar."""

from __future__ import annotations

from collections.abc import Sequence

from fivefold.rendering.drawing.svg import build_element, format_percent, join_elements
from fivefold.rendering.elements import Raw
from fivefold.rendering.step_view import BarPart

MAX_LIMIT_RATIO = 4  # a limit up to this multiple of the largest bar is drawn


def scale(largest: float, limit: float) -> tuple[float, float | None]:
    """Return the width of bars of up to ``largest``, and the ``limit`` if it is near.

    A limit far away would flatten the bars.
    """
    near = limit <= MAX_LIMIT_RATIO * largest
    return (max(largest, limit) if near else largest or 1.0) * 1.02, limit if near else None


def draw_stacked(parts: Sequence[BarPart], *, total: float, label: str, limit: float | None = None) -> Raw:
    """Draw the bar, ``total`` wide; ``limit``: the position of a capacity."""
    bars, start = [], 0.0
    for part in parts:
        if part.size > 0:
            tip = f"{part.name}  {part.text}"
            bars.append(
                build_element(
                    "rect",
                    x=format_percent(start / total),
                    width=format_percent(part.size / total),
                    class_=f"k-{part.look}",
                    data_tip=tip,
                )
            )
        start += part.size
    if limit is not None:
        bars += [
            build_element(
                "line", x1=format_percent(limit / total), x2=format_percent(limit / total), y2="100%", class_=look
            )
            for look in ("limit-ground", "limit")
        ]
    return build_element("svg", join_elements(bars), class_="bar", height=22, role="img", aria_label=label)

"""Parts of a whole as one stacked bar, each with its name and number in a list beside it."""

from __future__ import annotations

from collections.abc import Sequence

from fivefold.rendering.drawing.svg import element, joined, percent
from fivefold.rendering.elements import Raw
from fivefold.rendering.step_view import Part

NEAR = 4  # times the largest bar


def scale(largest: float, limit: float) -> tuple[float, float | None]:
    """How wide bars of up to ``largest`` are, and the ``limit`` if it is near; one far away would flatten them."""
    near = limit <= NEAR * largest
    return (max(largest, limit) if near else largest or 1.0) * 1.02, limit if near else None


def stacked(parts: Sequence[Part], *, whole: float, label: str, limit: float | None = None) -> Raw:
    """The bar, ``whole`` wide; ``limit``: where a capacity lies."""
    bars, at = [], 0.0
    for part in parts:
        if part.size > 0:
            tip = f"{part.name}  {part.text}"
            bars.append(element("rect", x=percent(at / whole), width=percent(part.size / whole), height="100%",
                                class_=f"k-{part.look}", data_tip=tip))  # fmt: skip
        at += part.size
    if limit is not None:
        bars += [element("line", x1=percent(limit / whole), x2=percent(limit / whole), y1=0, y2="100%", class_=look)
                 for look in ("limit-ground", "limit")]  # fmt: skip
    return element("svg", joined(bars), class_="bar", height=22, role="img", aria_label=label)

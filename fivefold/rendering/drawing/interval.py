"""Draw the range of comparable published runs: 90 % as a thin band, 50 % as a thick one, the prediction as a mark."""

from __future__ import annotations

from collections.abc import Callable

from fivefold.rendering.drawing.svg import element, join_elements, percent
from fivefold.rendering.elements import Raw
from fivefold.step import Interval


def band(interval: Interval, *, predicted: float, show: Callable[[float], str], label: str) -> Raw:
    """Draw the picture, with a margin on both sides."""
    low = min(interval.low_90, predicted)
    high = max(interval.high_90, predicted)
    margin = (high - low) * 0.08 or high * 0.1 or 1.0
    first, span = low - margin, high - low + 2 * margin

    def position(value: float) -> str:
        return percent((value - first) / span)

    def bar(begin: float, end: float, *, high: int, look: str, tip: str) -> Raw:
        return element(
            "rect",
            x=position(begin),
            width=percent((end - begin) / span),
            y=18 - high / 2,
            height=high,
            rx=3,
            class_=look,
            data_tip=tip,
        )

    most = f"90 % interval: {show(interval.low_90)} to {show(interval.high_90)}"
    half = f"50 % interval: {show(interval.low_50)} to {show(interval.high_50)}"
    marks = (
        bar(interval.low_90, interval.high_90, high=6, look="i-90", tip=most),
        bar(interval.low_50, interval.high_50, high=14, look="i-50", tip=half),
        element(
            "line",
            x1=position(predicted),
            x2=position(predicted),
            y1=6,
            y2=30,
            class_="i-mark",
            data_tip=f"predicted: {show(predicted)}",
        ),
        element("text", show(interval.low_90), x=position(interval.low_90), y=46, text_anchor="middle"),
        element("text", show(interval.high_90), x=position(interval.high_90), y=46, text_anchor="middle"),
    )
    return element(
        "svg", join_elements(marks), class_="interval", height=50, role="img", aria_label=f"{label}; {most}; {half}"
    )

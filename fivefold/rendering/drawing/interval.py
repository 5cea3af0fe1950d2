"""Draw the range of comparable published runs: 90 % as a thin band, 50 % as a thick one, the prediction as a mark."""

from __future__ import annotations

from collections.abc import Callable

from fivefold.rendering.drawing.svg import build_element, format_percent, join_elements
from fivefold.rendering.elements import Raw
from fivefold.step import Interval


def draw_band(interval: Interval, *, predicted: float, show: Callable[[float], str], label: str) -> Raw:
    """Draw the picture, with a margin on both sides."""
    low = min(interval.low_90, predicted)
    high = max(interval.high_90, predicted)
    margin = (high - low) * 0.08 or high * 0.1 or 1.0
    first, span = low - margin, high - low + 2 * margin

    def place_value(value: float) -> str:
        return format_percent((value - first) / span)

    def draw_bar(begin: float, end: float, *, high: int, look: str, tip: str) -> Raw:
        return build_element(
            "rect",
            x=place_value(begin),
            width=format_percent((end - begin) / span),
            y=18 - high / 2,
            height=high,
            rx=3,
            class_=look,
            data_tip=tip,
        )

    most = f"90 % interval: {show(interval.low_90)} to {show(interval.high_90)}"
    half = f"50 % interval: {show(interval.low_50)} to {show(interval.high_50)}"
    marks = (
        draw_bar(interval.low_90, interval.high_90, high=6, look="i-90", tip=most),
        draw_bar(interval.low_50, interval.high_50, high=14, look="i-50", tip=half),
        build_element(
            "line",
            x1=place_value(predicted),
            x2=place_value(predicted),
            y1=6,
            y2=30,
            class_="i-mark",
            data_tip=f"predicted: {show(predicted)}",
        ),
        build_element("text", show(interval.low_90), x=place_value(interval.low_90), y=46, text_anchor="middle"),
        build_element("text", show(interval.high_90), x=place_value(interval.high_90), y=46, text_anchor="middle"),
    )
    return build_element(
        "svg", join_elements(marks), class_="interval", height=50, role="img", aria_label=f"{label}; {most}; {half}"
    )

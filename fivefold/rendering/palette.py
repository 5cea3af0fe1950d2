"""The style of all pictures: colours by meaning, on light and on dark pages, and the settings of charts.

Blue, sky, green, orange, red, yellow and grey after Okabe and Ito (2008), adjusted until any two are at least 14 units
apart in CIE Lab, also as seen without one of the three kinds of cones (Machado, Oliveira and Fernandes 2009); a test
measures this.
"""

from __future__ import annotations

from textwrap import wrap
from typing import Any

COLOURS = {
    "blue": ("#0b6bb5", "#3d95d6"), "sky": ("#56b4e9", "#8fd0f7"), "green": ("#009e73", "#1fb88d"),
    "orange": ("#e69f00", "#f0a830"), "red": ("#d55e00", "#e8702a"), "pink": ("#b0569a", "#e08fc6"),
    "yellow": ("#f0e442", "#f7ee8a"), "grey": ("#8d949c", "#79828d"),
}  # fmt: skip
"""Name → colour on a light page, colour on a dark page."""
KINDS = {
    "parameters": "blue", "states": "blue", "F": "blue", "gradients": "sky", "optimizer": "green", "W": "green",
    "gathers": "red", "activations": "orange", "BW": "orange", "B": "orange", "messages": "red", "logits": "pink",
    "reduce": "pink", "data": "yellow", "inputs": "yellow", "temporary": "grey", "update": "grey", "host": "sky",
}  # fmt: skip
"""Name of the colour of each kind that many pictures show: parts of the memory, kinds of actions."""
BLUE, SKY, GREEN, ORANGE, RED, PINK, YELLOW, GREY = (light for light, _ in COLOURS.values())
SERIES = (BLUE, ORANGE, GREEN, RED, SKY, PINK, GREY, YELLOW, "#6b3a1e", "#332288")  # colours of a series, in order
IDLE = "#dcdfe3"  # idle time
LIMIT = "#b3400a"  # a capacity
INK, PALE_INK, RULE, TEXT = "#16191d", "#59626d", "#e6e9ed", "#3a4149"  # text; explanations; rules; headings
DARK_INK, LIGHT_INK = "#1c1400", "#ffffff"  # text on a colour
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'


def get_colour(kind: str) -> str:
    """Return the colour of a kind on a light page."""
    return COLOURS[KINDS[kind]][0]


def choose_ink(on: str) -> str:
    """Return black or white, whichever is readable on a colour (relative luminance of WCAG 2)."""
    red, green, blue = (_linearize(int(on[start : start + 2], 16) / 255) for start in (1, 3, 5))
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return DARK_INK if luminance > 0.2 else LIGHT_INK


def _linearize(value: float) -> float:
    return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4


def break_lines(text: str, *, width: float, size: float) -> str | list[str]:
    """Break a text of ``size`` pixels into lines no wider than ``width``: a picture is no wider than its chart."""
    lines = wrap(text, max(12, int(width / (size * 0.6))))  # letters of a bold font are 0.6 as wide as high
    return lines if len(lines) > 1 else text


def build_heading(title: str | list[str], subtitle: str | list[str] = "") -> dict[str, Any]:
    """Return the title of a chart, on top left; it states the finding."""
    return {
        "text": title,
        **({"subtitle": subtitle} if subtitle else {}),
        "anchor": "start",
        "frame": "bounds",
        "fontSize": 17,
        "subtitleFontSize": 12,
        "color": INK,
        "subtitleColor": PALE_INK,
        "offset": 14,
        "subtitlePadding": 5,
    }


CONFIG: dict[str, Any] = {
    "font": FONT,
    "axis": {"labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal", "titleColor": PALE_INK,
             "labelFlush": False, "labelColor": TEXT, "gridColor": RULE, "domainColor": RULE, "tickColor": RULE},
    "legend": {"labelFontSize": 12, "symbolType": "square", "columnPadding": 22},
    "text": {"fontSize": 12, "color": INK},
    "bar": {"discreteBandSize": {"band": 0.7}},
    "view": {"stroke": None},
    "concat": {"spacing": 18},
    "range": {"category": list(SERIES)},
}  # fmt: skip
"""Configuration of every Vega-Lite chart: fonts, rules, series."""

"""The style sheet of the pictures, built from ``rendering/palette.py``; the page serves it, a report includes it."""

from __future__ import annotations

import re

from fivefold.rendering.palette import COLOURS, KINDS, choose_ink
from fivefold.rendering.pipeline import LOOKS

INKS = {
    "page": ("#f6f7f9", "#0f1216"), "card": ("#ffffff", "#171b21"), "sunk": ("#eef0f3", "#20262e"),
    "line": ("#dfe3e8", "#2c333d"), "text": ("#16191d", "#e8ebef"), "dim": ("#59626d", "#a0a9b5"),
    "good": ("#0a7a55", "#3fcf9c"), "warn": ("#8a5a00", "#f0b950"), "bad": ("#b3400a", "#ff9a5c"),
    "hatch": ("#e6e9ed", "#232a33"),
}  # fmt: skip
PAGE_RULES = """
svg.chart, svg.bar, svg.interval { display: block; width: 100%; overflow: visible; }
svg.bar { border-radius: 6px; overflow: hidden; background: var(--sunk); }
svg.bar rect { height: 100%; }
svg.chart { width: calc(100% - 66px); margin: 10px 10px 40px 56px; }
svg.titled { margin-top: 26px; }
svg.named { margin-left: 90px; width: calc(100% - 100px); }
svg.parallel { min-width: 34rem; margin-left: 24px; width: calc(100% - 74px); }
svg.long { margin-left: 206px; width: calc(100% - 216px); }
svg .hit:hover { fill: var(--text); fill-opacity: .14; }
svg .marks rect[data-tip]:not(.hit):hover, svg.bar rect:hover { filter: brightness(1.15); }
.dot:hover, a:focus-visible .dot, .dot.linked { r: 8; }
.swatch { display: inline-block; margin-right: .5rem; vertical-align: -1px; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1rem; margin: .35rem 0 0; }
.legend { padding: 0; font-size: .84rem; color: var(--text); }
@media (max-width: 860px) { svg .digit, svg .wide { display: none; } }
"""
FILE_RULES = """
svg.chart { overflow: visible; }
text { font-family: system-ui, "Segoe UI", Roboto, "DejaVu Sans", Arial, sans-serif; }
svg .heading { fill: var(--text); font-weight: 600; }
.ground { fill: var(--card); }
"""
RULES = """
svg text { fill: var(--dim); font-size: 12px; }
svg .grid { stroke: var(--line); }
svg .limit { stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: 6 4; }
svg .limit-ground { stroke: var(--card); stroke-width: 3.5; }
svg .limit-text { fill: var(--bad); paint-order: stroke; }
svg .peak { fill: var(--text); stroke: var(--card); stroke-width: 1.5; }
svg .peak-text { fill: var(--text); font-weight: 600; paint-order: stroke; }
svg .peak-text, svg .limit-text { stroke: var(--card); stroke-width: 4px; stroke-linejoin: round; }
svg .hit { fill: transparent; }
svg .idle, .k-bubble { fill: var(--hatch); }
svg .marks rect:not(.hit):not(.idle) { stroke: var(--card); stroke-width: .8px; vector-effect: non-scaling-stroke; }
svg.streams .marks rect:not(.idle) { stroke: none !important; }
svg .digit { font-size: 11px; pointer-events: none; text-anchor: middle; }
svg .paler { opacity: .66; }
svg.pipeline .digit { font-weight: 600; }
.i-90 { fill: var(--sky); opacity: .55; }
.i-50 { fill: var(--blue); }
.i-mark { stroke: var(--text); stroke-width: 3; stroke-linecap: round; }
.dot { fill: var(--blue); stroke: var(--card); stroke-width: 1.5; }
.dot.measured { fill: var(--orange); }
.dot.over { fill: var(--grey); }
.dot.other { fill: var(--sky); }
.dot.linked { stroke: var(--text); }
.dot.selected { r: 8; stroke: var(--text); stroke-width: 3; }
.axis { stroke: var(--dim); }
.crossing.s-update { opacity: .45; }
.crossing:hover, .crossing.selected { stroke: var(--text); stroke-width: 4; opacity: 1; }
svg .mark-text { fill: var(--text); stroke: var(--card); stroke-width: 3px; paint-order: stroke; pointer-events: none; }
.stairs { fill: none; stroke: var(--sky); stroke-width: 2; vector-effect: non-scaling-stroke; }
.line { fill: none; }
.curve { fill: none; stroke-width: 2; vector-effect: non-scaling-stroke; stroke-linejoin: round; }
.s-predicted { stroke: var(--text); stroke-dasharray: 6 4; }
.k-predicted { fill: var(--text); }
.curve.expected { stroke-dasharray: 6 4; }
circle.dot:is(.s-predicted, .expected) { display: none; }
circle.dot[class*="s-"] { stroke: none; }
.k-bubble { stroke: var(--line); }
"""


def read_css() -> str:
    """Return the style sheet of pages, which follows light and dark mode."""
    colours = "".join(f" --{name}: light-dark({light}, {dark});" for name, (light, dark) in (INKS | COLOURS).items())
    return f":root {{{colours} }}\n{PAGE_RULES.strip()}\n{_mark_rules()}"


def build_file_css() -> str:
    """Return the style sheet of a picture file: light, and without variables, which other programs do not read."""
    light = {name: light for name, (light, _) in (INKS | COLOURS).items()}
    rules = re.sub(r"light-dark\((.*?),.*?\)", r"\1", f"{_mark_rules()}{FILE_RULES.strip()}")
    return re.sub(r"var\(--(\w+)\)", lambda name: light[name[1]], rules)


def _mark_rules() -> str:
    """Return the CSS of drawn shapes: ``.k-KIND`` fills, ``.s-KIND`` strokes, ``.on-KIND`` colours digits on a fill."""
    kinds = "".join(f".k-{kind} {{ fill: var(--{name}); }}\n" for kind, name in KINDS.items())
    lines = "".join(
        f".s-{kind} {{ stroke: var(--{name}); }} circle.s-{kind} {{ fill: var(--{name}); }}\n"
        for kind, name in KINDS.items()
        if kind in LOOKS
    )
    digits = "".join(
        f".on-{kind} {{ fill: light-dark({', '.join(map(choose_ink, COLOURS[name]))}); }}\n"
        for kind, name in KINDS.items()
        if kind in LOOKS
    )
    return f"{RULES.strip()}\n{kinds}{lines}{digits}"

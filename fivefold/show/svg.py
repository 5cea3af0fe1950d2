"""Pictures as SVG in a page: who does what when, memory over time, curves, points. Drawn by hand, in milliseconds.

A report is written at the end of every run, also where only the base package is installed: Altair and vl-convert would
take a second and a half for the same four pictures. Text is as large as the page's; nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from math import ceil, floor, log10
from typing import NamedTuple

from fivefold.layout.spans import Level
from fivefold.show import memory, pipeline
from fivefold.units import GIB, MIB, show_bytes

WIDTH, LEFT, TOP, BOTTOM = 860, 74, 10, 40  # of a picture, and of its margins
INK, RULE, RED = "currentColor", "color-mix(in srgb,currentColor 14%,transparent)", "#b3261e"


class Point(NamedTuple):
    """A point in the units of its axes; ``text`` is said under the mouse, ``label`` beside it."""

    x: float
    y: float
    text: str = ""
    label: str = ""


class Axis(NamedTuple):
    """One axis: what it shows, from where to where, and how many pixels it has."""

    title: str
    first: float
    last: float
    begin: float
    end: float

    def at(self, value: float) -> float:
        """The pixel of ``value``."""
        span = self.last - self.first or 1.0
        return self.begin + (value - self.first) / span * (self.end - self.begin)


def timeline(rows: pipeline.Rows, names: Sequence[str], *, pp: int, label: str) -> str:
    """A row for each rank: each action in colour, its micro-batch written where there is room."""
    last = max((row[-1].end for row in rows if row), default=0.0) or 1.0
    unit, per_second = ("s", 1.0) if last >= 2 else ("ms", 1e3)
    high = 26 if len(rows) <= 16 else max(6, 416 // len(rows))
    left = max(LEFT, 16 + 6.8 * max(map(len, names), default=0))
    time = Axis(f"time, {unit}", 0.0, last * per_second, left, WIDTH - 8)
    parts = [f'<rect x="{left:.1f}" y="{TOP + high * at + 1}" width="{WIDTH - 8 - left:.1f}" height="{high - 2}" '
             f'fill="{RULE}"/>' for at in range(len(rows))]  # fmt: skip
    used: dict[str, str] = {}
    for at, row in enumerate(rows):
        for block in (block for span in row for block in pipeline.blocks(span, pp=pp) if block.end > block.start):
            name, colour, _ = pipeline.LOOKS[block.kind]
            used[name] = colour
            parts.append(_block(block, colour, name, time, per_second, middle=TOP + high * (at + 0.5), high=high))
    every = 1 if high >= 13 else 4
    parts += [_text(left - 8, TOP + high * (at + 0.5) + 4, name, anchor="end") for at, name in
              enumerate(names) if at % every == 0]  # fmt: skip
    bottom = TOP + high * len(rows)
    return _picture([*parts, *_along(time, bottom)], height=bottom + BOTTOM, label=label) + _legend(used)


def _block(
    block: pipeline.Block, colour: str, name: str, time: Axis, per_second: float, *, middle: float, high: int
) -> str:
    begin, end = time.at(block.start * per_second), time.at(block.end * per_second)
    y, tall = middle + block.top * high, (block.bottom - block.top) * high
    faint = ' fill-opacity="0.62"' if block.chunk else ""
    drawn = f'<rect x="{begin:.2f}" y="{y:.2f}" width="{max(end - begin, 0.15):.2f}" height="{tall:.2f}" ' \
            f'fill="{colour}"{faint}><title>{name} {block.text}</title></rect>'  # fmt: skip
    if block.text and end - begin > 6.5 * len(block.text) + 2 and tall >= 9:
        drawn += _text((begin + end) / 2, y + tall / 2 + 4, block.text, anchor="middle",
                       fill="#222" if block.chunk or block.kind in ("BW", "B") else "white", size=10)  # fmt: skip
    return drawn


def areas(levels: Sequence[Level], *, capacity_bytes: int, label: str) -> str:
    """Live bytes over time by part, one on the other; the capacity as a dashed line if it is near."""
    top, last = memory.peak(levels), levels[-1].seconds or 1.0
    size, unit = (GIB, "GiB") if top.live_bytes >= GIB else (MIB, "MiB")
    time_unit, per_second = ("s", 1.0) if last >= 2 else ("ms", 1e3)
    near = capacity_bytes <= 3 * top.live_bytes
    most = max(top.live_bytes * 1.1, capacity_bytes * 1.04 if near else 0) / size
    bottom = TOP + 240
    x = Axis(f"time, {time_unit}", 0.0, last * per_second, LEFT, WIDTH - 8)
    y = Axis(unit, 0.0, most, bottom, TOP)
    drawn, used = _across(y, x), {}
    floor_of = [0] * len(levels)
    for place, (part, (colour, _)) in enumerate(memory.LOOKS.items()):
        own = [memory.parts(level)[place] for level in levels]
        if not any(own):
            continue
        used[part] = colour
        above = [low + more for low, more in zip(floor_of, own, strict=True)]
        line = [(x.at(level.seconds * per_second), y.at(size_ / size)) for level, size_ in
                zip(levels, above, strict=True)]  # fmt: skip
        back = [(x.at(level.seconds * per_second), y.at(size_ / size)) for level, size_ in
                zip(reversed(levels), reversed(floor_of), strict=True)]  # fmt: skip
        drawn.append(f'<path d="M{_path([*line, *back])}Z" fill="{colour}"><title>{part}</title></path>')
        floor_of = above
    if near:
        at = y.at(capacity_bytes / size)
        drawn.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - 8}" stroke="{RED}" stroke-width="1.5" '
                     'stroke-dasharray="6 4"/>')  # fmt: skip
        drawn.append(_text(WIDTH - 10, at + 14, f"chip {show_bytes(capacity_bytes)}", anchor="end", fill=RED))
    peak_x, peak_y = x.at(top.seconds * per_second), y.at(top.live_bytes / size)
    side = "start" if top.seconds < last / 2 else "end"
    said = f"{show_bytes(top.live_bytes)} in {top.cause}" if top.cause else show_bytes(top.live_bytes)
    drawn.append(f'<circle cx="{peak_x:.1f}" cy="{peak_y:.1f}" r="3.5" fill="{INK}"/>')
    drawn.append(_text(peak_x + (6 if side == "start" else -6), peak_y - 7, said, anchor=side))
    return _picture([*drawn, *_along(x, bottom)], height=bottom + BOTTOM, label=label) + _legend(used)


def curves(lines: Mapping[str, Sequence[Point]], colours: Mapping[str, str], *, x: str, y: str, label: str) -> str:
    """Lines over one pair of axes."""
    across, up, bottom = _axes([point for line in lines.values() for point in line], x=x, y=y)
    drawn = _across(up, across)
    for name, line in lines.items():
        path = _path([(across.at(point.x), up.at(point.y)) for point in line])
        drawn.append(f'<path d="M{path}" fill="none" stroke="{colours[name]}" stroke-width="1.8"><title>{escape(name)}'
                     "</title></path>")  # fmt: skip
    return _picture([*drawn, *_along(across, bottom)], height=bottom + BOTTOM, label=label) + _legend(colours)


def points(groups: Mapping[str, Sequence[Point]], colours: Mapping[str, str], *, x: str, y: str, label: str) -> str:
    """Dots over one pair of axes."""
    across, up, bottom = _axes([point for group in groups.values() for point in group], x=x, y=y)
    drawn = _across(up, across)
    for name, group in groups.items():
        for point in group:
            at, high = across.at(point.x), up.at(point.y)
            drawn.append(f'<circle cx="{at:.1f}" cy="{high:.1f}" r="4" fill="{colours[name]}" fill-opacity="0.75">'
                         f"<title>{escape(point.text)}</title></circle>")  # fmt: skip
            if point.label:
                side = "start" if at < (LEFT + WIDTH) / 2 else "end"
                drawn.append(_text(at + (7 if side == "start" else -7), high - 6, point.label, anchor=side, size=11))
    keys = _legend(colours) if len(groups) > 1 else ""
    return _picture([*drawn, *_along(across, bottom)], height=bottom + BOTTOM, label=label) + keys


def _axes(found: Sequence[Point], *, x: str, y: str) -> tuple[Axis, Axis, float]:
    bottom = TOP + 240.0
    low, high = min(point.y for point in found), max(point.y for point in found)
    margin = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    first, last = min(point.x for point in found), max(point.x for point in found)
    room = (last - first) * 0.03 or abs(last) * 0.1 or 1.0
    across = Axis(x, first - room, last + room, LEFT, WIDTH - 8)
    return across, Axis(y, max(0.0, low - margin), high + margin, bottom, TOP), bottom


def ticks(first: float, last: float, *, about: int = 6) -> list[float]:
    """Round numbers from ``first`` to ``last``."""
    span = last - first
    if span <= 0:
        return [first]
    power = 10.0 ** floor(log10(span / about))
    step = next(power * each for each in (1, 2, 5, 10) if span / (power * each) <= about)
    return [round(step * each, 10) for each in range(ceil(first / step - 1e-9), floor(last / step + 1e-9) + 1)]


def _along(axis: Axis, bottom: float) -> list[str]:
    """The axis of time or size below a picture."""
    found = [f'<path d="M{axis.begin} {bottom:.1f}H{axis.end}" stroke="{RULE}"/>']
    found += [_text(axis.at(value), bottom + 15, f"{value:,g}", anchor="middle", size=11)
              for value in ticks(axis.first, axis.last, about=9)]  # fmt: skip
    return [*found, _text((axis.begin + axis.end) / 2, bottom + 33, axis.title, anchor="middle", size=12)]


def _across(axis: Axis, along: Axis) -> list[str]:
    """Rules and numbers of the upright axis."""
    found = []
    for value in ticks(axis.first, axis.last, about=5):
        at = axis.at(value)
        found.append(f'<path d="M{along.begin} {at:.1f}H{along.end}" stroke="{RULE}"/>')
        found.append(_text(along.begin - 7, at + 4, f"{value:,g}", anchor="end", size=11))
    middle = (axis.begin + axis.end) / 2
    turned = f'transform="rotate(-90 14 {middle:.1f})"'
    return [*found, _text(14, middle, axis.title, anchor="middle", size=12, more=turned)]


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, fill: str = INK, more: str = ""
) -> str:
    return (f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{fill}" {more}>'
            f"{escape(text)}</text>")  # fmt: skip


def _path(found: Iterable[tuple[float, float]]) -> str:
    """Corners as a path; those that lie on one pixel with the last are left out."""
    kept: list[str] = []
    for x, y in found:
        corner = f"{x:.1f} {y:.1f}"
        if not kept or corner != kept[-1]:
            kept.append(corner)
    return "L".join(kept)


def _picture(parts: Iterable[str], *, height: float, label: str) -> str:
    return (f'<svg viewBox="0 0 {WIDTH} {height:.0f}" width="100%" role="img" aria-label="{escape(label)}" '
            f'font-family="inherit">{"".join(parts)}</svg>')  # fmt: skip


def _legend(colours: Mapping[str, str]) -> str:
    keys = "".join(
        f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in colours.items()
    )
    return f'<div class="legend">{keys}</div>'

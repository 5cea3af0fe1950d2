"""Parallel coordinates: an axis for each quantity, and a line through the values of each item, which links to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from fivefold.rendering.drawing.plot import SIDE, choose_ticks, plot
from fivefold.rendering.drawing.svg import build_element, format_percent, join_elements
from fivefold.rendering.elements import Raw

HEIGHT = 300
MIN_ROOM = 10  # letters between two axes


class ParallelAxis(NamedTuple):
    """An axis. ``values``: one per line, in order; with ``is_measure`` they have a linear scale, else equal steps."""

    name: str
    values: Sequence[float | str]
    is_measure: bool = False


class ParallelLine(NamedTuple):
    """A line. ``tip``: the text under the mouse; ``look``: the kind whose colour it has."""

    tip: str
    href: str
    look: str


def draw_parallel_axes(axes: Sequence[ParallelAxis], lines: Sequence[ParallelLine], *, label: str) -> Raw:
    """Draw the axes that have several values, and the lines, the first on top; empty if fewer than three axes do."""
    axes = [axis for axis in axes if len(set(axis.values)) > 1]
    if len(axes) < 3:
        return Raw("")
    scales = [_scale(axis) for axis in axes]
    places = _place_axes(scales)
    paths = []
    for index, line in reversed(list(enumerate(lines))):
        heights = [_place_value(axis.values[index], scale) for axis, scale in zip(axes, scales, strict=True)]
        points = "L".join(f"{x * SIDE:.1f} {y * SIDE:.1f}" for x, y in zip(places, heights, strict=True))
        path = build_element("path", d=f"M{points}", class_=f"curve crossing s-{line.look}", data_tip=line.tip)
        paths.append(build_element("a", path, href=line.href, tabindex=-1, aria_label=line.tip))
    return plot(
        join_elements(paths),
        label=label,
        height=HEIGHT,
        x=[(place, axis.name) for place, axis in zip(places, axes, strict=True)],
        y=[],
        over=join_elements(
            text for place, scale in zip(places, scales, strict=True) for text in _draw_marks(place, scale)
        ),
        kind="named parallel",
        role="group",
    )


def _place_axes(scales: Sequence[Sequence[tuple[float | str, float]]]) -> list[float]:
    """Return the place of each axis, as a share from the left; one with long texts gets more room to its right."""
    rooms = [max(MIN_ROOM, *(len(_show_mark(value)) for value, _ in scale)) for scale in scales[:-1]]
    return [place / sum(rooms) for place in accumulate(rooms, initial=0)]


def _show_mark(value: float | str) -> str:
    return f"{value:.3g}" if isinstance(value, int | float) else value


def _scale(axis: ParallelAxis) -> list[tuple[float | str, float]]:
    """Return the marks of an axis: value and height, as a share from the top."""
    if axis.is_measure:
        numbers = [float(value) for value in axis.values]
        low, high = min(numbers), max(numbers)
        return [
            (low, 1.0),
            *((tick, 1 - (tick - low) / (high - low)) for tick in choose_ticks(high, first=low)),
            (high, 0.0),
        ]
    values = sorted(set(axis.values), key=lambda value: (isinstance(value, str), value))
    return [(value, 1 - place / (len(values) - 1)) for place, value in enumerate(values)]


def _place_value(value: float | str, scale: Sequence[tuple[float | str, float]]) -> float:
    """Return the height of a value: that of its mark, or between the ends of a linear scale."""
    exact = [height for mark, height in scale if mark == value]
    if exact:
        return exact[0]
    (low, _), (high, _) = scale[0], scale[-1]
    return 1 - (float(value) - float(low)) / (float(high) - float(low))


def _draw_marks(place: float, scale: Sequence[tuple[float | str, float]]) -> Iterator[Raw]:
    """Yield an axis and the texts of its marks, without those that would touch a neighbour."""
    yield build_element("line", x1=format_percent(place), x2=format_percent(place), y1=0, y2="100%", class_="axis")
    last = 2.0
    for value, height in scale:
        if last - height >= 15 / HEIGHT:
            yield build_element(
                "text",
                _show_mark(value),
                x=format_percent(place),
                y=format_percent(height),
                dx=6,
                dy="0.35em",
                class_="mark-text",
            )
            last = height

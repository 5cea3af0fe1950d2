"""The streams of one rank: its compute, by module, and its messages, a line per communicator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fivefold.rendering.drawing.plot import SIDE, choose_label_class, choose_ticks, plot, time_unit
from fivefold.rendering.drawing.svg import build_element, join_elements
from fivefold.rendering.elements import Raw
from fivefold.units import show_seconds

HIGH = 26  # height of a line, in pixels
FINEST = 1 / 900  # share of the picture: shorter pieces are merged with their neighbours


class StreamPiece(NamedTuple):
    """An interval of time. ``look``: its class; ``tip``: the text under the mouse."""

    start: float
    end: float
    look: str
    tip: str


def draw_streams(lines: Sequence[tuple[str, Sequence[StreamPiece]]], *, last: float, label: str) -> Raw:
    """Draw the chart of lines by name, ``last`` seconds long."""
    per_second, unit = time_unit(last)
    marks = (
        mark for line, (_, pieces) in enumerate(lines) for mark in _draw_marks(pieces, line, len(lines), last=last)
    )
    return plot(
        join_elements(marks),
        label=label,
        height=HIGH * len(lines),
        grid=False,
        kind=f"streams {choose_label_class(name for name, _ in lines)}",
        x=[(tick / per_second / last, f"{tick:g}") for tick in choose_ticks(last * per_second, about=6)],
        y=[((line + 0.5) / len(lines), name) for line, (name, _) in enumerate(lines)],
        x_title=f"time, {unit}",
    )


def _draw_marks(pieces: Sequence[StreamPiece], at: int, lines: int, *, last: float) -> Iterator[Raw]:
    y, height = SIDE * (at + 0.1) / lines, SIDE * 0.8 / lines
    yield build_element("rect", x=0, width=SIDE, y=y, height=height, class_="idle")
    for piece in merge_pieces(pieces, last * FINEST):
        tip = f"{piece.tip}\n{show_seconds(piece.end - piece.start)}"
        x, width = (round(seconds / last * SIDE, 2) for seconds in (piece.start, piece.end - piece.start))
        yield build_element("rect", x=x, width=width, y=y, height=height, class_=piece.look, data_tip=tip)


def merge_pieces(pieces: Sequence[StreamPiece], finest: float) -> Iterator[StreamPiece]:
    """Yield the pieces; neighbours that are too short to be told apart become one, with the tip of the longest."""
    group: list[StreamPiece] = []
    for piece in pieces:
        if group and piece.end - group[0].start > finest:
            yield _merge_pieces(group)
            group = []
        group.append(piece)
    if group:
        yield _merge_pieces(group)


def _merge_pieces(held: Sequence[StreamPiece]) -> StreamPiece:
    longest = max(held, key=lambda piece: piece.end - piece.start)
    count_text = f"\nand {len(held) - 1} shorter" if len(held) > 1 else ""
    return longest._replace(start=held[0].start, end=held[-1].end, tip=longest.tip + count_text)

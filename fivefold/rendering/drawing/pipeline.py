"""The pipeline over time: a row per rank, each action in colour with its micro-batch, the bubble hatched between."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import NamedTuple

from fivefold.errors import UserError
from fivefold.rendering.drawing.file import PictureFile
from fivefold.rendering.drawing.plot import SIDE, choose_label_class, choose_ticks, plot, time_unit
from fivefold.rendering.drawing.svg import build_element, format_percent, join_elements
from fivefold.rendering.elements import Raw
from fivefold.rendering.pipeline import LOOKS, PipelineRectangle, Rows, describe_step, split_span
from fivefold.rendering.question import count_ranks
from fivefold.results.spans import Span
from fivefold.step import Step
from fivefold.units import show_seconds

ASSUMED_WIDTH = 1000  # assumed width of the marks on a screen in pixels: text is written where it fits
HIGHEST = 520
MAX_TOOLTIP_SPANS = 1000  # up to this number of spans each has a tip; above it, those of a kind and rank are one line
MIN_TENTHS = 5.0  # half a pixel of ``ASSUMED_WIDTH``, the least width of a block or gap in a line, in tenths of a unit
_Look = tuple[str, bool, float, float]  # kind, whether paler, top and bottom


class _Place(NamedTuple):
    """The position of a block, as shares of the picture."""

    x: float
    width: float
    y: float
    height: float


def draw_pipeline(rows: Rows, *, label: str, names: Sequence[str] = (), pp: int | None = None) -> Raw:
    """Draw the chart; ``names``: one for each row, by default the ranks; ``pp``: pipeline ranks, by default all."""
    end = max(row[-1].end for row in rows)
    per_second, unit = time_unit(end)
    row_height = find_row_height(len(rows))
    label_interval = 1 if row_height >= 13 else 4
    row_names = names or [f"rank {rank}" for rank in range(len(rows))]
    has_tips = sum(map(len, rows)) <= MAX_TOOLTIP_SPANS
    placed = list(_list_blocks(rows, last=end, pp=pp or len(rows))) if has_tips else []
    idle = (
        build_element(
            "rect", x=0, width=SIDE, y=SIDE * (row + 0.06) / len(rows), height=SIDE * 0.88 / len(rows), class_="idle"
        )
        for row in range(len(rows))
    )
    return plot(
        join_elements(
            (*idle, *(_draw_rectangles(placed) if has_tips else _draw_lines(rows, last=end, pp=pp or len(rows))))
        ),
        label=label,
        height=row_height * len(rows),
        grid=False,
        kind=f"pipeline {choose_label_class(row_names)}",
        x=[(tick / per_second / end, f"{tick:g}") for tick in choose_ticks(end * per_second, about=6)],
        y=[((row + 0.5) / len(rows), name) for row, name in enumerate(row_names) if row % label_interval == 0],
        x_title=f"time, {unit}",
        over=join_elements(_draw_digits(placed)) if row_height >= 13 else "",
    )


def find_row_height(rows: int) -> int:
    """Return the height of one of ``rows`` rows in pixels."""
    return max(9, min(30, HIGHEST // rows))


def draw_file(
    rows: Rows, *, step: Step, drawn: str = "", names: Sequence[str] = (), pp: int | None = None
) -> PictureFile:
    """Return the chart of a step as a file; ``drawn``: which part of the step it shows (``pipeline.remark``)."""
    if not rows or not all(rows):
        raise UserError("no rank does anything; there is nothing to draw")
    stages = pp or len(rows)
    has_paler = any(block.chunk for row in rows for span in row for block in split_span(span, pp=stages))
    title = describe_step(step.time, rows)
    return PictureFile(
        title=title,
        lines=(
            f"{step.model} on {step.machine}, {count_ranks(step.world)} · {step.layout}",
            " · ".join(filter(None, (drawn, "paler: a rank's later stages" if has_paler else ""))),
        ),
        chart=draw_pipeline(rows, label=title, names=names, pp=pp),
        height=find_row_height(len(rows)) * len(rows),
        looks=list_legend_entries(rows),
        left=max(62, round(7 * max(map(len, names), default=0))),
    )


def draw_lanes(kinds: Mapping[str, Rows], *, step: Step, drawn: str = "") -> PictureFile:
    """Return several timelines of a step as a file, one above the other, each named by its kind."""
    rows = [row for kind_rows in kinds.values() for row in kind_rows]
    names = [f"{kind.replace('_', ' ')} {rank}" for kind, kind_rows in kinds.items() for rank in range(len(kind_rows))]
    return draw_file(rows, step=step, drawn=drawn, names=names, pp=min(len(kind_rows) for kind_rows in kinds.values()))


def list_legend_entries(rows: Rows) -> list[tuple[str, str]]:
    """Return class and name of the kinds that the picture shows."""
    kinds: set[str] = {span.kind for row in rows for span in row}
    kinds |= {"F", "BW"} if "FB" in kinds else set()
    kinds |= {"messages"} if any(span.messages for row in rows for span in row if span.kind != "reduce") else set()
    return list({name: (kind, name) for kind, (name, _, _) in LOOKS.items() if kind in kinds}.values())


def _list_blocks(rows: Rows, *, last: float, pp: int) -> Iterator[tuple[_Place, PipelineRectangle, Span]]:
    for rank, row in enumerate(rows):
        for span in row:
            for block in split_span(span, pp=pp):
                if block.end > block.start:
                    top, bottom = (rank + 0.5 + edge for edge in (block.top, block.bottom))
                    width = (block.end - block.start) / last
                    height = (bottom - top) / len(rows)
                    yield _Place(block.start / last, width, top / len(rows), height), block, span


def _draw_rectangles(drawn: Sequence[tuple[_Place, PipelineRectangle, Span]]) -> Iterator[Raw]:
    """Yield a rectangle for each block, with the text of its span under the mouse."""
    for place, block, span in drawn:
        x, width, y, height = (SIDE * share for share in place)
        yield Raw(  # faster than ``element``, as there may be many; nothing needs escaping
            f'<rect x="{x:.2f}" width="{width:.2f}" y="{y:.1f}" height="{height:.1f}" class="{_look(block)}" '
            f'data-tip="{_make_tooltip(span)}"/>'
        )


def _draw_lines(rows: Rows, *, last: float, pp: int) -> Iterator[Raw]:
    """Yield lines as thick as a row, one for all blocks of a kind in a row, of which there are many.

    Backward passes are painted first, so that one line runs on below the forwards between them.
    """
    row_height, tenths = SIDE / len(rows), 10 * SIDE / last
    for rank, row in enumerate(rows):
        lines: dict[_Look, _Line] = {}
        for span in row:
            for kind, start, end, _, chunk, top, bottom in split_span(span, pp=pp):
                key = (kind, chunk > 0, top, bottom)
                line = lines.get(key)
                if line is None:
                    line = lines[key] = _Line(_find_layer(kind, top=top, bottom=bottom))
                if (drawn := line.draw(start * tenths, end * tenths)) is None:
                    continue
                for other in lines.values():  # a line runs on below what is painted over it
                    if other.layer < line.layer and drawn[0] - other.covered <= MIN_TENTHS:
                        other.covered = drawn[1]
        for (kind, paler, top, bottom), line in sorted(lines.items(), key=lambda item: item[1].layer):
            if not line.segments:
                continue
            yield build_element(
                "path",
                d=line.write(y=round((rank + 0.5 + (top + bottom) / 2) * row_height, 1)),
                class_=f"line s-{kind}" + (" paler" if paler else ""),
                stroke_width=(bottom - top) * row_height,
                transform="scale(.1 1)",
            )


def _find_layer(kind: str, *, top: float, bottom: float) -> int:
    """Return when a kind is painted; of a pair in two halves of a row neither covers the other."""
    if bottom - top < 0.5:
        return 0
    return {"BW": 1, "B": 1, "W": 2, "F": 3}.get(kind, 4)


class _Line:
    """The segments of one kind in one row, in tenths of a unit of the picture, in order of time.

    A gap narrower than ``MIN_TENTHS`` is closed. Narrower blocks are drawn as one where they add up to that width.
    """

    def __init__(self, layer: int) -> None:
        self.layer, self.segments, self.covered, self.owed = layer, list[list[float]](), -inf, 0.0

    def draw(self, start: float, end: float) -> tuple[float, float] | None:
        """Add a block, and return the part that is drawn."""
        if end - start < MIN_TENTHS:
            self.owed += max(0.0, end - start)
            if self.owed < MIN_TENTHS:
                return None
            start, self.owed = end - self.owed, 0.0
        if start - self.covered <= MIN_TENTHS:
            self.segments[-1][1] = end
        else:
            self.segments.append([start, end])
        self.covered = end
        return start, end

    def write(self, *, y: float) -> str:
        """Return the line as the data of a path, in moves relative to the end of the segment before."""
        moves, now = [], 0
        for start, end in self.segments:
            first, end_tenths = round(start), round(end)
            moves.append(f"m{first - now} 0h{end_tenths - first}")
            now = end_tenths
        return f"M0 {y:g}" + "".join(moves)


def _look(block: PipelineRectangle) -> str:
    return f"k-{block.kind}" + (" paler" if block.chunk else "")


def _draw_digits(drawn: Sequence[tuple[_Place, PipelineRectangle, Span]]) -> Iterator[Raw]:
    for place, block, _ in drawn:
        if block.text and place.width * ASSUMED_WIDTH > 7 * len(block.text) + 3:
            x = format_percent(place.x + place.width / 2)
            y = format_percent(place.y + place.height / 2)
            yield build_element("text", block.text, x=x, y=y, dy="0.35em", class_=f"digit on-{block.kind}")


def _make_tooltip(span: Span) -> str:
    lines = [f"{span.name}  {show_seconds(span.seconds)}"]
    if span.micro_batch >= 0:
        lines.append(f"stage {span.stage}, micro-batch {span.micro_batch}")
    if span.messages:
        lines.append(f"of it {show_seconds(span.messages)} messages of {', '.join(span.axes) or 'dp'}")
    return "\n".join(lines)

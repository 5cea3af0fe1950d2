"""Draws the pipeline schedule: ranks as rows, time to the right, each action in colour with its micro-batch.

    rank 0 │0 1 2 3     0───1───2───3───│
    rank 1 │  0 1 2 0───3 1───2───  3───│

As an Altair chart, and as text for a terminal of any width. A span's exposed messages are drawn at its end. An
overlapped pair (FB) takes two halves of a row: the forward above, the backward below.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from io import StringIO
from typing import Any, NamedTuple

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from fivefold.record import Mistake
from fivefold.rendering import charts
from fivefold.rendering.palette import DARK_INK, RULE, colour, heading, ink
from fivefold.results.spans import Span
from fivefold.step import Step, Time
from fivefold.units import show_seconds

Rows = Sequence[Sequence[Span]]

# kind of a span → its name, its colour, and its character for terminals without colours
LOOKS = {
    kind: (name, colour(kind), letter)
    for kind, name, letter in (
        ("F", "forward", "█"), ("BW", "backward", "▓"), ("B", "backward", "▓"), ("W", "weight gradients", "▒"),
        ("messages", "messages, exposed", "!"), ("reduce", "reduce, gather", "="), ("update", "update", "#"),
        ("data", "data", "d"),
    )
}  # fmt: skip
WIDTH = 920  # pixels
SAME = 0.99  # share of the step's time from which a drawing is of the whole step
LIGHTER = 0.62  # opacity of a rank's later chunks


class Block(NamedTuple):
    """A rectangle of one kind, in seconds; ``top`` and ``bottom`` in rows, relative to the middle of the rank's row."""

    kind: str
    start: float
    end: float
    text: str = ""
    chunk: int = 0  # 0 for the rank's first
    top: float = -0.44
    bottom: float = 0.44


def blocks(span: Span, *, pp: int) -> Iterator[Block]:
    """Split a span into rectangles of compute and of exposed messages."""
    between = span.end - span.messages
    chunk = max(0, span.stage // pp)
    if span.kind == "reduce":  # all of it are messages
        yield Block(span.kind, span.start, span.end)
        return
    if span.kind == "FB":
        yield Block("F", span.start, between, str(span.micro_batch), chunk, -0.44, 0.0)
        text, other = str(span.backward_micro_batch), span.backward_stage // pp
        yield Block("BW", span.start, between, text, other, 0.0, 0.44)
    else:
        text = str(span.micro_batch) if span.micro_batch >= 0 else ""
        yield Block(span.kind, span.start, between, text, chunk)
    if span.messages:
        yield Block("messages", between, span.end)


def remark(shown: int, micro_batches: int) -> str:
    """Say how many of a step's micro-batches are drawn."""
    if shown == micro_batches:
        return f"{micro_batches} micro-batches" if micro_batches > 1 else "1 micro-batch"
    return f"drawn with {shown} of {micro_batches} micro-batches; those left out repeat the rounds in the middle"


def finding(time: Time, rows: Rows = ()) -> str:
    """Return the title: the share of compute in the step, and what takes most of the rest.

    If ``rows``, which are drawn, are of a shorter step with fewer micro-batches, it says how long that one is and how
    much of it is idle.
    """
    rest = {f"{axis} messages take": seconds for axis, seconds in time.exposed_seconds.items()}
    rest |= {"the bubble takes": time.bubble_seconds, "the update takes": time.optimizer_seconds}
    rest |= {"the host takes": time.host_seconds, "the data takes": time.data_seconds}
    largest = max(rest, key=lambda name: rest[name])
    whole = time.step_seconds
    share = f", {largest} {rest[largest] / whole:.1%}" if rest[largest] else ""
    said = f"On the slowest rank compute fills {time.compute_seconds / whole:.0%} of the {show_seconds(whole)}{share}"
    end = max((row[-1].end for row in rows if row), default=whole)
    if end > SAME * whole:
        return said
    idle = 1 - sum(span.end - span.start for row in rows for span in row) / (end * len(rows))
    return f"{said}.\nDrawn are fewer micro-batches: {show_seconds(end)}, of which ranks idle {idle:.0%}"


def lanes(kinds: Mapping[str, Rows], *, step: Step, drawn: str = "") -> charts.Chart:
    """Return one chart of several timelines of a step, one above the other, each named by its kind."""
    rows = [row for each in kinds.values() for row in each]
    names = [f"{kind} {rank}" for kind, each in kinds.items() for rank in range(len(each))]
    return chart(rows, step=step, drawn=drawn, names=names, pp=min(len(each) for each in kinds.values()))


def chart(
    rows: Rows, *, step: Step, drawn: str = "", names: Sequence[str] = (), pp: int | None = None
) -> charts.Chart:  # fmt: skip
    """Return the schedule as an Altair chart; ``drawn``: which part of the step it shows, as ``remark`` says.

    ``names``: of the rows, else ranks; ``pp``: pipeline ranks, else the number of rows.
    """
    alt = charts._altair()
    if not rows or not all(rows):
        raise Mistake("no rank does anything; there is nothing to draw")
    last = max(row[-1].end for row in rows)
    unit, per_second = ("s", 1.0) if last >= 2 else ("ms", 1e3)
    high = 30 if len(rows) <= 16 else max(8, 480 // len(rows))
    values = [value for rank, row in enumerate(rows) for value in _values(row, rank, pp=pp or len(rows))]
    for value in values:
        room = (value["end"] - value["start"]) / last * WIDTH
        value["wide"] = int(bool(value["text"]) and room > 6.5 * len(value["text"]) + 2)
        value |= {"start": value["start"] * per_second, "end": value["end"] * per_second}
    names = names or [f"rank {rank}" for rank in range(len(rows))]
    places = _Axes(alt, names=names, last=last * per_second, unit=unit, every=1 if high >= 14 else 4)
    kinds = {value["kind"] for value in values}
    colours = {name: colour for name, colour, _ in LOOKS.values() if name in kinds}
    whole = [{"start": 0, "end": last * per_second, "top": rank - 0.44, "bottom": rank + 0.44}
             for rank in range(len(rows))]  # fmt: skip
    base = alt.Chart(data(values))
    picture = alt.Chart(data(whole)).mark_rect(color=RULE).encode(**places.rectangle) + base.mark_rect(
        stroke="white", strokeWidth=0.6 if high >= 14 else 0.2
    ).encode(
        **places.rectangle,
        color=charts._colour("kind", colours),
        opacity=alt.Opacity("opacity:Q", scale=None),
    )
    if high >= 14:
        middle = {"x": "(datum.start + datum.end) / 2", "y": "(datum.top + datum.bottom) / 2"}
        wide = base.transform_filter("datum.wide == 1").transform_calculate(**middle)
        picture += wide.mark_text(baseline="middle").encode(
            x=places.x("x:Q"), y=places.y("y:Q"), text="text:N",
            size=alt.Size("size:Q", scale=None), color=alt.Color("ink:N", scale=None),
        )  # fmt: skip
    paler = "paler: a rank's later stages" if any(value["opacity"] < 1 for value in values) else ""
    below = [
        f"{step.model} on {step.machine}, {step.world} ranks · {step.layout}",
        " · ".join(filter(None, (drawn, paler))),
    ]
    return titled(picture, finding(step.time, rows).splitlines(), below=below, height=high * len(rows))


def data(values: Sequence[Mapping[str, Any]]) -> charts.Chart:
    """Return rows as inline CSV data: as objects Altair would validate each value, a second per thousand."""
    text = StringIO()
    writer = csv.DictWriter(text, fieldnames=list(values[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(values)
    alt = charts._altair()
    kinds = {name: "string" if isinstance(value, str) else "number" for name, value in values[0].items()}
    return alt.Data(values=text.getvalue(), format=alt.CsvDataFormat(type="csv", parse=kinds))


def titled(picture: charts.Chart, title: str | Sequence[str], *, below: Sequence[str], height: int) -> charts.Chart:
    """Finish a chart in the common style, wide, with the lines of ``below`` under the title."""
    finished = charts._finish(picture, title="", subtitle="", height=height)
    return finished.properties(
        width=WIDTH, title=heading("") | {"text": title, "subtitle": [line for line in below if line]}
    )


class _Axes:
    """The chart's time and rank axes, shared by its layers."""

    def __init__(self, alt: charts.Chart, *, names: Sequence[str], last: float, unit: str, every: int) -> None:
        self.alt, ranks = alt, len(names)
        self.time = alt.Axis(grid=False, tickCount=10), alt.Scale(domain=[0, last], nice=False), f"time, {unit}"
        self.labels = alt.Axis(
            values=list(range(0, ranks, every)), labelExpr=f"{list(names)}[datum.value]", labelOverlap=False,
            grid=False, ticks=False, domain=False, labelPadding=8,
        )  # fmt: skip
        self.lines = alt.Scale(domain=[ranks - 0.5, -0.5], nice=False)

    def x(self, field: str) -> charts.Chart:
        """Return the time axis for a field."""
        axis, scale, title = self.time
        return self.alt.X(field, title=title, scale=scale, axis=axis)

    def y(self, field: str) -> charts.Chart:
        """Return the axis of ranks for a field, rank 0 on top."""
        return self.alt.Y(field, title=None, scale=self.lines, axis=self.labels)

    @property
    def rectangle(self) -> dict[str, charts.Chart]:
        """The encodings of a rectangle: start to end, top to bottom."""
        return {"x": self.x("start:Q"), "x2": "end:Q", "y": self.y("top:Q"), "y2": "bottom:Q"}


def _values(row: Sequence[Span], rank: int, *, pp: int) -> Iterator[dict[str, Any]]:
    for span in row:
        for block in blocks(span, pp=pp):
            if block.end > block.start:
                yield {
                    "kind": LOOKS[block.kind][0], "start": block.start, "end": block.end, "text": block.text,
                    "top": rank + block.top, "bottom": rank + block.bottom,
                    "opacity": LIGHTER if block.chunk else 1.0,
                    "ink": DARK_INK if block.chunk else ink(LOOKS[block.kind][1]),
                    "size": 11 if block.bottom - block.top > 0.5 else 9,
                }  # fmt: skip


class Picture:
    """The same for a terminal: a line per rank, in colours if there are any, else in characters."""

    def __init__(self, rows: Rows, *, drawn: str = "") -> None:
        self.rows, self.drawn = rows, drawn

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render for the terminal's width; called by rich."""
        plain = console.color_system is None
        last = max(row[-1].end for row in self.rows)
        label = len(f"rank {len(self.rows) - 1}") + 1
        width = max(1, options.max_width - label - 2)
        kinds: dict[str, None] = {}
        for rank, row in enumerate(self.rows):
            drawn = [block for span in row for block in blocks(span, pp=len(self.rows))]
            line = Text(f"{f'rank {rank}':<{label}}", no_wrap=True, overflow="crop")
            line.append("│", "dim")
            for kind, text in _cells(drawn, width=width, scale=width / last):
                kinds |= {kind: None} if kind else {}
                line.append(*_cell(kind, text, plain=plain))
            yield line.append("│", "dim")
        yield _axis(last, label=label, width=width)
        yield legend([look for kind, look in LOOKS.items() if kind in kinds], plain=plain)
        if self.drawn:
            yield Text(self.drawn, style="dim", overflow="fold")


def _cells(drawn: Sequence[Block], *, width: int, scale: float) -> list[tuple[str, str]]:
    """Return (kind, text) for each column: the kind that fills most of it ("" if it is nearly idle), and a digit of the
    micro-batch, or "·" if it is half idle. Of an overlapped pair the first half of the time shows the forward.
    """
    cover: list[dict[str, float]] = [{} for _ in range(width)]
    placed = [(block, *_in_columns(block, scale)) for block in drawn]
    for block, start, end in placed:
        for column in range(int(start), min(width, int(end) + 1)):
            part = min(end, column + 1) - max(start, column)
            cover[column][block.kind] = cover[column].get(block.kind, 0.0) + part
    busy = [sum(each.values()) for each in cover]
    cells = [(max(each, key=lambda kind: each[kind]), "" if share > 0.5 else "·") if share > 0.1 else ("", "")
             for each, share in zip(cover, busy, strict=True)]  # fmt: skip
    for block, start, end in placed:
        first, last = round(start), round(end)
        if last - first > len(block.text) and all(kind == block.kind for kind, _ in cells[first:last]):
            cells[first : first + len(block.text)] = [(block.kind, letter) for letter in block.text]
    return cells


def _in_columns(block: Block, scale: float) -> tuple[float, float]:
    start, end = block.start * scale, block.end * scale
    if block.bottom - block.top > 0.5:
        return start, end
    middle = (start + end) / 2
    return (start, middle) if block.top < 0 else (middle, end)


def _cell(kind: str, text: str, *, plain: bool) -> tuple[str, str]:
    """Return a cell's character and style."""
    if not kind:
        return " ", ""
    _, fill, letter = LOOKS[kind]
    if plain:
        return text or letter, ""
    return ("▒", fill) if text == "·" else (text or " ", f"bold {ink(fill)} on {fill}")


def _axis(last: float, *, label: int, width: int) -> Text:
    end = show_seconds(last)
    line = f"{'':<{label}}0{end:>{max(1, width + 1)}}"
    return Text(line, style="dim", no_wrap=True, overflow="crop")


def legend(items: Sequence[tuple[str, str, str]], *, plain: bool) -> Columns:
    """Return a legend of (name, colour, character): with colours, or if ``plain`` with characters."""
    entries = {
        name: Text.assemble((letter * 2 if plain else "  ", "" if plain else f"on {colour}"), f" {name}")
        for name, colour, letter in items
    }
    return Columns(entries.values(), padding=(0, 2))

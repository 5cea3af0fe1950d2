"""Draw the pipeline schedule: ranks as rows, time to the right, each action in colour with its micro-batch.

    rank 0 │0 1 2 3     0───1───2───3───│
    rank 1 │  0 1 2 0───3 1───2───  3───│

This is text for a terminal of any width; ``drawing/pipeline`` draws it as SVG. A span's exposed messages are drawn at
its end. An overlapped pair (FB) takes two halves of a row: the forward above, the backward below.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from fivefold.rendering.palette import choose_ink, get_colour
from fivefold.results.spans import Span
from fivefold.step import Time
from fivefold.units import show_seconds

Rows = Sequence[Sequence[Span]]

# kind of a span → its name, its colour, and its character on terminals without colours
LOOKS = {
    kind: (name, get_colour(kind), letter)
    for kind, name, letter in (
        ("F", "forward", "█"),
        ("BW", "backward", "▓"),
        ("B", "backward", "▓"),
        ("W", "weight gradients", "▒"),
        ("messages", "exposed communication", "!"),
        ("reduce", "reduce, gather", "="),
        ("update", "update", "#"),
        ("data", "data", "d"),
    )
}
FULL_STEP_SHARE = 0.99  # share of the step's time above which a drawing shows the full step


class PipelineRectangle(NamedTuple):
    """A rectangle of one kind, in seconds; ``top`` and ``bottom`` in rows, relative to the middle of the rank's row."""

    kind: str
    start: float
    end: float
    text: str = ""
    chunk: int = 0  # index of the stage on its rank
    top: float = -0.44
    bottom: float = 0.44


def split_span(span: Span, *, pp: int) -> Iterator[PipelineRectangle]:
    """Split a span into rectangles of compute and of exposed messages."""
    compute_end = span.end - span.messages
    chunk = max(0, span.stage // pp)
    if span.kind == "reduce":  # it consists of messages
        yield PipelineRectangle(span.kind, span.start, span.end)
        return
    if span.kind == "FB":
        yield PipelineRectangle("F", span.start, compute_end, str(span.micro_batch), chunk, -0.44, 0.0)
        text = str(span.backward_micro_batch)
        backward_chunk = span.backward_stage // pp
        yield PipelineRectangle("BW", span.start, compute_end, text, backward_chunk, 0.0, 0.44)
    else:
        text = str(span.micro_batch) if span.micro_batch >= 0 else ""
        yield PipelineRectangle(span.kind, span.start, compute_end, text, chunk)
    if span.messages:
        yield PipelineRectangle("messages", compute_end, span.end)


def describe_window(shown: int, micro_batches: int) -> str:
    """Return how many of a step's micro-batches are drawn."""
    if shown == micro_batches:
        return f"{micro_batches} micro-batches" if micro_batches > 1 else "1 micro-batch"
    return f"drawn with {shown} of {micro_batches} micro-batches; those left out repeat the rounds in the middle"


def describe_step(time: Time, rows: Rows = ()) -> str:
    """Return the title: the share of compute in the step, and what takes most of the rest.

    If ``rows``, which are drawn, are of a shorter step with fewer micro-batches, the title also gives its time and the
    share of it that is idle.
    """
    rest = {f"{axis} communication takes": seconds for axis, seconds in time.exposed_seconds.items()}
    rest |= {"the bubble takes": time.bubble_seconds, "the update takes": time.optimizer_seconds}
    rest |= {"the host takes": time.host_seconds, "the data takes": time.data_seconds}
    largest = max(rest, key=lambda name: rest[name])
    total = time.step_seconds
    share = f", {largest} {rest[largest] / total:.1%}" if rest[largest] else ""
    sentence = (
        f"On the slowest rank compute fills {time.compute_seconds / total:.0%} of the {show_seconds(total)}{share}"
    )
    drawn_seconds = max((row[-1].end for row in rows if row), default=total)
    if drawn_seconds > FULL_STEP_SHARE * total:
        return sentence
    idle = 1 - sum(span.end - span.start for row in rows for span in row) / (drawn_seconds * len(rows))
    return f"{sentence}.\nFewer micro-batches are drawn: {show_seconds(drawn_seconds)}, of which ranks idle {idle:.0%}"


class PipelinePicture:
    """The schedule for a terminal: a line per rank, in colours if there are any, else in characters."""

    def __init__(self, rows: Rows, *, drawn: str = "") -> None:
        self.rows, self.drawn = rows, drawn

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render for the terminal's width; called by rich."""
        without_colours = console.color_system is None
        end_seconds = max(row[-1].end for row in self.rows)
        label = len(f"rank {len(self.rows) - 1}") + 1
        width = max(1, options.max_width - label - 2)
        kinds: dict[str, None] = {}
        for rank, row in enumerate(self.rows):
            drawn_blocks = [block for span in row for block in split_span(span, pp=len(self.rows))]
            line = Text(f"{f'rank {rank}':<{label}}", no_wrap=True, overflow="crop")
            line.append("│", "dim")
            for kind, text in _list_cells(drawn_blocks, width=width, scale=width / end_seconds):
                kinds |= {kind: None} if kind else {}
                line.append(*_choose_cell(kind, text, plain=without_colours))
            yield line.append("│", "dim")
        yield _draw_axis(end_seconds, label=label, width=width)
        yield draw_legend([look for kind, look in LOOKS.items() if kind in kinds], plain=without_colours)
        if self.drawn:
            yield Text(self.drawn, style="dim", overflow="fold")


def _list_cells(drawn: Sequence[PipelineRectangle], *, width: int, scale: float) -> list[tuple[str, str]]:
    """Return (kind, text) for each column.

    The kind is the one that fills most of it ("" if it is nearly idle); the text is a digit of the micro-batch, or "·"
    if the column is half idle. For an overlapped pair the first half of the time shows the forward.
    """
    cover: list[dict[str, float]] = [{} for _ in range(width)]
    placed = [(block, *_to_columns(block, scale)) for block in drawn]
    for block, start, end in placed:
        for column in range(int(start), min(width, int(end) + 1)):
            overlap = min(end, column + 1) - max(start, column)
            cover[column][block.kind] = cover[column].get(block.kind, 0.0) + overlap
    busy = [sum(widths.values()) for widths in cover]
    cells = [
        (max(widths, key=lambda kind: widths[kind]), "" if share > 0.5 else "·") if share > 0.1 else ("", "")
        for widths, share in zip(cover, busy, strict=True)
    ]
    for block, start, end in placed:
        first, last = round(start), round(end)
        if last - first > len(block.text) and all(kind == block.kind for kind, _ in cells[first:last]):
            cells[first : first + len(block.text)] = [(block.kind, letter) for letter in block.text]
    return cells


def _to_columns(block: PipelineRectangle, scale: float) -> tuple[float, float]:
    start, end = block.start * scale, block.end * scale
    if block.bottom - block.top > 0.5:
        return start, end
    middle = (start + end) / 2
    return (start, middle) if block.top < 0 else (middle, end)


def _choose_cell(kind: str, text: str, *, plain: bool) -> tuple[str, str]:
    """Return a cell's character and style."""
    if not kind:
        return " ", ""
    _, fill, letter = LOOKS[kind]
    if plain:
        return text or letter, ""
    return ("▒", fill) if text == "·" else (text or " ", f"bold {choose_ink(fill)} on {fill}")


def _draw_axis(last: float, *, label: int, width: int) -> Text:
    end = show_seconds(last)
    line = f"{'':<{label}}0{end:>{max(1, width + 1)}}"
    return Text(line, style="dim", no_wrap=True, overflow="crop")


def draw_legend(items: Sequence[tuple[str, str, str]], *, plain: bool) -> Columns:
    """Return a legend of (name, colour, character): with colours, or if ``plain`` with characters."""
    entries = {
        name: Text.assemble((letter * 2 if plain else "  ", "" if plain else f"on {colour}"), f" {name}")
        for name, colour, letter in items
    }
    return Columns(entries.values(), padding=(0, 2))

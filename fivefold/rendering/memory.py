"""Draw memory over time of one rank: stacked live bytes by category, the peak, and the capacity of the chip.

    80 GiB ┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄
    40 GiB    ▂▅█▇▅▃  ▂▅█▇▅▃     activations
     0 GiB ██████████████████    states

This is text for a terminal of any width; ``drawing/memory`` draws it as SVG.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from fivefold.rendering.palette import get_colour
from fivefold.rendering.pipeline import draw_legend
from fivefold.results.spans import Level
from fivefold.units import choose_byte_unit, show_bytes, show_cause, show_seconds

# part of a level, from the bottom up → its colour, and its character on terminals without colours
LOOKS = {
    part: (get_colour(part), letter)
    for part, letter in {
        "states": "█",
        "gradients": "▓",
        "activations": "▒",
        "gathers": "=",
        "logits": "%",
        "temporary": "·",
    }.items()
}
LINES = 12  # height of the text picture
EIGHTHS = " ▁▂▃▄▅▆▇█"


def list_parts(level: Level) -> tuple[int, ...]:
    """Return the bytes of each part, in the order of ``LOOKS``."""
    return tuple(getattr(level, f"{part}_bytes") for part in LOOKS)


def find_peak(levels: Sequence[Level]) -> Level:
    """Return the level with the most live bytes."""
    return max(levels, key=lambda level: level.live_bytes)


def describe_peak(levels: Sequence[Level], *, rank: int, capacity_bytes: int) -> str:
    """Return the title: the peak, and the share of the capacity that remains."""
    top = find_peak(levels)
    free_bytes = capacity_bytes - top.live_bytes
    remainder = (
        f"leaves {free_bytes / capacity_bytes:.0%}" if free_bytes >= 0 else f"is {show_bytes(-free_bytes)} too much"
    )
    return f"Rank {rank} peaks at {show_bytes(top.live_bytes)}, which {remainder} of {show_bytes(capacity_bytes)}"


class MemoryPicture:
    """Memory over time for a terminal: a column shows the fullest level of its time interval, in eighths of a line."""

    def __init__(self, levels: Sequence[Level], *, rank: int, capacity_bytes: int) -> None:
        self.levels, self.rank, self.capacity_bytes = levels, rank, capacity_bytes

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render for the terminal's width; called by rich."""
        without_colours = console.color_system is None
        top = find_peak(self.levels)
        size, unit = choose_byte_unit(top.live_bytes)
        label = len(f"{top.live_bytes / size:.0f} {unit}") + 1
        width = max(1, options.max_width - label - 2)
        columns = _sample_columns(self.levels, width)
        bytes_per_line = top.live_bytes / LINES
        for row in reversed(range(LINES)):
            mark = f"{(row + 1) * bytes_per_line / size:.0f} {unit}" if row % 3 == 2 else ""
            line = Text(f"{mark:>{label - 1}} ", no_wrap=True, overflow="crop")
            line.append("│", "dim")
            for level in columns:
                line.append(*_choose_cell(level, row * bytes_per_line, bytes_per_line, plain=without_colours))
            yield line
        end = show_seconds(self.levels[-1].seconds)
        yield Text(f"{f'0 {unit}':>{label - 1}} └{end:>{width}}", style="dim", no_wrap=True, overflow="crop")
        occurs_list = [any(sizes) for sizes in zip(*map(list_parts, self.levels), strict=True)]
        yield draw_legend(
            [(part, *look) for (part, look), occurs in zip(LOOKS.items(), occurs_list, strict=True) if occurs],
            plain=without_colours,
        )
        cause = f" in {show_cause(top.cause)}" if top.cause else ""
        words = describe_peak(self.levels, rank=self.rank, capacity_bytes=self.capacity_bytes)
        yield Text(f"{words}{cause and ';'}{cause}", overflow="fold")


def _choose_cell(level: Level, floor: int | float, bytes_per_cell: float, *, plain: bool) -> tuple[str, str]:
    """Return a cell's character and style: the part in its middle, or eighths of a block at the top of the column."""
    fill = min(8, round((level.live_bytes - floor) / bytes_per_cell * 8))
    if fill <= 0:
        return " ", ""
    middle = floor + min(bytes_per_cell, level.live_bytes - floor) / 2
    stack_tops = zip(LOOKS.values(), accumulate(list_parts(level)), strict=True)
    colour, letter = next(look for look, top in stack_tops if middle <= top)
    if fill < 8:
        return EIGHTHS[fill], "" if plain else colour
    return (letter, "") if plain else ("█", colour)


def _sample_columns(levels: Sequence[Level], width: int) -> list[Level]:
    """Return the fullest level within each of ``width`` equal time intervals, interpolating at the interval's ends."""
    seconds_per_column = levels[-1].seconds / width or 1.0
    fullest: list[Level | None] = [None] * width
    for before, after in pairwise([levels[0], *levels]):
        first, last = (min(width - 1, int(level.seconds / seconds_per_column)) for level in (before, after))
        edges = (_interpolate(before, after, seconds=edge * seconds_per_column) for edge in range(first + 1, last + 1))
        for level_in_column in (*edges, after):
            for column in {
                min(width - 1, max(0, int(level_in_column.seconds / seconds_per_column + nudge)))
                for nudge in (-1e-6, 1e-6)
            }:
                best = fullest[column]
                if best is None or level_in_column.live_bytes > best.live_bytes:
                    fullest[column] = level_in_column
    return [level or levels[0] for level in fullest]


def _interpolate(before: Level, after: Level, *, seconds: float) -> Level:
    """Interpolate linearly between two levels."""
    span = after.seconds - before.seconds
    share = (seconds - before.seconds) / span if span else 1.0
    sizes = (round(x + share * (y - x)) for x, y in zip(before[1:7], after[1:7], strict=True))
    return Level._make((seconds, *sizes, ""))

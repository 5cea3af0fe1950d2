"""A terminal table of memory by pipeline stage; neighbouring stages with the same numbers share a line.

    stage  states  activations  temporary   peak
    0       17.00        22.00       2.00  41.00  ████████▒▒▒▒▒▒▒▒▒▒·  logits
    1–14    12.00        17.00       2.00  31.00  ██████▒▒▒▒▒▒▒▒·      block backward

Columns that do not fit the terminal are left out, the least important first; stage and peak always stay.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from fivefold.step import StageMemory
from fivefold.units import choose_byte_unit, show_cause

MEMORY_PARTS = {"states": ("blue", "█"), "activations": ("yellow", "▒"), "temporary": ("bright_black", "·")}
BAR_WIDTH = 20
COLUMN_ORDER = ("stage", "peak", "states", "activations", "temporary", "", "cause")  # by importance; "" is the bar
ORDER = ("stage", "states", "activations", "temporary", "peak", "", "cause")  # from left to right


class StageTable:
    """A rich renderable of the table, for any width of terminal. ``legend``: GiB or MiB, and the bar's parts."""

    def __init__(self, stages: Sequence[StageMemory]) -> None:
        self.highest = max(stage.peak_bytes for stage in stages)
        self.size, unit = choose_byte_unit(self.highest)
        self.legend = "; ".join((unit, " ".join(f"{letter} {part}" for part, (_, letter) in MEMORY_PARTS.items())))
        self.rows = [
            self._build_row(list(equal_stages)) for _, equal_stages in groupby(stages, key=self._format_numbers)
        ]

    def _format_numbers(self, stage: StageMemory) -> dict[str, str]:
        return {name: f"{getattr(stage, f'{name}_bytes') / self.size:.2f}" for name in (*MEMORY_PARTS, "peak")}

    def _build_row(self, equal_stages: list[StageMemory]) -> dict[str, Text]:
        """Return the row of consecutive stages with equal memory."""
        first, last = equal_stages[0].stage, equal_stages[-1].stage
        cause = show_cause(equal_stages[0].peak_cause) or "–"
        if first != last:
            cause = re.sub(r"block \d+", "a block", cause)  # each of these stages has a different block
        cells = {
            "stage": str(first) if first == last else f"{first}–{last}",
            **self._format_numbers(equal_stages[0]),
            "cause": cause,
        }
        return {**{name: Text(cell) for name, cell in cells.items()}, "": self._draw_bar(equal_stages[0])}

    def _draw_bar(self, stage: StageMemory) -> Text:
        bar, total = Text(), 0
        for name, (colour, letter) in MEMORY_PARTS.items():
            before = round(total / self.highest * BAR_WIDTH) if self.highest else 0
            total = min(stage.peak_bytes, total + getattr(stage, f"{name}_bytes"))
            after = round(total / self.highest * BAR_WIDTH) if self.highest else 0
            bar.append(letter * (after - before), colour)
        return bar

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render for the terminal's width; called by rich."""
        widths = {name: max(len(name), *(row[name].cell_len for row in self.rows)) for name in ORDER}
        shown: list[str] = []
        for name in COLUMN_ORDER:
            if len(shown) >= 2 and sum(widths[shown_name] + 2 for shown_name in (*shown, name)) - 2 > options.max_width:
                break
            shown.append(name)
        columns = [name for name in ORDER if name in shown]
        yield self._build_line(
            [Text(name, MEMORY_PARTS.get(name, ("",))[0]) for name in columns], columns, widths, style="bold"
        )
        for row in self.rows:
            yield self._build_line([row[name] for name in columns], columns, widths)

    def _build_line(self, cells: list[Text], columns: list[str], widths: dict[str, int], *, style: str = "") -> Text:
        line = Text(style=style, overflow="fold")
        for name, cell in zip(columns, cells, strict=True):
            space = " " * (widths[name] - cell.cell_len)
            left = name in ("stage", "", "cause")
            line.append_text(Text.assemble(*((cell, space) if left else (space, cell)), "  "))
        line.rstrip()
        return line

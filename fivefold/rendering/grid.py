"""A table for any terminal width: columns if they fit, else one card (heading and cell per line) per row.

Numbers are never cut: number columns keep their width, word columns wrap between words.
"""

from __future__ import annotations

from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class Grid:
    """``rows``: one cell per heading. Columns in ``words`` are left-aligned and may wrap; the others are numbers."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str | Text, ...], ...]
    words: tuple[str, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render for the terminal's width; called by rich."""
        columns = self._columns()
        needed = Measurement.get(console, options.update(max_width=10_000), columns).minimum
        yield columns if needed <= options.max_width else self._cards()

    def _columns(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="bold")
        for place, heading in enumerate(self.headings):
            if heading in self.words:
                table.add_column(heading, overflow="fold")
            else:  # rich would take the longest word of a cell for its least width
                width = max((_plain(row[place]).cell_len for row in self.rows), default=0)
                table.add_column(heading, justify="right", no_wrap=True, min_width=width)
        for row in self.rows:
            table.add_row(*map(_plain, row))
        return table

    def _cards(self) -> Table:
        cards = Table.grid(padding=(0, 1, 0, 0))
        cards.add_column(overflow="fold", style="dim")
        cards.add_column(overflow="fold")
        for row in self.rows:
            for heading, cell in zip(self.headings, row, strict=True):
                cards.add_row(heading, _plain(cell))
            cards.add_row()
        return cards


def _plain(cell: str | Text) -> Text:
    """Return a cell as text, so that rich does not read brackets as markup."""
    return Text(cell) if isinstance(cell, str) else cell

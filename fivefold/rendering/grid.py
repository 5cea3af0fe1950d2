"""A table as data, built once for the terminal, HTML and the web application.

    SPEED = (Column("layout", attrgetter("layout"), is_text=True), Column("step", attrgetter("seconds"), show_seconds))
    make_grid(SPEED, records)

The terminal prints a ``Grid`` with rich: all columns if they fit its width, else as many as fit from the left and a
line that names the others. One or two rows that do not fit are printed as cards, heading and cell per line. Numbers are
never cut: number columns keep their width, text columns wrap between words. ``elements.grid`` writes the same table as
HTML, and the macro ``grid`` of the web templates as a table that can be sorted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

Item = TypeVar("Item")
PADDING = 1  # blanks at the right of a cell
MIN_COLUMNS = 3  # fewer columns of a table are not printed: cards are
FULL_COLUMNS = 5  # tables of up to n columns are printed in full, as cards if they do not fit
MIN_ROWS = 3  # fewer rows are printed as cards rather than without columns
TONES = {"green": "good", "yellow": "warn", "red": "bad"}  # colour of a rich style → class in HTML


@dataclass(frozen=True)
class Column(Generic[Item]):
    """A column of a table of records: how its cells are read from a record and written.

    ``value`` reads the field, by which a page sorts; None is written as ``missing``. ``show`` writes it in its unit.
    ``is_wide``: HTML and the web show the column unless it is empty; the terminal, which is narrow, leaves it out.
    """

    heading: str
    value: Callable[[Item], Any]
    show: Callable[[Any], str | Text] = str
    is_text: bool = False
    is_wide: bool = False
    missing: str = "–"

    def write(self, value: Any) -> str | Text:
        """Return the cell of a value."""
        return self.missing if value is None else self.show(value)


@dataclass(frozen=True)
class Grid:
    """A table with one cell per heading in each of ``rows``.

    Columns in ``words`` are left-aligned and may wrap; the others are numbers. ``wide``: columns that the terminal
    leaves out. ``values``: the numbers behind the cells, row by row, if known. ``records``: the records of the rows, if
    known, by which a page links them.
    """

    headings: tuple[str, ...]
    rows: tuple[tuple[str | Text, ...], ...]
    words: tuple[str, ...]
    wide: tuple[str, ...] = ()
    values: tuple[tuple[Any, ...], ...] = ()
    records: tuple[Any, ...] = ()

    def drop_columns(self, headings: Collection[str]) -> Grid:
        """Return the table without the columns of these headings."""
        indices = [index for index, heading in enumerate(self.headings) if heading not in headings]

        def pick(row: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(row[index] for index in indices)

        rows, values = tuple(map(pick, self.rows)), tuple(map(pick, self.values))
        return Grid(pick(self.headings), rows, self.words, values=values, records=self.records)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render for the terminal's width; called by rich."""
        if self.wide:
            yield self.drop_columns(self.wide)
            return

        for count in range(len(self.headings), 0, -1):
            dropped = self.headings[count:]
            if dropped and (count < MIN_COLUMNS or len(self.headings) <= FULL_COLUMNS or len(self.rows) < MIN_ROWS):
                break
            shown = self.drop_columns(dropped)
            if (widths := shown._find_widths(options.max_width)) is not None:
                yield shown._render_columns(widths)
                if dropped:
                    yield Text(f"too narrow to show: {', '.join(dropped)}", style="dim")
                return
        yield self._render_cards()

    def _find_widths(self, available: int) -> list[int] | None:
        """Return the width of each column, ``available`` characters in all; None if numbers or words had to be cut.

        The widest columns of words are narrowed first. (rich would narrow them below the longest word of a cell.)
        """
        least, most = list[int](), list[int]()
        for heading, *column in zip(self.headings, *self.rows, strict=True):
            cells = [_to_text(cell) for cell in (heading, *column)]
            most.append(max(cell.cell_len for cell in cells))
            words = [Text(word).cell_len for cell in cells for word in cell.plain.split()]
            least.append(max(words, default=0) if heading in self.words else most[-1])
        available -= len(self.headings) * (PADDING + 1) - 1  # and a blank between two columns
        for widest in range(max(most), -1, -1):
            widths = [max(low, min(high, widest)) for low, high in zip(least, most, strict=True)]
            if sum(widths) <= available:
                return widths
        return None

    def _render_columns(self, widths: Sequence[int]) -> Table:
        """Return the table with a column for each heading; columns of numbers are never wrapped."""
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, PADDING, 0, 0), header_style="bold")
        for heading, width in zip(self.headings, widths, strict=True):
            table.add_column(heading, justify="left" if heading in self.words else "right", width=width)
        for row in self.rows:
            table.add_row(*map(_to_text, row))
        return table

    def _render_cards(self) -> Table:
        cards = Table.grid(padding=(0, 1, 0, 0))
        cards.add_column(overflow="fold", style="dim")
        cards.add_column(overflow="fold")
        for row in self.rows:
            for heading, cell in zip(self.headings, row, strict=True):
                cards.add_row(heading, _to_text(cell))
            cards.add_row()
        return cards


def make_grid(columns: Sequence[Column[Item]], records: Iterable[Item]) -> Grid:
    """Return the table of ``records``, a row each; wide columns in which every cell is empty are left out."""
    records = tuple(records)
    values = [[column.value(record) for column in columns] for record in records]
    indices = [
        index
        for index, column in enumerate(columns)
        if not column.is_wide or any(row[index] not in (None, "") for row in values)
    ]
    shown_columns = [columns[index] for index in indices]
    return Grid(
        tuple(column.heading for column in shown_columns),
        tuple(tuple(columns[index].write(row[index]) for index in indices) for row in values),
        words=tuple(column.heading for column in shown_columns if column.is_text),
        wide=tuple(column.heading for column in shown_columns if column.is_wide),
        values=tuple(tuple(row[index] for index in indices) for row in values),
        records=records,
    )


def find_tone(cell: str | Text) -> str:
    """Return the meaning of a cell's colour: ``good``, ``warn``, ``bad`` or ""."""
    style = str(cell.style) if isinstance(cell, Text) else ""
    return next((tone for colour, tone in TONES.items() if colour in style), "")


def find_weight(line: Text) -> str:
    """Return the weight of a line: ``lead`` if it or a part of it is bold, ``dim`` or ""."""
    style = " ".join(str(part) for part in (line.style, *(span.style for span in line.spans)))
    return "lead" if "bold" in style else "dim" if "dim" in style else ""


def show_share(share: float) -> str:
    """Write a share in per cent."""
    return f"{share:.1%}"


def show_change(change: float) -> str:
    """Write a relative change in per cent, with its sign."""
    return f"{change:+.1%}"


def _to_text(cell: str | Text) -> Text:
    """Return a cell as text, so that rich does not read brackets as markup."""
    return Text(cell) if isinstance(cell, str) else cell

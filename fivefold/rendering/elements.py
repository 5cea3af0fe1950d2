"""Pieces of HTML: tables, stacked bars with their legend, key figures, and the style of all pages.

The HTML fetches no script, font or file. Text from a user is escaped. A page can be read without its style sheet, since
Jupyter removes it from a notebook that others have executed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from io import StringIO
from typing import NamedTuple

from rich.console import Console, RenderableType
from rich.text import Text

from fivefold.rendering.grid import Grid, find_tone
from fivefold.rendering.palette import BLUE, GREEN, GREY, IDLE, LIMIT, ORANGE, PINK, RED, SERIES, SKY, YELLOW
from fivefold.rendering.step_view import Figure

TIME_COLOURS = {"compute": BLUE, "bubble": IDLE, "optimizer": GREY, "data": YELLOW, "host": PINK}
AXIS_COLOURS = (RED, GREEN, SKY, ORANGE, *SERIES[-2:])

# Inline styles: pages that show notebooks of others (Jupyter, code hosts) remove every style sheet.
BLOCK = "display:inline-block"
KEY = f"{BLOCK};width:10px;height:10px"
STYLE = """
.fivefold{font:14px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;max-width:60rem;
 --soft:color-mix(in srgb,currentColor 72%,transparent);--rule:color-mix(in srgb,currentColor 16%,transparent)}
body[data-jp-theme-light=false] .fivefold,.vscode-dark .fivefold,html[theme=dark] .fivefold,.dark .fivefold{
 color-scheme:dark}
.fivefold h1{font-size:1.5rem;margin:.2rem 0}.fivefold h2{font-size:1.15rem;margin:1.6rem 0 .4rem}
.fivefold h3{font-size:1rem;margin:1rem 0 .3rem}.fivefold p{margin:.3rem 0}.fivefold .soft{color:var(--soft)}
.fivefold code,.fivefold pre{font:12.5px/1.5 ui-monospace,Menlo,Consolas,monospace}
.fivefold pre{white-space:pre-wrap;overflow-wrap:anywhere;background:color-mix(in srgb,currentColor 6%,transparent);
 padding:.6rem .8rem;border-radius:6px;margin:.4rem 0}
.fivefold .figures{display:flex;flex-wrap:wrap;gap:.4rem 2rem;margin:.5rem 0}
.fivefold .figures div{min-width:7rem}.fivefold .figures b{display:block;font-size:1.25rem;font-weight:600}
.fivefold div.bar{display:flex;height:22px;border-radius:3px;overflow:hidden}
.fivefold div.bar i{display:block;height:100%;min-width:1px}
.fivefold .barred{display:grid;grid-template-columns:minmax(5rem,max-content) 1fr max-content;gap:4px 10px;
 align-items:center;margin:.4rem 0}
.fivefold .row{display:contents}.fivefold .track{position:relative}
.fivefold .track u{position:absolute;top:-3px;bottom:-3px;width:0;
 border-left:2px dashed light-dark(#b3400a,#ff9a5c)}
.fivefold div.legend{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:12.5px;margin:.3rem 0 .6rem}
.fivefold div.legend i{border-radius:2px;margin-right:5px}.fivefold img{max-width:100%;border-radius:6px}
.fivefold .wide{overflow-x:auto}.fivefold table{border-collapse:collapse;margin:.4rem 0;font-size:13px}
.fivefold th,.fivefold td{text-align:right;padding:2px 12px 2px 0;border-bottom:1px solid var(--rule);
 vertical-align:top;font-variant-numeric:tabular-nums;background:none}
.fivefold th{font-weight:600;color:var(--soft)}.fivefold table :is(td,th).w{text-align:left}
.fivefold td:not(.w){white-space:nowrap}.fivefold td.w{min-width:5.5rem}
.fivefold .good{color:light-dark(#1a7f37,#4ac26b)}.fivefold .bad{color:light-dark(#c62828,#ff7b72);font-weight:600}
.fivefold summary{cursor:pointer;color:var(--soft)}
"""


class Raw(str):
    """Text that is HTML already and is not escaped again, here or in a template."""

    __slots__ = ()

    def __html__(self) -> str:
        """Return the text itself; templates call this."""
        return self


class Bar(NamedTuple):
    """A stacked bar: sizes by part, in the unit of all bars next to it; ``text`` stands at its end."""

    name: str
    parts: Mapping[str, float]
    text: str


def escape_text(text: object) -> str:
    """Return text as HTML."""
    return text if isinstance(text, Raw) else escape(str(text))


def join_parts(*parts: str) -> str:
    """Join the parts of a page in one element with its style sheet, for a notebook."""
    return f'<div class="fivefold"><style>{STYLE}</style>{"".join(parts)}</div>'


def build_heading(title: str, remark: str = "", *, level: int = 3) -> str:
    """Return a heading, with a remark next to it."""
    remark_html = f' <span class="soft" style="font-weight:400">{escape_text(remark)}</span>' if remark else ""
    return f"<h{level}>{escape_text(title)}{remark_html}</h{level}>"


def build_paragraph(text: object, *, kind: str = "") -> str:
    """Return a paragraph; ``kind``: soft, good or bad."""
    return f'<p class="{kind}">{escape_text(text)}</p>' if kind else f"<p>{escape_text(text)}</p>"


def build_figures(what: Iterable[Figure]) -> str:
    """Return key figures in a row: names and values."""
    content = "".join(
        f'<div><b>{escape_text(figure.text)}</b> <span class="soft">'
        f"{escape_text(f'{figure.name}, {figure.remark}' if figure.remark else figure.name)}</span></div>"
        for figure in what
    )
    return f'<div class="figures">{content}</div>'


def build_table(headings: Sequence[str], rows: Iterable[Sequence[object]], *, left: Sequence[str] = ()) -> str:
    """Return a table; columns named in ``left`` are text, the others numbers."""
    kinds = [' class="w"' if name in left else "" for name in headings]
    head = "".join(
        f"<th{kind}>{escape_text(name)}</th>" if name.strip() else f"<td{kind}></td>"
        for kind, name in zip(kinds, headings, strict=True)
    )
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{escape_text(cell)}</td>" for kind, cell in zip(kinds, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def convert_grid(what: Grid) -> str:
    """Return a ``Grid`` as an HTML table, with its marks of the best and of errors."""
    return build_table(what.headings, ([_mark_cell(cell) for cell in row] for row in what.rows), left=what.words)


def _mark_cell(cell: str | Text) -> str:
    if isinstance(cell, str):
        return cell
    tone = find_tone(cell)
    return Raw(f'<span class="{tone}">{escape(cell.plain)}</span>') if tone else cell.plain


def convert_terminal(what: RenderableType) -> str:
    """Return what a terminal shows, as preformatted text."""
    console = Console(file=StringIO(), record=True, width=120, color_system="standard", force_terminal=True)
    console.print(what)
    text = console.export_text(styles=False).rstrip()
    return f"<pre>{escape(text)}</pre>"


def draw_bars(
    rows: Sequence[Bar], colours: Mapping[str, str], *, limit: float | None = None, limit_name: str = ""
) -> str:
    """Return stacked bars on one scale, with a legend of the parts that occur; ``limit``: a dashed line across them."""
    totals = [sum(bar.parts.values()) for bar in rows]
    shows_limit = limit is not None and limit <= 2.5 * max(
        totals, default=0.0
    )  # a limit far away would flatten the bars
    scale_max = max([*totals, limit * 1.02 if shows_limit and limit else 0.0], default=0.0) or 1.0
    lines = []
    for bar in rows:
        filled = "".join(
            f'<i style="{BLOCK};height:22px;width:{100 * size / scale_max:.3f}%;background:{colours.get(part, GREY)}" '
            f'title="{escape_text(part)}"></i>'
            for part, size in bar.parts.items()
            if size > 0
        )
        mark = f'<u style="left:{100 * limit / scale_max:.3f}%"></u>' if shows_limit and limit else ""
        lines.append(
            f'<div class="row"><span>{escape_text(bar.name)}</span> '
            f'<div class="track"><div class="bar">{filled}</div>{mark}'
            f"</div> <span>{escape_text(bar.text)}</span></div>"
        )
    used_parts = [part for part in colours if any(bar.parts.get(part) for bar in rows)]
    keys = " ".join(
        f'<span><i style="{KEY};background:{colours[part]}"></i> {escape_text(part)}</span>' for part in used_parts
    )
    keys += (
        f' <span><i style="{KEY};background:{LIMIT}"></i> {escape_text(limit_name)}</span>'
        if shows_limit and limit_name
        else ""
    )
    return f'<div class="barred">{"".join(lines)}</div><div class="legend">{keys}</div>'


def fold(summary: str, inside: str) -> str:
    """Return an element that opens with a click."""
    return f"<details><summary>{escape_text(summary)}</summary>{inside}</details>"

"""A picture as a separate file for other documents: SVG and HTML, and by vl-convert PNG and PDF.

The SVG sets its colours in plain CSS, so that LaTeX, Inkscape and office programs read it. The HTML page follows light
and dark mode, and shows values under the mouse.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from fivefold.atomic_file import replace_file
from fivefold.errors import UserError
from fivefold.rendering.drawing.style import build_file_css, read_css
from fivefold.rendering.drawing.svg import add_titles, build_element, draw_legend, embed_image, join_elements
from fivefold.rendering.elements import Raw, escape_text
from fivefold.rendering.palette import break_lines

WIDTH, MARGIN = 1000, 16  # pixels
ABOVE = 36  # pixels between legend and chart, where the title of its vertical axis is
PAGE = """
body { color-scheme: light dark; font: 14px/1.5 system-ui, sans-serif; background: var(--card); color: var(--text); }
body { max-width: 70rem; margin: 1rem auto; padding: 0 1rem; }
h1 { font-size: 1.2rem; } p { margin: .2rem 0; color: var(--dim); }
"""
LETTER = 6.6  # width of a letter of a legend, in pixels


def check_suffix(path: Path) -> None:
    """Raise ``UserError`` for a file whose suffix is that of no chart."""
    if path.suffix not in (".svg", ".png", ".pdf", ".html"):
        suffix = path.suffix or "without a suffix"
        raise UserError(f"{path}: a chart is saved as .svg, .png, .pdf or .html, not {suffix}")


class PictureFile(NamedTuple):
    """A chart under its title, which states the finding. ``looks``: (class, name) of the meaning of its colours."""

    title: str
    lines: Sequence[str]
    chart: Raw
    height: int
    looks: Sequence[tuple[str, str]]
    left: int = 62  # pixels for the names of its rows

    def save(self, path: str | PathLike[str]) -> None:
        """Write the picture as ``.svg``, ``.png``, ``.pdf`` or ``.html``, as a chart of Altair does."""
        path = Path(path)
        check_suffix(path)
        with replace_file(path, contents="the chart") as file:
            file.write_bytes(self._convert(path.suffix))

    def _convert(self, suffix: str) -> bytes:
        """Return the drawing as the bytes of an SVG, HTML, PNG or PDF file."""
        if suffix == ".html":
            return self.to_html().encode()
        svg = self.to_svg()
        if suffix == ".svg":
            return svg.encode()
        try:
            import vl_convert
        except ImportError:
            raise UserError("PNG and PDF need the extra show: pip install 'fivefold[show]'") from None
        converted: bytes = vl_convert.svg_to_png(svg, scale=2) if suffix == ".png" else vl_convert.svg_to_pdf(svg)
        return converted

    def to_svg(self) -> str:
        """Return the picture as an SVG file."""
        top = 2 * MARGIN
        parts = []
        for size, look, text in self._texts():
            parts.append(build_element("text", text, x=MARGIN, y=top, class_=look, style=f"font-size:{size}px"))
            top += size + 6
        parts.append(join_elements(_lay_out_legend(self.looks, y=top)))
        width = WIDTH - self.left - 2 * MARGIN
        parts.append(
            build_element(
                "svg",
                self.chart,
                x=MARGIN + self.left,
                y=top + ABOVE,
                width=width,
                height=self.height,
                overflow="visible",
            )
        )
        height = top + ABOVE + self.height + 40 + MARGIN
        ground = build_element("rect", width=WIDTH, height=height, class_="ground")
        return build_element(
            "svg",
            Raw(f"<style>{build_file_css()}</style>"),
            ground,
            *parts,
            xmlns="http://www.w3.org/2000/svg",
            width=WIDTH,
            height=height,
            viewBox=f"0 0 {WIDTH} {height}",
        )

    def _repr_html_(self) -> str:
        return f"<b>{escape_text(self.title)}</b><br>{embed_image(self.chart, height=self.height, label=self.title)}"

    def to_html(self) -> str:
        """Return the picture as a page that fetches nothing."""
        lines = "".join(f"<p>{escape_text(line)}</p>" for line in self.lines if line)
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>'
            f"{escape_text(self.title)}</title><style>"
            f"{read_css()}{PAGE}</style></head><body><h1>{escape_text(self.title)}</h1>{lines}{add_titles(self.chart)}"
            f"{draw_legend(self.looks)}</body></html>\n"
        )

    def _texts(self) -> Iterator[tuple[int, str, str]]:
        for size, look, text in ((17, "heading", self.title), *((12, "remark", line) for line in self.lines if line)):
            for part in text.splitlines():
                wrapped = break_lines(part, width=WIDTH - 2 * MARGIN, size=size)
                yield from ((size, look, line) for line in ([wrapped] if isinstance(wrapped, str) else wrapped))


def _lay_out_legend(looks: Sequence[tuple[str, str]], *, y: float) -> Iterator[Raw]:
    x = float(MARGIN)
    for look, name in looks:
        yield build_element("rect", x=x, y=y - 6, width=12, height=12, rx=3, class_=f"k-{look}")
        yield build_element("text", name, x=x + 18, y=y, dy="0.35em", class_="remark")
        x += 18 + LETTER * len(name) + 22

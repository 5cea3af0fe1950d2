"""An answer as sections of lines and tables, built once for the terminal and for the web page."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from fivefold.rendering.grid import Grid
from fivefold.rendering.table import heading


class AnswerSection(NamedTuple):
    """Lines and tables under a title; the first section of an answer has none."""

    parts: tuple[Text | Grid, ...]
    title: str = ""
    remark: str = ""


def render_sections(sections: Iterable[AnswerSection]) -> RenderableType:
    """Return the sections for the terminal, each under its heading."""
    parts: list[RenderableType] = []
    for section in sections:
        parts += [heading(section.title, section.remark)] if section.title else []
        parts += section.parts
    return Group(*parts)

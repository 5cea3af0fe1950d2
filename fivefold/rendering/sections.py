"""An answer as sections of lines, tables and parts of a total, built once for the terminal and for the web page."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from fivefold.rendering.elements import Raw
from fivefold.rendering.grid import Grid
from fivefold.rendering.step_view import Parts
from fivefold.rendering.table import build_heading, show_bars


class AnswerSection(NamedTuple):
    """Lines, tables and parts of a total under a title, which the first section of most answers does not have."""

    parts: tuple[Text | Grid | Parts, ...]
    title: str = ""
    remark: str | Text = ""
    picture: Raw | None = None  # shown on a page only


def render_sections(sections: Iterable[AnswerSection]) -> RenderableType:
    """Return the sections for the terminal, each under its heading; a blank line is before all but the first."""
    parts: list[RenderableType] = []
    for section in sections:
        heading = build_heading(section.title, section.remark)
        parts += [heading if parts else heading[1:]] if section.title else []
        parts += [show_bars(part) if isinstance(part, Parts) else part for part in section.parts]
    return Group(*parts)

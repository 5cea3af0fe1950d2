"""What a terminal prints, as text."""

from __future__ import annotations

from io import StringIO

from rich.console import Console, RenderableType


def to_text(renderable: RenderableType, *, width: int = 100) -> str:
    """Return what a terminal of ``width`` columns prints without colour, without blanks at the ends of lines."""
    console = Console(file=StringIO(), width=width, color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as capture:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"

"""Functions that every command shares: parsing lists of numbers, and printing.

Data goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from fivefold.errors import UserError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from fivefold.job import Job
    from fivefold.machine.spec import Machine
    from fivefold.model.spec import Model


def parse_integers(text: str, *, option: str, of: str, such: str) -> tuple[int, ...]:
    """Return ``0,3`` as numbers; raises ``UserError`` if ``option`` is no list ``of`` them (``such``: an example)."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdecimal() and len(word) < 8 for word in words):
        raise UserError(f"{option} {text!r} is not a list of {of}; write {such}")
    return tuple(int(word) for word in words)


_held_warnings = list[str]()


def hold_warning(line: str) -> None:
    """Keep a warning until the command prints: a question that ends in an error prints only that."""
    _held_warnings.append(line)


def print_warnings() -> None:
    """Print the warnings that are held to stderr."""
    while _held_warnings:
        print(_held_warnings.pop(0), file=sys.stderr)


def drop_warnings() -> None:
    """Forget the warnings that are held."""
    _held_warnings.clear()


def print_line(line: str) -> None:
    """Print a line to stderr, after the warnings that are held."""
    print_warnings()
    print(line, file=sys.stderr)


def show_question(
    model: Model,
    machine: Machine,
    job: Job,
    *,
    remarks: Sequence[str] = (),
    open_fields: Collection[str] = (),
    stated: Collection[str] | None = None,
    batch_reason: str = "",
) -> None:
    """Print the question, and remarks on it, above an answer that does not contain it."""
    from rich.text import Text

    from fivefold.rendering import table
    from fivefold.rendering.question import describe_question

    line = describe_question(model, machine, job, open_fields=open_fields, stated=stated, batch_reason=batch_reason)
    show(Text(line, style="dim", overflow="fold"))
    if remarks:
        show(table.render_remarks(remarks))


def show(what: str | RenderableType) -> None:
    """Print data to stdout, and to stderr the warnings that are held."""
    print_warnings()
    if isinstance(what, str):
        print(what)
        return
    from rich.console import Console

    from fivefold.requests.settings import load_settings

    output = load_settings().output
    Console(
        width=output.width,
        no_color=True if output.color == "never" else None,
        force_terminal=True if output.color == "always" else None,
    ).print(what)

"""The base of request schemas: one record per command that states each field once, with type, default and help.

Everything else is derived. The command line turns fields into arguments and options, the web page reads them from a
URL and lists them in its OpenAPI. The functions of the Python API, whose signatures are written out for type checkers,
take their documentation from them, and a test compares the two.

    class SearchRequest(MachineRequest):
        top: int = make_field(10, "Number of layouts to show.", ge=1, le=MAX_SHOWN_LAYOUTS)
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from pydantic import Field

from fivefold.record import Record

Panel = Literal["Plan", "Run", "Understand", "Share"]
PANELS: tuple[Panel, ...] = get_args(Panel)  # groups of commands, in the order of the help page


@dataclass(frozen=True)
class Option:
    """The form of a field on the command line, where it differs from that derived from the field's name and type."""

    names: tuple[str, ...] = ()  # instead of ``--`` and the field's name
    metavar: str | None = None
    completion: str | None = None  # a function of ``cli/completion.py``
    parser: Callable[[str], Any] | None = None
    separator: str = ""  # for a list that is written as one text


@dataclass(frozen=True)
class Argument:
    """A field that is a positional argument on the command line; the lowest ``place`` comes first."""

    metavar: str | None = None
    completion: str | None = None
    parser: Callable[[str], Any] | None = None
    place: int = 0


def make_field(default: Any, help_text: str, *forms: Option | Argument, **bounds: Any) -> Any:
    """Return a field of a request, as pydantic's ``Field``.

    ``default``: ``...`` if the field must be given; ``forms``: its form on the command line.
    """
    field = Field(default, description=help_text, **bounds)
    field.metadata += forms
    return field


class Request(Record):
    """The fields of a command."""

    command: ClassVar[str] = ""  # the command of the terminal with these arguments and options
    panel: ClassVar[Panel] = "Plan"  # the group of commands in which the help page lists it
    example: ClassVar[str] = ""  # what one types after ``fivefold``, which the help page shows


def describe_fields(schema: type[Request]) -> Iterator[tuple[str, str]]:
    """Yield the name of each field of ``schema`` with its help text."""
    for name, field in schema.model_fields.items():
        yield name, field.description or ""

"""Records that notebooks show as HTML, that print as text and convert to a data frame: ``Shown`` and ``Rows``.

``drawn_by`` names the function that writes the HTML, as ``module:function``. It is imported only when a notebook asks
for it, so that records do not depend on rendering code.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeVar, get_args

from pydantic import BaseModel

from fivefold.errors import UserError
from fivefold.record import Record

Item = TypeVar("Item", bound=Record)
Frame = Literal["pandas", "arrow"]


class Shown(Record):
    """A record with a one-line ``repr``, an HTML page for notebooks, ``to_frame``, ``plot`` and ``save``."""

    drawn_by: ClassVar[str]
    charted_by: ClassVar[str] = ""  # the function that returns its chart, as ``module:function``; "": it has none

    def line(self) -> str:
        """Return a summary in a few words."""
        raise NotImplementedError

    def table(self) -> list[dict[str, Any]]:
        """Return the rows of the data frame; by default a single row of the fields."""
        return [flatten(self.model_dump(mode="json"))]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.line()}>"

    __str__ = __repr__

    def _repr_html_(self) -> str:
        return render_html(self.drawn_by, self)

    def to_frame(self, kind: Frame = "pandas") -> Any:
        """Return a pandas ``DataFrame`` (extra ``pandas``) or a pyarrow ``Table``; ``UserError`` if it is missing."""
        return build_frame(self.table(), kind=kind)

    def plot(self) -> Any:
        """Return the record's main chart, which notebooks show; raises ``UserError`` if it has none.

        A step: its memory by part. A search: memory against time. A comparison: step times by cause.
        """
        if not self.charted_by:
            raise UserError(f"{type(self).__name__} has no chart; in a notebook it shows as a page")
        return _call(self.charted_by, self)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the record: its page as ``.html``, its data as ``.json``, its chart as ``.svg``, ``.png`` or ``.pdf``.

        Raises ``UserError`` for another suffix or a missing folder.
        """
        save(self, path, title=self.line(), text=self.model_dump_json(indent=2))


class Rows(tuple[Item, ...]):
    """Records of one kind, in order: a tuple that notebooks show, and ``print`` prints, as a table."""

    __slots__ = ()
    drawn_by: ClassVar[str] = "fivefold.rendering.rows:render_rows"
    printed_by: ClassVar[str] = "fivefold.rendering.rows:to_text"

    def __repr__(self) -> str:
        kind = f" of {type(self[0]).__name__}" if self else ""
        return f"<{len(self):,} row{'' if len(self) == 1 else 's'}{kind}>"

    def __str__(self) -> str:
        return str(_call(self.printed_by, self))

    def _repr_html_(self) -> str:
        return render_html(self.drawn_by, self)

    def to_frame(self, kind: Frame = "pandas") -> Any:
        """Return a data frame with a row per record and a column per field, as ``Step.to_frame`` does."""
        return build_frame([flatten(record.model_dump(mode="json")) for record in self], kind=kind)

    def plot(self) -> Any:
        """Raise ``UserError``: rows have no chart."""
        raise UserError("rows have no chart; in a notebook they show as a table, and to_frame() gives a data frame")

    def save(self, path: str | PathLike[str]) -> None:
        """Write the rows: as a page with their table (``.html``), or their data (``.json``)."""
        text = json.dumps([record.model_dump(mode="json") for record in self], indent=2)
        save(self, path, title=repr(self).strip("<>"), text=text)


class Savable(Protocol):
    """A result with a page and a chart."""

    def _repr_html_(self) -> str: ...

    def plot(self) -> Any:
        """Return the chart."""


def save(what: Savable, path: str | PathLike[str], *, title: str, text: str) -> None:
    """Write a result: its page as ``.html``, its chart as ``.svg``, ``.png`` or ``.pdf``, its data as ``.json``.

    ``text``: the data. Raises ``UserError`` for another suffix or a missing folder.
    """
    file = Path(path)
    if not file.parent.is_dir():
        raise UserError(f"{file}: there is no folder {file.parent}")
    if file.suffix == ".html":
        file.write_text(_call("fivefold.rendering.report:render_page", title, what._repr_html_()), encoding="utf-8")
    elif file.suffix == ".json":
        file.write_text(text + "\n", encoding="utf-8")
    elif file.suffix in (".svg", ".png", ".pdf"):
        _call("fivefold.rendering.charts:save", what.plot(), file)
    else:
        suffix = file.suffix or "no suffix"
        raise UserError(f"{file}: a record is saved as .html, .json, .svg, .png or .pdf, not {suffix}")


def render_html(drawn_by: str, what: object) -> str:
    """Return the HTML that the function named ``drawn_by`` writes for ``what``."""
    return str(_call(drawn_by, what))


def _call(name: str, *arguments: object) -> Any:
    """Call the function named ``module:function``, which is imported only now."""
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)(*arguments)


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables to columns: ``{"time": {"step_seconds": 1}}`` → ``{"time.step_seconds": 1}``.

    Lists of tables are left out.
    """
    columns: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            columns |= flatten(value, f"{prefix}{name}.")
        elif not isinstance(value, list | tuple) or not any(isinstance(item, Mapping | BaseModel) for item in value):
            columns[prefix + name] = value
    return columns


def build_frame(rows: Iterable[Mapping[str, Any]], *, kind: Frame = "pandas") -> Any:
    """Convert rows to a pandas ``DataFrame`` or a pyarrow ``Table``; ``UserError`` if the library is not installed."""
    columns = _list_columns(list(rows))
    if kind not in get_args(Frame):
        raise UserError(f"to_frame makes pandas or arrow, not {kind!r}")
    try:
        if kind == "arrow":
            return import_module("pyarrow").table(columns)
        return import_module("pandas").DataFrame(columns)
    except ImportError:
        arrow = ", or use to_frame('arrow') with pyarrow"
        fix = f"pandas: pip install 'fivefold[pandas]'{arrow}" if kind == "pandas" else "pyarrow: pip install pyarrow"
        raise UserError(f"to_frame needs {fix}") from None


def _list_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return all columns of the rows, in order; None where a row has no such field."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}

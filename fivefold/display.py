"""Records that notebooks show as HTML, that print as one line and convert to a data frame: ``Shown`` and ``Rows``.

``drawn_by`` names the function that writes the HTML, as ``module:function``. It is imported only when a notebook asks
for it, so that records do not depend on rendering code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel

from fivefold.record import Record, UserError

Item = TypeVar("Item", bound=Record)
Frame = Literal["pandas", "arrow"]


class Shown(Record):
    """A record with a one-line ``repr``, an HTML page for notebooks, and ``to_frame``."""

    drawn_by: ClassVar[str]

    def line(self) -> str:
        """Return a summary in a few words."""
        raise NotImplementedError

    def table(self) -> list[dict[str, Any]]:
        """Return the rows of the data frame; by default a single row of the fields."""
        return [flat(self.model_dump(mode="json"))]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.line()}>"

    __str__ = __repr__

    def _repr_html_(self) -> str:
        return render_html(self.drawn_by, self)

    def to_frame(self, kind: Frame | None = None) -> Any:
        """Return a pandas ``DataFrame``, or a pyarrow ``Table`` if pandas is not installed (or ``kind="arrow"``)."""
        return frame(self.table(), kind=kind)


class Rows(tuple[Item, ...]):
    """Records of one kind, in order: a tuple that notebooks show as a table."""

    __slots__ = ()
    drawn_by: ClassVar[str] = "fivefold.rendering.rows:rows"

    def __repr__(self) -> str:
        kind = f" of {type(self[0]).__name__}" if self else ""
        return f"<{len(self):,} row{'' if len(self) == 1 else 's'}{kind}>"

    def _repr_html_(self) -> str:
        return render_html(self.drawn_by, self)

    def to_frame(self, kind: Frame | None = None) -> Any:
        """Return a data frame with a row per record and a column per field: pandas, or pyarrow if pandas is missing."""
        return frame([flat(record.model_dump(mode="json")) for record in self], kind=kind)


def render_html(drawn_by: str, what: object) -> str:
    """Return the HTML that the function named ``drawn_by`` writes for ``what``."""
    module, _, function = drawn_by.partition(":")
    return str(getattr(import_module(module), function)(what))


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables to columns: ``{"time": {"step_seconds": 1}}`` → ``{"time.step_seconds": 1}``.

    Lists of tables are left out.
    """
    columns: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            columns |= flat(value, f"{prefix}{name}.")
        elif not isinstance(value, list | tuple) or not any(isinstance(item, Mapping | BaseModel) for item in value):
            columns[prefix + name] = value
    return columns


def frame(rows: Iterable[Mapping[str, Any]], *, kind: Frame | None = None) -> Any:
    """Convert rows to a pandas ``DataFrame`` or a pyarrow ``Table``; ``UserError`` if the library is not installed."""
    columns = _columns(list(rows))
    for name, module in (("pandas", "pandas"), ("arrow", "pyarrow")):
        if kind not in (None, name):
            continue
        try:
            library = import_module(module)
        except ImportError:
            continue
        return library.DataFrame(columns) if name == "pandas" else library.table(columns)
    wanted = {"pandas": "pandas", "arrow": "pyarrow"}.get(kind or "", "pandas or pyarrow")
    raise UserError(f"to_frame needs {wanted}: pip install {wanted.split()[0]}")


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return all columns of the rows, in order; None where a row lacks one."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}

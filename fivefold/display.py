"""``Shown``: a record that notebooks show as a page, print as one line and turn into a data frame; ``Rows``: many.

``drawn_by`` names the function that writes the HTML, as ``module:function``. It is imported when a notebook asks for
it: a record knows by whom it is drawn, and depends on nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel

from fivefold.record import Mistake, Record

Item = TypeVar("Item", bound=Record)
Frame = Literal["pandas", "arrow"]


class Shown(Record):
    """A record with a one-line ``repr``, an HTML page for notebooks, and ``to_frame``."""

    drawn_by: ClassVar[str]

    def line(self) -> str:
        """What it is, in a few words."""
        raise NotImplementedError

    def table(self) -> list[dict[str, Any]]:
        """Its rows as a table: by default one, of its fields."""
        return [flat(self.model_dump(mode="json"))]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.line()}>"

    __str__ = __repr__

    def _repr_html_(self) -> str:
        return drawn(self.drawn_by, self)

    def to_frame(self, kind: Frame | None = None) -> Any:
        """A pandas ``DataFrame``, or a pyarrow ``Table`` where pandas is not installed (or ``kind="arrow"``)."""
        return frame(self.table(), kind=kind)


class Rows(tuple[Item, ...]):
    """Records of one kind, in order: a tuple that notebooks show as a table."""

    __slots__ = ()
    drawn_by: ClassVar[str] = "fivefold.rendering.rows:rows"

    def __repr__(self) -> str:
        kind = f" of {type(self[0]).__name__}" if self else ""
        return f"<{len(self):,} row{'' if len(self) == 1 else 's'}{kind}>"

    def _repr_html_(self) -> str:
        return drawn(self.drawn_by, self)

    def to_frame(self, kind: Frame | None = None) -> Any:
        """A row each, a column per field: pandas, or pyarrow where pandas is not installed."""
        return frame([flat(each.model_dump(mode="json")) for each in self], kind=kind)


def drawn(drawn_by: str, what: object) -> str:
    """The HTML that the function called ``drawn_by`` writes of ``what``."""
    module, _, function = drawn_by.partition(":")
    return str(getattr(import_module(module), function)(what))


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as columns: ``{"time": {"step_seconds": 1}}`` → ``{"time.step_seconds": 1}``; no lists."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        elif not isinstance(value, list | tuple) or not any(isinstance(each, Mapping | BaseModel) for each in value):
            found[prefix + name] = value
    return found


def frame(rows: Iterable[Mapping[str, Any]], *, kind: Frame | None = None) -> Any:
    """Rows as a pandas ``DataFrame`` or a pyarrow ``Table``; a ``Mistake`` if what is asked for is not installed."""
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
    raise Mistake(f"to_frame needs {wanted}: pip install {wanted.split()[0]}")


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Every column that a row has, in order; None where a row has it not."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}

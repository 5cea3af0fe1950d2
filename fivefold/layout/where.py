"""Constraints on layouts, written like layouts: degrees with a comparison, names with alternatives.

tp<=8 cp=1 pp<=4 zero<=1 ac=none,selective schedule=1f1b,interleaved order=default
"""

from __future__ import annotations

import re
from collections.abc import Callable
from operator import eq, ge, gt, le, lt, ne
from typing import NamedTuple

from fivefold.errors import UserError
from fivefold.layout.names import CP_KINDS, DEFAULT_ORDER
from fivefold.layout.schedule.pipeline_schedule import SCHEDULES
from fivefold.layout.spec import Layout
from fivefold.spelling import make_unknown_name_error

_TERM = re.compile(r"([a-z]+)(<=|>=|!=|<|>|=)(.+)")
_COMPARE: dict[str, Callable[[int, int], bool]] = {"<=": le, ">=": ge, "<": lt, ">": gt, "=": eq, "!=": ne}
NUMBERS = ("dp", "tp", "cp", "pp", "ep", "etp", "v", "mbs", "zero", "shards")
WORDS: dict[str, tuple[str, ...]] = {
    "ac": (),
    "schedule": SCHEDULES,
    "order": ("default",),
    "kind": CP_KINDS,
    "sp": ("yes", "no"),
}


class Term(NamedTuple):
    """A constraint: the comparison of ``field`` with any of ``values``."""

    field: str
    sign: str
    values: tuple[str, ...]

    def is_satisfied_by(self, value: object) -> bool:
        """Tell whether a value of the field satisfies the constraint."""
        if self.field in NUMBERS:
            assert isinstance(value, int)
            results = [_COMPARE[self.sign](value, int(limit)) for limit in self.values]
            return all(results) if self.sign == "!=" else any(results)
        return (value in self.values) == (self.sign == "=")

    def __str__(self) -> str:
        return f"{self.field}{self.sign}{','.join(self.values)}"


class Where(NamedTuple):
    """A conjunction of constraints; ``Where()`` admits everything."""

    terms: tuple[Term, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Where:
        """Parse ``tp<=8 ac=none,selective``; ``UserError`` names an invalid term, or two that contradict each other."""
        where = cls(tuple(_parse_term(word, text) for word in text.split()))
        for field in dict.fromkeys(term.field for term in where.terms):
            terms = [term for term in where.terms if term.field == field]
            if not any(where.is_allowed(field, value) for value in _list_values(field, terms)):
                raise UserError(f"where {text!r}: no {field} is {' and '.join(map(str, terms))}; drop one")
        return where

    def is_allowed(self, field: str, value: object) -> bool:
        """Tell whether a value of a field is allowed."""
        return all(term.is_satisfied_by(value) for term in self.terms if term.field == field)

    def list_values(self, field: str) -> tuple[str, ...]:
        """Return the values of ``field`` that some term names with ``=``."""
        return tuple(value for term in self.terms if term.field == field and term.sign == "=" for value in term.values)

    def is_satisfied_by(self, layout: Layout) -> bool:
        """Tell whether a layout satisfies all constraints."""
        return all(term.is_satisfied_by(get_value(layout, term.field)) for term in self.terms)

    def __str__(self) -> str:
        return " ".join(map(str, self.terms))


def get_value(layout: Layout, field: str) -> object:
    """Return the value that a layout has for a field of ``Where``."""
    values: dict[str, object] = {
        "order": "default" if layout.order == DEFAULT_ORDER else "-".join(layout.order),
        "kind": layout.cp_kind,
        "sp": "yes" if layout.sp else "no",
        "ac": layout.recomputation,
        "shards": 1 if layout.zero == 0 else layout.shard_group or layout.dp * layout.cp,
    }
    return values[field] if field in values else getattr(layout, field)


def _list_values(field: str, terms: list[Term]) -> list[object]:
    """Return test values of a field that suffice to see whether its terms contradict each other."""
    values = [value for term in terms for value in term.values]
    if field in NUMBERS:
        return [
            int(value) + offset for value in values for offset in (-1, 0, 1) if int(value) + offset >= (field != "zero")
        ]
    return [*values, *WORDS[field], "another"]


def _parse_term(word: str, text: str) -> Term:
    """Parse one constraint, such as ``tp<=8``; ``text``: all constraints, which errors quote."""
    matched = _TERM.fullmatch(word)
    if matched is None:
        joined = re.sub(r"\s*(<=|>=|!=|<|>|=|,)\s*", r"\1", text)
        if joined != text and all(map(_TERM.fullmatch, joined.split())):
            raise UserError(
                f"where {text!r}: spaces separate constraints, so there is none within one; write {joined!r}"
            )
        raise UserError(
            f"where {text!r}: {word!r} is not a constraint; write a name, one of <, <=, >, >=, = and !=, and a value, "
            "without spaces: tp<=8, cp=1 or ac=none,selective"
        )
    field, sign, values = matched[1], matched[2], tuple(matched[3].split(","))
    if field not in NUMBERS and field not in WORDS:
        raise make_unknown_name_error(field, [*NUMBERS, *WORDS], kind="constraint")
    if field in NUMBERS:
        if invalid := [value for value in values if not value.isdecimal()]:
            raise UserError(
                f"where {text!r}: {word!r} compares with {invalid[0]!r}, which is not a number; write {field}{sign}4"
            )
    elif sign not in ("=", "!="):
        raise UserError(
            f"where {text!r}: {field} supports only = and !=; write {field}={values[0]} or {field}!={values[0]}"
        )
    elif known := WORDS[field]:
        for value in values:
            if value not in known:
                raise make_unknown_name_error(value, list(known), kind=field)
    elif field == "ac":
        for value in values:
            if "@" in value:
                raise UserError(
                    f"where {text!r}: the search chooses the ranks that recompute; write ac={value.partition('@')[0]}"
                )
            Layout.parse(f"dp1 ac={value}")
    return Term(field, sign, values)


ANY_LAYOUT = Where()  # admits every layout

"""Constraints on layouts in the notation of layouts: degrees with a comparison, names with alternatives.

tp<=8 cp=1 pp<=4 zero<=1 ac=none,selective schedule=1f1b,interleaved order=default
"""

from __future__ import annotations

import re
from collections.abc import Callable
from operator import eq, ge, gt, le, lt, ne
from typing import NamedTuple, get_args

from fivefold.layout.names import DEFAULT_ORDER, CpKind
from fivefold.layout.schedule.pipeline_schedule import SCHEDULES
from fivefold.layout.spec import Layout
from fivefold.record import Mistake, nearest

_TERM = re.compile(r"([a-z]+)(<=|>=|!=|<|>|=)(.+)")
_COMPARE: dict[str, Callable[[int, int], bool]] = {"<=": le, ">=": ge, "<": lt, ">": gt, "=": eq, "!=": ne}
CP_KINDS: tuple[str, ...] = get_args(CpKind)
NUMBERS = ("dp", "tp", "cp", "pp", "ep", "etp", "v", "mbs", "zero", "shards")
WORDS: dict[str, tuple[str, ...]] = {
    "ac": (), "schedule": SCHEDULES, "order": ("default",), "kind": CP_KINDS, "sp": ("yes", "no"),
}  # fmt: skip


class Term(NamedTuple):
    """One constraint: ``field`` compared with any of ``values``."""

    field: str
    sign: str
    values: tuple[str, ...]

    def admits(self, value: object) -> bool:
        """Whether ``value`` of the field meets it."""
        if self.field in NUMBERS:
            assert isinstance(value, int)
            hits = [_COMPARE[self.sign](value, int(each)) for each in self.values]
            return all(hits) if self.sign == "!=" else any(hits)
        return (value in self.values) == (self.sign == "=")

    def __str__(self) -> str:
        return f"{self.field}{self.sign}{','.join(self.values)}"


class Where(NamedTuple):
    """Constraints that all must hold; ``Where()`` admits everything."""

    terms: tuple[Term, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Where:
        """Read ``tp<=8 ac=none,selective``; a ``Mistake`` names a term that is wrong, or two that contradict."""
        found = cls(tuple(_term(word, text) for word in text.split()))
        for field in dict.fromkeys(term.field for term in found.terms):
            terms = [term for term in found.terms if term.field == field]
            if not any(found.admits(field, value) for value in _values(field, terms)):
                raise Mistake(f"where {text!r}: no {field} is {' and '.join(map(str, terms))}; drop one")
        return found

    def admits(self, field: str, value: object) -> bool:
        """Whether a value of a field is allowed."""
        return all(term.admits(value) for term in self.terms if term.field == field)

    def named(self, field: str) -> tuple[str, ...]:
        """Values that some term asks for by name."""
        return tuple(each for term in self.terms if term.field == field and term.sign == "=" for each in term.values)

    def holds(self, layout: Layout) -> bool:
        """Whether a layout meets all of them."""
        return all(term.admits(value_of(layout, term.field)) for term in self.terms)

    def __str__(self) -> str:
        return " ".join(map(str, self.terms))


def value_of(layout: Layout, field: str) -> object:
    """A layout's value of a field of ``Where``."""
    words: dict[str, object] = {
        "order": "default" if layout.order == DEFAULT_ORDER else "-".join(layout.order),
        "kind": layout.cp_kind, "sp": "yes" if layout.sp else "no", "ac": layout.recomputation,
        "shards": 1 if layout.zero == 0 else layout.shard_group or layout.dp * layout.cp,
    }  # fmt: skip
    return words[field] if field in words else getattr(layout, field)


def _values(field: str, terms: list[Term]) -> list[object]:
    """Values of a field by which it shows whether its terms contradict each other."""
    named = [each for term in terms for each in term.values]
    if field in NUMBERS:
        return [int(each) + more for each in named for more in (-1, 0, 1) if int(each) + more >= (field != "zero")]
    return [*named, *WORDS[field], "another"]


def _term(word: str, text: str) -> Term:
    matched = _TERM.fullmatch(word)
    if matched is None:
        raise Mistake(f"where {text!r}: {word!r} is no constraint; write tp<=8, cp=1 or ac=none,selective")
    field, sign, values = matched[1], matched[2], tuple(matched[3].split(","))
    if field not in NUMBERS and field not in WORDS:
        raise nearest(field, [*NUMBERS, *WORDS], kind="constraint")
    if field in NUMBERS:
        if wrong := [each for each in values if not each.isdecimal()]:
            raise Mistake(
                f"where {text!r}: {word!r} compares with {wrong[0]!r}, which is no number; write {field}{sign}4"
            )
    elif sign not in ("=", "!="):
        raise Mistake(f"where {text!r}: {field} has no order; write {field}={values[0]} or {field}!={values[0]}")
    elif known := WORDS[field]:
        for each in values:
            if each not in known:
                raise nearest(each, list(known), kind=field)
    elif field == "ac":
        for each in values:
            if "@" in each:
                raise Mistake(f"where {text!r}: the search finds on which ranks; write ac={each.partition('@')[0]}")
            Layout.parse(f"dp1 ac={each}")
    return Term(field, sign, values)


ANY = Where()  # admits every layout

"""Which constraint leaves nothing: the one that would have to give way the least, with the nearest layout that passes.

A number gives way by its ratio to what it may be, and a name as if by a factor of two. What has to hold beside the
constraints is passed in: that layouts are legal, or that one fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from math import log2
from typing import NamedTuple

from fivefold.layout.spec import Layout, divisors
from fivefold.layout.where import NUMBERS, Term, Where
from fivefold.model.spec import Model

Passing = Callable[[Where], Layout | None]  # a layout that meets the constraints, and what else must hold
NAME = 1.0  # octaves by which a name gives way


class Tightest(NamedTuple):
    """The terms that give way, what they give way to, and a layout that then passes."""

    terms: tuple[Term, ...]
    instead: str
    layout: Layout

    def __str__(self) -> str:
        which = " and ".join(map(str, self.terms))
        return f"the tightest is {which}: with {self.instead} there is {str(self.layout)!r}"


def tightest(where: Where, *, passing: Passing, model: Model, world: int) -> Tightest | None:
    """The term of ``where`` that has to give way the least; two of them if one is not enough; None if that is not."""
    options = [
        (distance, number, term, other)
        for number, term in enumerate(where.terms)
        for distance, other in _gives_way(term, model=model, world=world)
    ]
    for _, number, term, other in sorted(options, key=lambda option: option[:2]):
        others = tuple(each for place, each in enumerate(where.terms) if place != number)
        layout = passing(Where((*others, *((other,) if other else ()))))
        if layout is not None:
            return Tightest((term,), str(other) if other else f"another {term.field}", layout)
    for two in combinations(where.terms, 2):
        layout = passing(Where(tuple(each for each in where.terms if each not in two)))
        if layout is not None:
            return Tightest(two, "neither", layout)
    return None


def _gives_way(term: Term, *, model: Model, world: int) -> Iterator[tuple[float, Term | None]]:
    """What a term may give way to, and by how many octaves; None: to anything."""
    if term.field not in NUMBERS:
        yield NAME, None
        return
    values = {
        "zero": [0, 1, 2, 3], "v": divisors(model.layers), "ep": divisors(model.moe.experts if model.moe else 1),
        "mbs": [2**power for power in range(10)],
    }.get(term.field, divisors(world))  # fmt: skip
    for value in values:
        if not term.admits(value):
            ratios = [abs(log2((value + 1) / (int(limit) + 1))) for limit in term.values]
            yield min(ratios), Term(term.field, "=", (str(value),))

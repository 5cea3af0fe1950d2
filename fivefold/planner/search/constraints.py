"""Find the constraint that leaves no layout: the one that needs the smallest relaxation, and a layout that then passes.

The relaxation of a number is its ratio to the limit; a name counts as a factor of two. The caller passes the other
conditions, such as that layouts are legal or that one fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, combinations, product
from math import gcd, log2
from typing import NamedTuple

from fivefold.layout.spec import Layout, list_divisors
from fivefold.layout.stages import list_virtual_stages
from fivefold.layout.where import ANY_LAYOUT, NUMBERS, Term, Where
from fivefold.model.spec import Model
from fivefold.units import round_up_to_power_of_two

FindLayout = Callable[[Where], Layout | None]  # a layout that meets the constraints, and what else must hold
NAME_OCTAVES = 1.0  # octaves by which a name gives way
MAX_DP_LOSS = 4  # times less dp than another batch would allow
MAX_TRIED = 40  # ways for as many terms, the nearest first


class Relaxation(NamedTuple):
    """A term, and what it gives way to; None: to anything."""

    term: Term
    instead: Term | None


class BindingConstraint(NamedTuple):
    """The terms that give way, what they give way to, and a layout that then passes."""

    terms: tuple[Term, ...]
    instead: str
    layout: Layout

    def __str__(self) -> str:
        terms_text = " and ".join(map(str, self.terms))
        constraint = "constraint" if len(self.terms) == 1 else "constraints"
        return f"relax the {constraint} {terms_text}: with {self.instead} there is {str(self.layout)!r}"


def find_binding_constraint(
    where: Where, *, find_layout: FindLayout, model: Model, world: int
) -> BindingConstraint | None:
    """Return the fewest terms of ``where`` to relax, and of these the closest.

    Returns None if nothing passes at all.
    """
    if find_layout(ANY_LAYOUT) is None:
        return None
    for count in range(1, len(where.terms) + 1):
        relaxed = [(terms, _drop_terms(where, terms, find_layout)) for terms in combinations(where.terms, count)]
        sufficient = [(terms, layout) for terms, layout in relaxed if layout is not None]
        options = (
            [list(_list_relaxations(term, model=model, world=world)) for term in terms] for terms, _ in sufficient
        )
        relaxations = sorted(
            chain(*(product(*choices) for choices in options)),
            key=lambda relaxation: sum(choices[0] for choices in relaxation),
        )
        for relaxation in relaxations[:MAX_TRIED]:
            if (binding := _relax(where, [choices[1] for choices in relaxation], find_layout)) is not None:
                return binding
        for terms, layout in sufficient:
            return BindingConstraint(
                terms, "none of them" if count > 2 else "neither" if count == 2 else "any other", layout
            )
    return None


def _drop_terms(where: Where, terms: Sequence[Term], find_layout: FindLayout) -> Layout | None:
    return find_layout(Where(tuple(term for term in where.terms if term not in terms)))


def _relax(where: Where, relaxations: Sequence[Relaxation], find_layout: FindLayout) -> BindingConstraint | None:
    """Return the relaxed terms with a layout that ``find_layout`` finds under them; None if it finds none."""
    replacements = {relaxation.term: relaxation.instead for relaxation in relaxations}
    kept = tuple(replacement for term in where.terms if (replacement := replacements.get(term, term)) is not None)
    layout = find_layout(Where(kept))
    description = " ".join(
        str(replacement) if replacement else f"another {term.field}" for term, replacement in replacements.items()
    )
    return None if layout is None else BindingConstraint(tuple(replacements), description, layout)


def _list_relaxations(term: Term, *, model: Model, world: int) -> Iterator[tuple[float, Relaxation]]:
    """Return the octaves by which a term must be relaxed, and the value that it is relaxed to."""
    if term.field not in NUMBERS:
        yield NAME_OCTAVES, Relaxation(term, None)
        return
    most = len(model.stage_parts) + 2  # stages: without layers at both ends
    virtual_stages = (list_virtual_stages(model, pp=pp, most=most) for pp in list_divisors(world))
    values = {
        "zero": [0, 1, 2, 3],
        "v": sorted({1, 2, *chain(*virtual_stages)}),
        "ep": list_divisors(model.moe.experts if model.moe else 1),
        "mbs": [2**power for power in range(10)],
    }.get(term.field, list_divisors(world))
    for value in values:
        if not term.is_satisfied_by(value):
            ratios = [abs(log2((value + 1) / (int(limit) + 1))) for limit in term.values]
            yield min(ratios), Relaxation(term, Term(term.field, "=", (str(value),)))


def describe_uneven_batch(layout: Layout, *, batch: int) -> str:
    """Return a note that the global batch shares few divisors with the ranks; "" if another rule limits dp.

    dp divides both.
    """
    max_dp = gcd(batch, layout.world)
    even_dp = gcd(min(layout.world, round_up_to_power_of_two(batch + 1) // 2), layout.world)
    if layout.dp < max_dp or MAX_DP_LOSS * max_dp > even_dp:
        return ""
    near_batch = max(1, round(batch / even_dp)) * even_dp
    near_dp = gcd(near_batch, layout.world)
    return (
        f"gbs {batch} and {layout.world} ranks allow no more than dp{max_dp}; gbs {near_batch} would allow dp{near_dp}"
    )

"""A mistake to plant: what ``mutations.py`` replaces in a file, and the test that must then fail."""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """``old`` stands once in ``fivefold/FILE`` and becomes ``new``; then ``tests/TEST`` must fail."""

    name: str
    file: str
    old: str
    new: str
    test: str


def edit(file: str, test: str, *changes: tuple[str, str, str]) -> list[Mutation]:
    """Return the mistakes in one file that one test must see: the name of each, the text, and what replaces it."""
    return [Mutation(name, file, old, new, test) for name, old, new in changes]

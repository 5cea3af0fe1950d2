"""Patterns of layouts: tokens with alternatives in braces, and one degree ``*`` that fills the remaining ranks.

"dp* tp{1,2} pp{1,2 v2} zero1{, nosp}"     on 8 ranks → dp8 …, dp4 pp2 v2 …, dp4 tp2 … nosp, …

A pattern without dp has ``dp*``: ``tp8 fsdp`` is ``dp* tp8 zero3``.
"""

from __future__ import annotations

import re
from itertools import product
from math import prod

from fivefold.errors import UserError
from fivefold.layout.text import read_token, spell_token, split_tokens

_BRACES = re.compile(r"\{([^{}]*)\}")
_REST = re.compile(r"(dp|tp|cp|pp)\*")
DEGREES = ("dp", "tp", "cp", "pp")


def expand_alternatives(pattern: str) -> list[str]:
    """Expand ``pattern`` to its distinct texts, in order; ``dp*`` stays. ``UserError`` for an invalid token."""
    parts = _BRACES.split(pattern)  # text between braces has odd indices
    if any(mark in part for part in parts for mark in "{}"):
        raise UserError(f"layouts: {pattern!r} has an unmatched brace, or braces within braces")
    choices = [part.split(",") if index % 2 else [part.replace(",", " ")] for index, part in enumerate(parts)]
    texts = list(dict.fromkeys(_spell("".join(chosen)) for chosen in product(*choices)))
    for text in texts:
        tokens = text.split()
        if sum("*" in token for token in tokens) > 1:
            raise UserError(f"layouts: {pattern!r} has two open degrees; keep one *")
        for token in tokens:
            if not _REST.fullmatch(token):
                read_token(token)
    return texts


def _spell(text: str) -> str:
    """Return the text of a layout in canonical keywords, with ``dp*`` where it leaves the degree open."""
    words = split_tokens(text)
    spelled = " ".join(map(spell_token, words))
    is_open = any("*" in word for word in words)
    return spelled if is_open or "dp" in _read_fields(spelled) else f"dp* {spelled}"


def _read_fields(text: str) -> dict[str, object]:
    """Return what the tokens of ``text`` set, without open degrees."""
    return {key: value for word in text.split() if not _REST.fullmatch(word) for key, value in read_token(word).items()}


def count_ranks(text: str) -> int:
    """Return the product of the degrees of ``text``; an open one counts as 1."""
    fields = _read_fields(text)
    return prod(degree for axis in DEGREES if isinstance(degree := fields.get(axis, 1), int))


def fill_degree(text: str, *, ranks: int) -> str | None:
    """Return ``text`` with its open degree filled for ``ranks``; None if its degrees cannot give that number."""
    open_word = next((word for word in text.split() if "*" in word), None)
    degrees = count_ranks(text)
    if open_word is None:
        return text if degrees == ranks else None
    return text.replace(open_word, f"{open_word[:-1]}{ranks // degrees}") if ranks % degrees == 0 else None

"""Names that users write: the one that is meant, and the nearest of those that are known."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from typing import Literal

from fivefold.errors import UserError

CATALOGS = {"model": "fivefold models", "machine": "fivefold machines", "stack": "fivefold stacks"}  # by kind of name


def find_spelling(word: str, known: Collection[str]) -> str:
    """Return the known name that ``word`` is but for case, spaces, dashes and underscores, or ``word``.

    ``TorchTitan`` is torchtitan, and ``megatron core`` is megatron-core.
    """
    joined = _join_word(word)
    return word if word in known else next((name for name in known if _join_word(name) == joined), word)


def _join_word(word: str) -> str:
    return re.sub(r"[\s_-]", "", word.lower())


def make_unknown_name_error(word: str, known: list[str], *, kind: str, forms: str = "") -> UserError:
    """Make the ``UserError`` for an unknown name, with longer or similar names, or where to find all of them.

    ``forms``: what to list instead of ``known`` if no name is similar.

    ``unknown model 'lama3-8b'; did you mean llama3-8b? `fivefold models` lists all``
    """
    spoken = _join_word(word)
    longer = [name for name in known if len(spoken) >= 4 and _join_word(name).startswith(spoken)]
    more = [f"{len(longer) - 5} others"] if len(longer) > 6 else longer[5:]
    close = [*longer[:5], *more] or get_close_matches(word.lower(), known, n=3, cutoff=0.5)
    question = f"did you mean {join_names(close, 'or')}?" if close else ""
    if kind in CATALOGS:
        hint = f"{question} `{CATALOGS[kind]}` lists all".strip()
    else:
        hint = question or f"known: {forms or ', '.join(sorted(known))}"
    return UserError(f"unknown {kind} {word!r}; {hint}")


def join_names(names: Sequence[str], conjunction: Literal["and", "or"]) -> str:
    """Join names as a sentence does: ``a``, ``a or b``, ``a, b or c``."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} {conjunction} {names[-1]}"

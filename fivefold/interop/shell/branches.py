"""Decide which branch of an ``if`` a script takes, if the script sets all values in its condition."""

from __future__ import annotations

import operator
from collections.abc import Callable

from fivefold.interop.shell.expand import Variables, expand, split_words

TEXTS: dict[str, Callable[[str, str], bool]] = {"==": operator.eq, "=": operator.eq, "!=": operator.ne}
NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}


def evaluate_condition(condition: str, known: Variables) -> bool | None:
    """Return whether ``[ "$A" == b ]`` or ``[[ -z $A ]]`` holds; None if only running the script could tell."""
    holds: bool | None = None
    connective = ""
    words = [*split_words(condition.replace("||", " || ").replace("&&", " && ")), "]]"]
    while words:
        if words[0] not in ("[", "[[") or "]" + "]" * (len(words[0]) - 1) not in words:
            return None
        end = words.index("]" + "]" * (len(words[0]) - 1))
        result = _evaluate_words(words[1:end], known)
        holds = (
            result
            if not connective
            else _combine_and(holds, result)
            if connective == "&&"
            else _combine_or(holds, result)
        )
        connective, words = words[end + 1], words[end + 2 :]
        if connective not in ("||", "&&"):
            return holds if not words else None
    return None


def _combine_and(left: bool | None, right: bool | None) -> bool | None:
    return False if False in (left, right) else None if None in (left, right) else True


def _combine_or(left: bool | None, right: bool | None) -> bool | None:
    return True if True in (left, right) else None if None in (left, right) else False


def _evaluate_words(words: list[str], known: Variables) -> bool | None:
    """Evaluate the words within brackets: ``a || b && c``."""
    for sign, combine in (("||", _combine_or), ("&&", _combine_and)):
        if sign in words:
            position = words.index(sign)
            return combine(_evaluate_words(words[:position], known), _evaluate_words(words[position + 1 :], known))
    negated = words[:1] == ["!"]
    holds = _evaluate_test(words[1:] if negated else words, known)
    return None if holds is None else holds != negated


def _evaluate_test(words: list[str], known: Variables) -> bool | None:
    if len(words) == 2 and words[0] in ("-z", "-n"):
        text = _expand_word(words[1], known)
        return None if text is None else (text == "") == (words[0] == "-z")
    if len(words) != 3:
        return None
    left, right = _expand_word(words[0], known), _expand_word(words[2], known)
    if left is None or right is None:
        return None
    if words[1] in TEXTS and not set(right) & set("*?["):  # not a pattern
        return TEXTS[words[1]](left, right)
    if words[1] in NUMBERS and left.lstrip("-").isdecimal() and right.lstrip("-").isdecimal():
        return NUMBERS[words[1]](int(left), int(right))
    return None


def _expand_word(word: str, known: Variables) -> str | None:
    """Return a word with its variables replaced; None if the script does not set one of them."""
    text = " ".join(expand(word, known))
    return None if "$" in text or "`" in text else text

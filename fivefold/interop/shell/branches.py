"""Which branch of an ``if`` a script takes, where the values that it asks of are all in the script."""

from __future__ import annotations

import operator
from collections.abc import Callable

from fivefold.interop.shell.expand import Variables, expanded, raw_words

TEXTS: dict[str, Callable[[str, str], bool]] = {"==": operator.eq, "=": operator.eq, "!=": operator.ne}
NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-ge": operator.ge, "-lt": operator.lt,
    "-le": operator.le,
}  # fmt: skip


def decided(condition: str, known: Variables) -> bool | None:
    """Whether ``[ "$A" == b ]`` or ``[[ -z $A ]]`` holds; None for what only running could tell."""
    found: bool | None = None
    joined, words = "", [*raw_words(condition.replace("||", " || ").replace("&&", " && ")), "]]"]
    while words:
        if words[0] not in ("[", "[[") or "]" + "]" * (len(words[0]) - 1) not in words:
            return None
        end = words.index("]" + "]" * (len(words[0]) - 1))
        this = _any(words[1:end], known)
        found = this if not joined else _both(found, this) if joined == "&&" else _either(found, this)
        joined, words = words[end + 1], words[end + 2 :]
        if joined not in ("||", "&&"):
            return found if not words else None
    return None


def _both(left: bool | None, right: bool | None) -> bool | None:
    return False if False in (left, right) else None if None in (left, right) else True


def _either(left: bool | None, right: bool | None) -> bool | None:
    return True if True in (left, right) else None if None in (left, right) else False


def _any(words: list[str], known: Variables) -> bool | None:
    """What is within brackets: ``a || b && c``."""
    for sign, joined in (("||", _either), ("&&", _both)):
        if sign in words:
            place = words.index(sign)
            return joined(_any(words[:place], known), _any(words[place + 1 :], known))
    turned = words[:1] == ["!"]
    found = _asked(words[1:] if turned else words, known)
    return None if found is None else found != turned


def _asked(words: list[str], known: Variables) -> bool | None:
    if len(words) == 2 and words[0] in ("-z", "-n"):
        text = _text(words[1], known)
        return None if text is None else (text == "") == (words[0] == "-z")
    if len(words) != 3:
        return None
    left, right = _text(words[0], known), _text(words[2], known)
    if left is None or right is None:
        return None
    if words[1] in TEXTS and not set(right) & set("*?["):  # no pattern
        return TEXTS[words[1]](left, right)
    if words[1] in NUMBERS and left.lstrip("-").isdecimal() and right.lstrip("-").isdecimal():
        return NUMBERS[words[1]](int(left), int(right))
    return None


def _text(word: str, known: Variables) -> str | None:
    """A word with its variables; None if one of them is not set in the script."""
    text = " ".join(expanded(word, known))
    return None if "$" in text or "`" in text else text

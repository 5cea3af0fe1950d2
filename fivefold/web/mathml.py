"""The few words of LaTeX that the book's formulas use, as MathML, which browsers draw by themselves.

\\frac{T}{18D} \\ge x^2     →     <math><mfrac>…</mfrac><mo>≥</mo><msup>…</msup></math>
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from markupsafe import escape

SIGNS = {"ge": "≥", "le": "≤", "cdot": "·", "approx": "≈", "times": "×", "max": "max", "min": "min", "sum": "∑",
         "tau": "τ", "delta": "δ", "left": "", "right": ""}  # fmt: skip
SPACES = {" ": "0.4em", ";": "0.3em", ",": "0.2em", "quad": "1em", "qquad": "2em"}
_WORD = re.compile(r"\\text\{[^}]*\}|\\(?:[a-zA-Z]+|.)|\s+|\d+(?:\.\d+)?|.")


def mathml(text: str) -> str:
    """A formula that stands in a line of its own."""
    words = [word for word in _WORD.findall(text) if not word.isspace()]
    return f'<math display="block">{"".join(_row(iter(_grouped(words))))}</math>'


def _grouped(words: list[str]) -> list[str | list[str]]:
    """Words, with each ``{…}`` as a list of them."""
    found: list[str | list[str]] = []
    at = 0
    while at < len(words):
        if words[at] != "{":
            found.append(words[at])
            at += 1
            continue
        depth, end = 1, at + 1
        while depth:
            depth += {"{": 1, "}": -1}.get(words[end], 0)
            end += 1
        found.append(words[at + 1 : end - 1])
        at = end
    return found


def _row(words: Iterator[str | list[str]]) -> Iterator[str]:
    last = ""
    for word in words:
        if word in ("^", "_"):
            kind = {"^": "msup", "_": "munder" if ">max<" in last else "msub"}[str(word)]
            last = f"<{kind}>{last}{_one(next(words), words)}</{kind}>"
            continue
        yield last
        last = _one(word, words)
    yield last


def _one(word: str | list[str], words: Iterator[str | list[str]]) -> str:
    """One thing, with what belongs to it taken from ``words``."""
    if isinstance(word, list):
        return f"<mrow>{''.join(_row(iter(_grouped(word))))}</mrow>"
    if word == r"\frac":
        return f"<mfrac>{_one(next(words), words)}{_one(next(words), words)}</mfrac>"
    if word.startswith(r"\text{"):
        return f"<mtext>{escape(word[6:-1])}</mtext>"
    name = word.removeprefix("\\")
    if word.startswith("\\") and name in SPACES:
        return f'<mspace width="{SPACES[name]}"/>'
    if word.startswith("\\"):
        return f"<mo>{SIGNS.get(name, escape(name))}</mo>"
    kind = "mn" if word[0].isdigit() else "mi" if word.isalpha() else "mo"
    return f"<{kind}>{escape(word)}</{kind}>"

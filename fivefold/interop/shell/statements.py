"""A script as statements: assignments, commands, and blocks of logic, each with the line that it begins on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

OPENING = {"if": "fi", "for": "done", "while": "done", "until": "done", "case": "esac", "select": "done", "{": "}"}
CLOSING = frozenset(OPENING.values())
CONDITIONS = ("if", "elif", "while", "until")  # whose words reach to the next ;
HEREDOC = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?")


class Statement(NamedTuple):
    """Text of a statement, quotes and all, without comments."""

    line: int
    text: str


def statements(script: str) -> Iterator[Statement]:
    """Split at line ends, ``;``, ``&&``, ``||`` and ``|`` outside quotes, brackets and arrays."""
    text, line, start, quote, depth = "", 1, 1, "", 0
    place, end = 0, len(script)
    while place < end:
        char = script[place]
        pair = script[place : place + 2]
        if char == "\n":
            line += 1
        if pair == "\\\n" and quote != "'":
            text, place, line = text + " ", place + 2, line + 1
            continue
        if pair[:1] == "\\" and quote != "'":
            text, place = text + pair, place + 2
            continue
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"`":
            quote = char
        elif char == "#" and (not text or text[-1] in " \t\n("):
            place = script.find("\n", place) if "\n" in script[place:] else end
            continue
        elif char in "({":
            depth += 1
        elif char in ")}":
            depth = max(0, depth - 1)
        elif pair in ("||", "&&") and first_word(text) in CONDITIONS:
            text, place = text + pair, place + 2
            continue
        elif depth == 0 and (char in "\n;|" or pair == "&&" or (char == "&" and script[place - 1 : place] != ">")):
            if text.strip():
                yield Statement(start, text.strip())
                if (found := HEREDOC.search(text)) and char == "\n":
                    place, skipped = _after(script, place + 1, found[1])
                    line += skipped
                    text, start = "", line
                    continue
            text, start = "", line
            place += 2 if pair in ("&&", "||") else 1
            continue
        if not text.strip():
            start = line
        text += " " if char == "\n" and quote == "" else char
        place += 1
    if text.strip():
        yield Statement(start, text.strip())


def _after(script: str, place: int, mark: str) -> tuple[int, int]:
    """The place after a here-document that ends with ``mark``, and how many lines it has."""
    lines = 0
    while place < len(script):
        end = script.find("\n", place)
        end = len(script) if end < 0 else end
        found, place, lines = script[place:end].strip(), end + 1, lines + 1
        if found == mark:
            break
    return place, lines


def first_word(text: str) -> str:
    """The word that says what a statement is."""
    return text.split(None, 1)[0] if text.split() else ""


def is_function(text: str) -> bool:
    """Whether a statement defines a function."""
    return first_word(text) == "function" or re.match(r"\w+\s*\(\s*\)", text) is not None

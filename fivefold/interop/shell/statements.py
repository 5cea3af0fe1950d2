"""Split a script into statements: assignments, commands, and blocks of logic, each with its first line number."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

OPENING = {"if": "fi", "for": "done", "while": "done", "until": "done", "case": "esac", "select": "done", "{": "}"}
CLOSING = frozenset(OPENING.values())
CONDITIONS = ("if", "elif", "while", "until")  # their words extend to the next ;
HEREDOC = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?")


class Statement(NamedTuple):
    """The text of a statement, with quotes and without comments."""

    line: int
    text: str


def split_statements(script: str) -> Iterator[Statement]:
    """Split at line ends, ``;``, ``&&``, ``||`` and ``|`` outside quotes, brackets and arrays."""
    text, line, start, quote, depth = "", 1, 1, "", 0
    position, end = 0, len(script)
    while position < end:
        char = script[position]
        pair = script[position : position + 2]
        if char == "\n":
            line += 1
        if pair == "\\\n" and quote != "'":
            text, position, line = text + " ", position + 2, line + 1
            continue
        if pair[:1] == "\\" and quote != "'":
            text, position = text + pair, position + 2
            continue
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"`":
            quote = char
        elif char == "#" and (not text or text[-1] in " \t\n("):
            position = script.find("\n", position) if "\n" in script[position:] else end
            continue
        elif char in "({":
            depth += 1
        elif char in ")}":
            depth = max(0, depth - 1)
        elif pair in ("||", "&&") and get_first_word(text) in CONDITIONS:
            text, position = text + pair, position + 2
            continue
        elif depth == 0 and (
            char in "\n;|" or pair == "&&" or (char == "&" and script[position - 1 : position] != ">")
        ):
            if text.strip():
                yield Statement(start, text.strip())
                if (heredoc := HEREDOC.search(text)) and char == "\n":
                    position, skipped = _skip_here_document(script, position + 1, heredoc[1])
                    line += skipped
                    text, start = "", line
                    continue
            text, start = "", line
            position += 2 if pair in ("&&", "||") else 1
            continue
        if not text.strip():
            start = line
        text += " " if char == "\n" and quote == "" else char
        position += 1
    if text.strip():
        yield Statement(start, text.strip())


def _skip_here_document(script: str, place: int, delimiter: str) -> tuple[int, int]:
    """Return the position after a here-document that ends with ``delimiter``, and the number of its lines."""
    lines = 0
    while place < len(script):
        end = script.find("\n", place)
        end = len(script) if end < 0 else end
        line, place, lines = script[place:end].strip(), end + 1, lines + 1
        if line == delimiter:
            break
    return place, lines


def get_first_word(text: str) -> str:
    """Return the first word, which tells the kind of a statement."""
    return text.split(None, 1)[0] if text.split() else ""


def is_function(text: str) -> bool:
    """Return whether a statement defines a function."""
    return get_first_word(text) == "function" or re.match(r"\w+\s*\(\s*\)", text) is not None

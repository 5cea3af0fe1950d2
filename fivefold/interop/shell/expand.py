"""Words of a statement with their variables, as a shell makes them; what only running could tell stays as it is."""

from __future__ import annotations

import ast
import operator
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

Variables = Mapping[str, str | list[str]]

NAME = re.compile(r"\$(?:(\w+|[@#*?])|\{([^{}]*)\})")
ARITHMETIC = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
COMMAND = re.compile(r"\$\(([^()]*(?:\([^()]*\)[^()]*)*)\)|`([^`]*)`")
WITHIN = r"\$\{[^{}]*\}|\$\((?:[^()]|\([^()]*\))*\)|\\."  # what may hold quotes of its own
PARTS = re.compile(rf"'[^']*'|\"(?:{WITHIN}|[^\"\\])*\"|(?:{WITHIN}|[^'\"\\])+")
OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
LARGEST = 10**15


def raw_words(text: str) -> list[str]:
    """The words of a statement, with their quotes."""
    words, word, quote, depth, place = [], "", "", 0, 0
    while place < len(text):
        char = text[place]
        if char == "\\" and quote != "'" and place + 1 < len(text):
            word, place = word + text[place : place + 2], place + 2
            continue
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"`":
            quote = char
        elif char in "({":
            depth += 1
        elif char in ")}":
            depth = max(0, depth - 1)
        if char.isspace() and not quote and depth == 0:
            if word:
                words.append(word)
            word = ""
        else:
            word += char
        place += 1
    return [*words, word] if word else words


def expanded(word: str, known: Variables) -> list[str]:
    """The words that one becomes: none, one, or those of an array or of an unquoted list."""
    parts = PARTS.findall(word)
    made: list[str] = [""]
    seen = False
    for part in parts:
        if part.startswith("'"):
            made[-1] += part[1:-1]
            seen = True
        elif part.startswith('"'):
            inner = part[1:-1]
            if (found := re.fullmatch(r"\$\{(\w+)\[@\]\}", inner)) and isinstance(known.get(found[1]), list):
                several = list(known[found[1]])
                made[-1:] = [made[-1] + several[0], *several[1:]] if several else made[-1:]
                seen = seen or bool(several)
            else:
                made[-1] += substituted(re.sub(r"\\([\"\\$`])", _hidden, inner), known)
                seen = True
        else:
            text = substituted(re.sub(r"\\(.)", _hidden, part), known)
            split = text.split()
            if text[:1].isspace() and made[-1]:
                made.append("")
            if split:
                made[-1] += split[0]
                made += split[1:]
                seen = True
    return [HIDDEN.sub(lambda found: chr(ord(found[0]) - BEHIND), each) for each in made] if seen else []


BEHIND = 0xF0000  # where escaped characters wait until variables are in and words are split
HIDDEN = re.compile("[\U000f0000-\U000fffff]")


def _hidden(match: re.Match[str]) -> str:
    return chr(BEHIND + ord(match[1])) if ord(match[1]) < 0x10000 else match[1]


def substituted(text: str, known: Variables) -> str:
    """The text with variables in it; unknown ones stay as ``$NAME``."""
    text = ARITHMETIC.sub(lambda match: _computed(match, known), text)
    text = COMMAND.sub(lambda match: f"$({' '.join((match[1] or match[2]).split()[:1])})", text)  # one word

    def value(match: re.Match[str]) -> str:
        said = match[1] or match[2]
        name, sets, default = said.partition(":-") if ":-" in said else said.partition(":=")
        name = name.removesuffix("[@]").removesuffix("[*]")
        found = known.get(name)
        if found is None:
            return " ".join(expanded(default, known)) if sets else match[0]
        return " ".join(found) if isinstance(found, list) else found

    return NAME.sub(value, text)


def _computed(match: re.Match[str], known: Variables) -> str:
    """The number that ``$((…))`` is; itself if that is not whole numbers alone."""
    text = substituted(match[1], known)
    text = re.sub(r"[A-Za-z_]\w*", lambda name: str(known.get(name[0], name[0])), text)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's, of numbers that touch words
            return str(_number(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return match[0]


def _number(node: Any) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        found = OPERATORS[type(node.op)](_number(node.left), _number(node.right))
        if abs(found) < LARGEST:
            return found
    raise ValueError("no whole numbers")

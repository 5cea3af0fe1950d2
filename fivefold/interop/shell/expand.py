"""Expand the variables in the words of a statement as a shell does; what only running could tell stays as it is."""

from __future__ import annotations

import ast
import operator
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

Variables = Mapping[str, str | list[str]]

NAME = re.compile(r"\$(?:(\w+|[@#*?])|\{([^{}]*)\})")
EXPR = re.compile(r"\$\(\s*expr\s+([^()]*)\)")
ARITHMETIC = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
COMMAND = re.compile(r"\$\(([^()]*(?:\([^()]*\)[^()]*)*)\)|`([^`]*)`")
SUBSTITUTION = r"\$\{[^{}]*\}|\$\((?:[^()]|\([^()]*\))*\)|\\."  # expressions that may contain quotes
WORD_PARTS = re.compile(rf"'[^']*'|\"(?:{SUBSTITUTION}|[^\"\\])*\"|(?:{SUBSTITUTION}|[^'\"\\])+")
OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
LARGEST_INTEGER = 10**15


def split_words(text: str) -> list[str]:
    """Split a statement into words, with their quotes."""
    words, word, quote, depth, position = [], "", "", 0, 0
    while position < len(text):
        char = text[position]
        if char == "\\" and quote != "'" and position + 1 < len(text):
            word, position = word + text[position : position + 2], position + 2
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
        position += 1
    return [*words, word] if word else words


def expand(word: str, known: Variables) -> list[str]:
    """Expand a word into none, one, or the several words of an array or of an unquoted list."""
    parts = WORD_PARTS.findall(word)
    words: list[str] = [""]
    has_word = False
    for part in parts:
        if part.startswith("'"):
            words[-1] += part[1:-1]
            has_word = True
        elif part.startswith('"'):
            inner = part[1:-1]
            if (match := re.fullmatch(r"\$\{(\w+)\[@\]\}", inner)) and isinstance(known.get(match[1]), list):
                elements = list(known[match[1]])
                words[-1:] = [words[-1] + elements[0], *elements[1:]] if elements else words[-1:]
                has_word = has_word or bool(elements)
            else:
                words[-1] += substitute(re.sub(r"\\([\"\\$`])", _hide_character, inner), known)
                has_word = True
        else:
            text = substitute(re.sub(r"\\(.)", _hide_character, part), known)
            split_words = text.split()
            if text[:1].isspace() and words[-1]:
                words.append("")
            if split_words:
                words[-1] += split_words[0]
                words += split_words[1:]
                has_word = True
    return (
        [
            ESCAPED_CHARACTER.sub(lambda hidden: chr(ord(hidden[0]) - ESCAPE_OFFSET), expanded_word)
            for expanded_word in words
        ]
        if has_word
        else []
    )


ESCAPE_OFFSET = 0xF0000  # offset that marks escaped characters until variables are replaced and words are split
ESCAPED_CHARACTER = re.compile("[\U000f0000-\U000fffff]")


def _hide_character(match: re.Match[str]) -> str:
    return chr(ESCAPE_OFFSET + ord(match[1])) if ord(match[1]) < 0x10000 else match[1]


def substitute(text: str, known: Variables) -> str:
    """Replace the variables in a text; unknown ones stay as ``$NAME``."""
    text = EXPR.sub(lambda match: f"$(({match[1]}))".replace("\\", ""), text)
    text = ARITHMETIC.sub(lambda match: _evaluate(match, known), text)
    text = COMMAND.sub(lambda match: f"$({' '.join((match[1] or match[2]).split()[:1])})", text)  # one word

    def value(match: re.Match[str]) -> str:
        branch_value = match[1] or match[2]
        name, sets, default = branch_value.partition(":-") if ":-" in branch_value else branch_value.partition(":=")
        name = name.removesuffix("[@]").removesuffix("[*]")
        known_value = known.get(name)
        if known_value is None:
            return " ".join(expand(default, known)) if sets else match[0]
        return " ".join(known_value) if isinstance(known_value, list) else known_value

    return NAME.sub(value, text)


def _evaluate(match: re.Match[str], known: Variables) -> str:
    """Return the value of ``$((…))`` as text, or the expression itself if it has anything but integers."""
    text = substitute(match[1], known)
    text = re.sub(r"[A-Za-z_]\w*", lambda name: str(known.get(name[0], name[0])), text)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns about numbers next to words
            return str(_number(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return match[0]


def _number(node: Any) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        result = OPERATORS[type(node.op)](_number(node.left), _number(node.right))
        if abs(result) < LARGEST_INTEGER:
            return result
    raise ValueError("not integers")

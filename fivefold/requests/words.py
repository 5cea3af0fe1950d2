"""Parses numbers with units: ``2T`` tokens, a sequence of ``8k``, ``24GiB``."""

from __future__ import annotations

import re

from fivefold.errors import UserError
from fivefold.units import GIB, KIB, MIB

TOKENS = {"k": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
DOLLARS = {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9}
LENGTHS = {"k": 2**10, "K": 2**10, "M": 2**20}  # of sequences: 8k is 8192
UNITS = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_tokens(text: str | float) -> float:
    """Return ``2e12`` or ``2T`` as a number of tokens, and numbers unchanged; raises ``ValueError`` for other text."""
    if not isinstance(text, str):
        return text
    number, scale = (text[:-1], TOKENS[text[-1]]) if text[-1:] in TOKENS else (text, 1.0)
    try:
        return float(number) * scale
    except ValueError:
        raise ValueError("must be a number, such as 2e12 or 2T") from None


def parse_dollars(text: str | float) -> float:
    """Return ``50000``, ``50k`` or ``$50,000`` as dollars, and numbers unchanged.

    Raises ``ValueError`` for other text, and where nothing can be bought.
    """
    if isinstance(text, str):
        match = re.fullmatch(r"\$?([0-9]{1,9}(?:\.[0-9]{1,9})?)([kKMB]?)", text.replace(",", ""))
        dollars = float(match[1]) * DOLLARS.get(match[2], 1.0) if match else 0.0
    else:
        dollars = text
    if not dollars > 0:
        raise ValueError("must be a number of dollars, such as 50000, 50k or 2M")
    return dollars


def parse_length(text: str | float) -> int | float:
    """Return ``8192`` or ``8k`` as a number of tokens, where k is 1024; numbers are returned unchanged.

    Raises ``ValueError`` for other text.
    """
    if not isinstance(text, str):
        return text
    number, scale = (text[:-1], LENGTHS[text[-1]]) if text[-1:] in LENGTHS else (text, 1)
    if not (number.isascii() and number.isdecimal() and len(number) <= 40):
        raise ValueError("must be a whole number of tokens, such as 8192 or 8k")
    return int(number) * scale


def split_list(text: str, *, option: str) -> tuple[str, ...]:
    """Return the entries of ``a,b``; raises ``UserError`` naming ``option`` if one is empty."""
    if text and not all(word.strip() for word in text.split(",")):
        raise UserError(f"{option} {text!r} is not a list; write for example a,b")
    return tuple(word.strip() for word in text.split(",") if word.strip())


def parse_bytes(text: str, *, option: str = "--budget") -> int:
    """Return ``24GiB`` in bytes."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?) ?([KMG]i?B|B)", text.strip())
    if match is None or float(match[1]) * UNITS[match[2]] < 1:
        raise UserError(f"{option} {text!r} is not a size; write for example 24GiB or 500MiB")
    return int(float(match[1]) * UNITS[match[2]])

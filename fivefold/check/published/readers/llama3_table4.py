"""Llama 3 405B on 8192 H100 (arXiv:2407.21783, table 4).

It cannot be scored: the table prints neither the micro-batch nor the virtual stages, nor the formula behind its MFU.
"""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.check.published.case import Case, Excluded
from fivefold.check.published.convert import read

SOURCE = "llama3_table4"


def cases() -> Iterator[Case | Excluded]:
    """The row, excluded."""
    return read(SOURCE, rule=lambda row: "micro-batch and virtual stages are not printed", case=lambda row: [])

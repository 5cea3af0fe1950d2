"""MegaScale (Jiang et al. 2024, arXiv:2402.15627): 175B and 530B on up to 12 288 GPUs, against Megatron-LM.

Nothing can be scored: micro-batch, virtual stages, vocabulary, recomputation and attention window are not printed.
"""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.check.published.case import Case, Excluded
from fivefold.check.published.convert import read

SOURCE = "megascale"


def cases() -> Iterator[Case | Excluded]:
    """Every row, excluded, with what it lacks."""
    rule = "micro-batch, virtual stages and vocabulary are not printed"
    return read(SOURCE, rule=lambda row: rule, case=lambda row: [])

"""fms-acceleration's benchmarks of fine-tuning under Hugging Face's trainer: none of its rows states enough.

foundation-model-stack/fms-acceleration@04702cc:scripts/benchmarks/refs/a100_80gb.csv and its other tables: neither
sequence length nor what is recomputed is given with the figures, and PowerMoE is no model of ours.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.published.case import Case, Excluded
from benchmarks.published.cells import Row, integer
from benchmarks.published.convert import read

SILENT = "sequence length, precision and recomputation are not printed"
UNREAD = "a run whose settings were not read"


def _rule(row: Row) -> str:
    return UNREAD if integer(row, "seq") and row["recompute"] else SILENT


def _case(row: Row) -> Case:
    raise AssertionError(row)  # the rule leaves no row


def cases() -> Iterator[Case | Excluded]:
    """Yield exclusions only: none of the rows is scored."""
    return read("fms_acceleration", rule=_rule, case=_case, halved=True)

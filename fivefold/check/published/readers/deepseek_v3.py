"""DeepSeek-V3's pre-training on 2048 H800: 2.664e6 GPU hours for 14.8e12 tokens (arXiv:2412.19437).

At its final batch that is 19.9 s a step, but an average over the whole run, whose micro-batch is not stated: no case.
"""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.check.published.case import Case, Excluded
from fivefold.check.published.convert import read

RULE = "averaged over a run, its micro-batch not printed"


def cases() -> Iterator[Case | Excluded]:
    """One per measured row."""
    return read("deepseek_v3", rule=lambda row: RULE, case=lambda row: [])

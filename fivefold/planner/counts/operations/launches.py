"""The kernels that the trainer's own scans and routing launch: PyTorch's operations (``trainer/model``).

Counted by dry runs. Where the host launches them one by one, a scan takes as long as its launches; the kernels of
flash-linear-attention and mamba_ssm, which other software runs, are a few for all chunks.
``tests/dry_run/test_planned_time.py`` counts them again.
"""

from __future__ import annotations

from collections.abc import Mapping

from fivefold.model.shape import MixerName

# Forward and backward: what the kernels of two runs that differ in their chunks alone differ by.
LAUNCHES_PER_CHUNK: Mapping[MixerName, tuple[int, int]] = {
    "mamba2": (36, 131),
    "gated_delta_net": (58, 220),
    "kimi_delta": (145, 519),
    "lightning": (30, 63),
    "mamba": (44, 183),
    "rg_lru": (51, 226),
}
# Forward and backward around the experts, by operation (``trainer/model/moe.py``, ``routing.py``,
# ``parallel/expert.py``); of other software: ``Constants.moe_kernels``. moe.send has the counts of rows that the host
# reads, and the sort of what has arrived.
EXPERT_LAUNCHES: Mapping[str, tuple[int, int]] = {
    "moe.topk": (9, 37),
    "moe.dispatch": (10, 1),
    "moe.send": (12, 4),
    "moe.return": (2, 1),
    "moe.combine": (1, 1),
}


def count_launches(mixer: MixerName, chunks: int) -> tuple[int, int]:
    """Return the kernels of a scan of ``chunks`` chunks, forward and backward."""
    forward, backward = LAUNCHES_PER_CHUNK[mixer]
    return forward * chunks, backward * chunks

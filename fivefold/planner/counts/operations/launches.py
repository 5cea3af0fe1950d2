"""The kernels that the trainer's own scans and routing launch: PyTorch's operations (``trainer/model``).

Counted by dry runs. Where the host launches them one by one, a scan takes as long as its launches; the kernels of
flash-linear-attention and mamba_ssm, which other software runs, are a few for all chunks.
``tests/dry_run/test_planned_time.py`` counts them again.
"""

from __future__ import annotations

from collections.abc import Mapping

from fivefold.model.shape import MixerName

# Forward and backward: what the kernels of two runs that differ in their groups of chunks alone differ by. Groups are
# of one chunk but for Mamba-2 and lightning attention (``model/mixers/chunk_groups.py``).
LAUNCHES_PER_GROUP: Mapping[MixerName, tuple[int, int]] = {
    "mamba2": (47, 163),
    "gated_delta_net": (58, 220),
    "kimi_delta": (145, 519),
    "lightning": (42, 79),
    "mamba": (44, 183),
    "rg_lru": (51, 226),
}
# Times that kernels of a scan other than matmuls read or write its temporaries in fp32, forward and backward; for their
# names see the mixers. Mamba-2: with convolution, gate and norm. Fits of dry runs of eight and five geometries, each
# within 1 %.
PASSES: Mapping[MixerName, Mapping[str, tuple[float, float]]] = {
    "mamba2": {
        "pairs": (8.6, 23.6),
        "dims": (54.1, 175.1),
        "shared_pairs": (15.6, 41.5),
        "shared_dims": (41.0, 147.1),
        "states": (7.7, 20.7),
    },
    "lightning": {"pairs": (3.07, 5.24), "dims": (26.3, 70.2), "states": (4.4, 12.5)},
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


def count_launches(mixer: MixerName, groups: int) -> tuple[int, int]:
    """Return the kernels of a scan of ``groups`` groups of chunks, forward and backward."""
    forward, backward = LAUNCHES_PER_GROUP[mixer]
    return forward * groups, backward * groups


def count_launched_bytes(mixer: MixerName, sizes: Mapping[str, int]) -> tuple[int, int]:
    """Return the bytes that kernels other than matmuls read and write, of temporaries of these sizes in bytes."""
    forward, backward = (
        int(sum(passes[way] * sizes[name] for name, passes in PASSES[mixer].items())) for way in (0, 1)
    )
    return forward, backward

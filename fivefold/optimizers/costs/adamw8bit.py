"""8-bit AdamW (bitsandbytes): two scaled moments of a byte; an update also holds the codes of one, 4 bytes each."""

from __future__ import annotations

from collections.abc import Iterable

from fivefold.job import Job
from fivefold.optimizers.cost import is_narrow
from fivefold.optimizers.costs.adamw import AdamWCost, count_block_elements
from fivefold.optimizers.sharded_weight import ShardedWeight

EIGHT_BIT_BYTES = 2.03  # of both moments per element, with their scales


class AdamW8bitCost(AdamWCost):
    """AdamW with two 8-bit moments (bitsandbytes)."""

    title = "8-bit AdamW"
    counts_2d_tp = False
    updates_flat_buffer = False

    def formats(self, job: Job) -> list[tuple[int, bool]]:
        """Return two scaled bytes."""
        return [(1, True)] * 2

    def moved_bytes(self, job: Job) -> float:
        """Return the bytes of both moments with their scales."""
        return EIGHT_BIT_BYTES

    def scratch_bytes(self, weights: Iterable[ShardedWeight], job: Job) -> int:
        """Return the bytes of a block of rows in fp32 and of the codes of one moment."""
        return (16 if is_narrow(job) else 12) * count_block_elements(weights, scaled=True)


COST = AdamW8bitCost()

"""4-bit AdamW (torchao): two moments of half a byte, with an fp32 scale for each block of a rank's part of a weight.

A part with fewer than 4096 elements, or not of full blocks, has moments in the dtype of the weight that is updated. The
update is one compiled kernel, which holds nothing.
Source: pytorch/ao@v0.15.0:torchao/optim/adam.py, subclass_4bit.py (arXiv:2309.01507); blocks of 256 elements:
transformers 5.23: trainer_optimizer.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fivefold.job import Job
from fivefold.model.weights import Weight
from fivefold.optimizers.cost import OptimizerCost, count_local_numel
from fivefold.optimizers.sharded_weight import ShardedWeight

BLOCK, MIN_QUANTIZED_ELEMENTS, CODEBOOK_BYTES = 256, 4096, 4 * 16


class AdamW4bitCost(OptimizerCost):
    """AdamW with two 4-bit moments (torchao)."""

    title = "4-bit AdamW"
    elementwise = True
    fp32_states = False
    counts_2d_tp = False
    updates_flat_buffer = False

    def state_bytes(self, weights: Sequence[Weight], *, shards: int, quantised: frozenset[str], job: Job) -> int:
        """Return the bytes of two moments, each with its scales and codebook, and a step count per weight."""
        total = 4 * len(weights)
        for weight in weights:
            numel = count_local_numel(weight, shards)
            is_quantized = numel >= MIN_QUANTIZED_ELEMENTS and numel % BLOCK == 0
            moment_bytes = numel // 2 + 4 * (numel // BLOCK) + CODEBOOK_BYTES
            total += 2 * (moment_bytes if is_quantized else numel * job.precision.updated_bytes)
        return total

    def moved_bytes(self, job: Job) -> float:
        """Return the bytes of both moments with their scales."""
        return 2 * (0.5 + 4 / BLOCK)

    def scratch_bytes(self, weights: Iterable[ShardedWeight], job: Job) -> int:
        """Return 0, as one kernel updates a weight."""
        return 0


COST = AdamW4bitCost()

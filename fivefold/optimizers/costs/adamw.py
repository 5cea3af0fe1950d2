"""AdamW with moments of any precision: elementwise, sends nothing.

state    two moments and a step count per weight; a scaled moment has an fp32 scale per block of a row, and is fp32
         in weights that are too small to quantize (bitsandbytes: arXiv:2110.02861)
scratch  for low-precision moments: both of them in fp32 for a block of rows; weight and gradient if those have low
         precision
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fivefold.job import Job
from fivefold.model.weights import Weight
from fivefold.optimizers.cost import FP32_ELEMENTS, OptimizerCost, count_fp32_bytes, count_local_numel, is_narrow
from fivefold.optimizers.sharded_weight import ShardedWeight
from fivefold.units import ceil_div
from fivefold.update import QUANTISED_BLOCK
from fivefold.update import is_quantized as is_quantised


class AdamWCost(OptimizerCost):
    """AdamW; its moments have the formats of the precision recipe."""

    title = "AdamW"
    elementwise = True
    fp32_states = False
    counts_2d_tp = True
    updates_flat_buffer = True

    def formats(self, job: Job) -> list[tuple[int, bool]]:
        """Return the bytes per element of each moment, and whether it is scaled."""
        return list(zip(job.precision.moments_bytes, job.precision.scaled_moments, strict=True))

    def state_bytes(self, weights: Sequence[Weight], *, shards: int, quantised: frozenset[str], job: Job) -> int:
        """Return the bytes of two moments and a step count per weight."""
        total = 4 * len(weights)
        for weight in weights:
            numel, columns = count_local_numel(weight, shards), weight.shape[-1]
            scales = numel // columns * ceil_div(columns, QUANTISED_BLOCK)
            for size, scaled in self.formats(job):
                in_fp32 = scaled and weight.name not in quantised
                total += 4 * numel if in_fp32 else size * numel + 4 * scales * scaled
        return total

    def moved_bytes(self, job: Job) -> float:
        """Return the bytes of both moments."""
        return sum(job.precision.moments_bytes)

    def scratch_bytes(self, weights: Iterable[ShardedWeight], job: Job) -> int:
        """Return the bytes of a block that is in fp32: of rows, or of elements if all moments are fp32."""
        if job.precision.moments_bytes == (4, 4):
            return count_fp32_bytes(weights, job)
        return (16 if is_narrow(job) else 8) * count_block_elements(weights, scaled=any(job.precision.scaled_moments))


def count_block_elements(weights: Iterable[ShardedWeight], *, scaled: bool) -> int:
    """Return the elements of the largest block of rows that is in fp32 at once."""
    return max(
        (
            cut.columns * min(cut.rows, max(1, FP32_ELEMENTS // cut.columns))
            for cut in weights
            if not scaled or is_quantised(cut.weight.numel, vector=cut.weight.is_vector)
        ),
        default=0,
    )


COST = AdamWCost()

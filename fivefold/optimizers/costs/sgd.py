"""SGD with optional momentum: elementwise, sends nothing, needs scratch memory only for low-precision weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fivefold.job import Job
from fivefold.model.weights import Weight
from fivefold.optimizers.cost import OptimizerCost, count_fp32_bytes, count_local_numel
from fivefold.optimizers.sharded_weight import ShardedWeight


class SgdCost(OptimizerCost):
    """SGD; without momentum it has no state."""

    title = "SGD"
    elementwise = True
    fp32_states = True
    counts_2d_tp = True
    updates_flat_buffer = False

    def _count_momentum_bytes(self, job: Job) -> int:
        return job.precision.moments_bytes[0] if job.optimizer.momentum else 0

    def state_bytes(self, weights: Sequence[Weight], *, shards: int, quantised: frozenset[str], job: Job) -> int:
        """Return the bytes of the momentum."""
        return sum(count_local_numel(weight, shards) for weight in weights) * self._count_momentum_bytes(job)

    def moved_bytes(self, job: Job) -> float:
        """Return the bytes of the momentum."""
        return self._count_momentum_bytes(job)

    def scratch_bytes(self, weights: Iterable[ShardedWeight], job: Job) -> int:
        """Return the bytes of low-precision weights and gradients that are in fp32 at once; else it is in place."""
        return count_fp32_bytes(weights, job)


COST = SgdCost()

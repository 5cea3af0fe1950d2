"""Adafactor (arXiv:1804.04235): fp32 means over rows and columns instead of a second moment, and no first moment.

Messages are all_reduces of sums of squares, of means over rows and of the update's norm, over shards and over tp (etp).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fivefold.job import Job
from fivefold.model.weights import Weight
from fivefold.optimizers.cost import OptimizerCost, Payloads, Product, count_local_numel, is_narrow
from fivefold.optimizers.sharded_weight import ShardedWeight
from fivefold.units import ceil_div


class AdafactorCost(OptimizerCost):
    """Adafactor without a first moment."""

    title = "Adafactor"
    elementwise = False
    fp32_states = False
    counts_2d_tp = False
    updates_flat_buffer = False

    def state_bytes(self, weights: Sequence[Weight], *, shards: int, quantised: frozenset[str], job: Job) -> int:
        """Return the bytes of means and step counts.

        Means of each row are sharded like the rows; means of each column, per expert, are on every rank of the shard
        group.
        """
        total = 4 * len(weights)
        for weight in weights:
            experts, *shape = weight.shape if weight.kind.startswith("expert") else (1, *weight.shape)
            if len(shape) == 2:
                rows, columns = shape
                total += 4 * (ceil_div(experts * rows, shards) + experts * columns)
            else:
                total += 4 * count_local_numel(weight, shards)
        return total

    def moved_bytes(self, job: Job) -> float:
        """Return 0, as means are small compared with the weights."""
        return 0.0

    def scratch_bytes(self, weights: Iterable[ShardedWeight], job: Job) -> int:
        """Return the bytes of all sums and, in fp32, of the largest weight and the squares of one matrix."""
        weights = list(weights)
        sums = sum(3 * cut.experts + (cut.rows + cut.experts * cut.columns) * cut.is_matrix for cut in weights)
        copies = 2 if is_narrow(job) else 1
        return 4 * sums + 4 * max(cut.columns * (copies * cut.rows + min(cut.rows, cut.matrix_rows)) for cut in weights)

    def products(self, family: list[ShardedWeight]) -> list[Product]:
        """Return no products, as no matrices are multiplied."""
        return []

    def weight_products(self, weight: ShardedWeight) -> list[Product]:
        """Return no products, as no matrices are multiplied."""
        return []

    def payloads(self, family: list[ShardedWeight]) -> Payloads:
        """Return the all_reduces over shards and over pieces.

        Statistics that tp does not shard are not sent over tp; means over columns are sharded like the rows.
        """
        rows, pieces = [0, 0, 0], [0, 0, 0]
        for cut in family:
            column = cut.experts * cut.columns * cut.is_matrix
            cuts_rows = cut.dim is not None and cut.dim < len(cut.shape) - 1
            rows[0] += column + cut.experts
            rows[1] += cut.experts * cut.is_matrix
            rows[2] += cut.experts
            if cut.dim is not None:
                row = 0 if cuts_rows else cut.rows
                pieces[0] += cut.experts + (column if cuts_rows else row) * cut.is_matrix
                pieces[1] += cut.experts * cut.is_matrix * cuts_rows
                pieces[2] += cut.experts
        return Payloads("all_reduce", [4 * size for size in rows], [4 * size for size in pieces])


COST = AdafactorCost()

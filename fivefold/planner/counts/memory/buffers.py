"""Bytes that live all through a step beside the states: inputs, rotary tables, and second copies of gradients."""

from __future__ import annotations

from collections.abc import Collection

from fivefold.job import Job
from fivefold.layout.sharding import policy
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.planner.counts.memory.stage import Chunk


def inputs_bytes(model: Model, job: Job, *, layout: Layout) -> int:
    """Return the bytes of a step's token ids (int64, one more per sequence for the targets) and position tables."""
    wide = job.precision.compute in ("fp32", "tf32") or job.precision.autocasts
    tables = 2 * sum(model.table_dims) * (job.sequence // layout.cp) * (4 if wide else 2)
    return 8 * layout.micro_batches(job) * layout.mbs * (job.sequence + 1 + model.predicted) + tables


def spare_gradients_bytes(job: Job, chunks: Collection[Chunk], *, layout: Layout) -> int:
    """Bytes of a rank's unused gradients: a placeholder per weight shape, or buckets that hold every gradient again;
    ZeRO-3's bucket, which lives beside its shards.
    """
    recipe = job.precision
    if job.stack.reduce_bucket and not policy(layout, job).weights_stay:
        return job.stack.reduce_bucket * recipe.summed_bytes
    if job.stack.weight_gradients == "placeholders":
        shapes = frozenset[tuple[int, int]]().union(*(chunk.shapes for chunk in chunks))
        return sum(rows * columns for rows, columns in shapes) * recipe.gradients_bytes
    if job.stack.weight_gradients in ("buckets", "bucketed"):
        return sum(chunk.states.sums for chunk in chunks) * recipe.gradients_bytes // recipe.summed_bytes
    return 0

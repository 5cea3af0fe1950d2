"""Bytes that live throughout a step next to the states: inputs, rotary tables, the index of fp8 scales, and second
copies of gradients.
"""

from __future__ import annotations

from collections.abc import Collection

from fivefold.job import Job
from fivefold.layout.sharding import multiplies, policy, shard_numel
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.memory.stage import Chunk
from fivefold.planner.counts.memory.states import count_scales


def inputs_bytes(model: Model, job: Job, *, layout: Layout) -> int:
    """Return the bytes of a step's token ids (int64, one more per sequence for the targets) and position tables."""
    wide = job.precision.compute in ("fp32", "tf32") or job.precision.autocasts
    tables = 2 * sum(model.table_dims) * (job.sequence // layout.cp) * (4 if wide else 2)
    return 8 * layout.micro_batches(job) * layout.mbs * (job.sequence + 1 + model.predicted) + tables


def scale_index_bytes(counts: Counts, layout: Layout, *, stages: Collection[int]) -> int:
    """Return the bytes that the engine keeps to gather the matrices of ``stages`` in fp8, on the rank with the largest
    shards: for each of its rows the index of its block of scales (int64), and fp32 scales if weights are held in fp8.
    """
    recipe, total = counts.job.precision, 0
    if recipe.gathers != "fp8" or counts.job.stack.name != "fivefold":
        return 0
    for run, times in (work for stage in stages for work in counts.stage_work(layout)[stage]):
        for unit, shards, _ in counts.local_parts(layout, run.name):
            if shards > 1 or recipe.holds_casts:
                matrices = [weight for weight in unit.weights if multiplies(weight)]
                rows = sum(shard_numel(weight, shards=shards) // weight.shape[-1] for weight in matrices)
                scales = sum(count_scales(weight, recipe) for weight in matrices) if recipe.holds_casts else 0
                total += times * (8 * rows + 4 * scales)
    return total


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

"""Messages, FLOPs and temporary bytes of the optimizer's update on the first rank of a stage.

The costs of each optimizer are in ``optimizers/costs/``, implementations in ``trainer/optimizers/``, reasons in
docs/explanation/decisions/017 and 020.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fivefold.layout.local_weight import pad_vocab
from fivefold.layout.schedule import schedule
from fivefold.layout.sharding import is_trained, shard_weight
from fivefold.layout.spec import Layout
from fivefold.optimizers.cost import Product, find_cost
from fivefold.optimizers.sharded_weight import ShardedWeight, split_families
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.message import RepeatedMessage


def list_sharded_weights(counts: Counts, layout: Layout, *, chunks: Iterable[int]) -> Iterator[ShardedWeight]:
    """Yield all trained weights of the stages ``chunks``, as they are sharded."""
    vocab = pad_vocab(counts.model, counts.job, tp=layout.tp)
    work = counts.stage_work(layout)
    for chunk in chunks:
        for run, times in work[chunk]:
            for weight in counts.weights(layout, run.name):
                if not is_trained(weight, counts.job):
                    continue
                local = shard_weight(weight, model=counts.model, layout=layout, vocab=vocab)
                experts = weight.kind.startswith("expert")
                sizes = (layout.expert_shards, layout.etp) if experts else (layout.shards, layout.tp)
                yield from [ShardedWeight(weight, local.shape, *sizes)] * times


def update_messages(counts: Counts, layout: Layout, *, chunks: Iterable[int]) -> Iterator[RepeatedMessage]:
    """Yield every message of the update."""
    cost = find_cost(counts.job.optimizer.kind)
    if cost.elementwise:
        return
    for weights in split_families(list_sharded_weights(counts, layout, chunks=chunks)):
        payloads = cost.payloads(weights)
        (shard_group, axis, pieces_group), n_shards, n_pieces = weights[0].group, weights[0].shards, weights[0].pieces
        if n_shards > 1:
            yield from (
                RepeatedMessage("dp", payloads.collective, 1, size, n_shards, shard_group)
                for size in payloads.over_shards
                if size
            )
        if n_pieces > 1:
            yield from (
                RepeatedMessage(axis, payloads.collective, 1, size, n_pieces, pieces_group)
                for size in payloads.over_pieces
                if size
            )


def update_products(counts: Counts, layout: Layout, *, chunks: Iterable[int]) -> list[Product]:
    """Return the update's matrix products on the first rank, which has the largest matrix of every round."""
    cost = find_cost(counts.job.optimizer.kind)
    if cost.elementwise:
        return []
    weight_families = split_families(list_sharded_weights(counts, layout, chunks=chunks))
    return [product for family in weight_families for product in cost.products(family)]


def update_flops(counts: Counts, layout: Layout) -> int:
    """Return the FLOPs of the update over all ranks.

    Each matrix counts once per group of shards and pieces, repeated by every replica.
    """
    cost = find_cost(counts.job.optimizer.kind)
    ranks = layout.dp * layout.cp * layout.tp
    total = 0
    if cost.elementwise:
        return 0
    for held in list_stages(layout):
        for sharded_weight in list_sharded_weights(counts, layout, chunks=held):
            flops = sum(product.flops for product in cost.weight_products(sharded_weight))
            total += ranks // (sharded_weight.shards * sharded_weight.pieces) * flops
    return total


def list_stages(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Return the stages of each pipeline rank, which do not depend on the number of micro-batches."""
    if layout.pp == 1:
        return ((0,),)
    micro_batches = layout.pp * max(2, layout.pipeline.min_rounds)
    return schedule(layout.schedule, pp=layout.pp, v=layout.v, micro_batches=micro_batches).rank_stages


def count_scratch_bytes(counts: Counts, layout: Layout, *, chunks: Iterable[int]) -> int:
    """Return the peak bytes that the update holds in addition to states and gradients."""
    cost = find_cost(counts.job.optimizer.kind)
    return cost.scratch_bytes(list_sharded_weights(counts, layout, chunks=chunks), counts.job)

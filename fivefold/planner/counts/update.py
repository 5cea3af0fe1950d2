"""Messages, FLOPs and temporary bytes of the optimizer's update on a stage's first rank.

Costs of each optimizer are in ``optimizers/costs/``, implementations in ``trainer/optimizers/``, reasons in
docs/explanation/decisions/017 and 020.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fivefold.layout.local_weight import padded_vocab
from fivefold.layout.schedule import schedule
from fivefold.layout.sharding import local_weight
from fivefold.layout.spec import Layout
from fivefold.optimizers.cost import Product, find_cost
from fivefold.optimizers.sharded_weight import ShardedWeight, split_families
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.message import Message


def sharded_weights(counts: Counts, layout: Layout, *, chunks: Iterable[int]) -> Iterator[ShardedWeight]:
    """Yield all weights of the stages ``chunks``, as they are sharded."""
    vocab, work = padded_vocab(counts.model, counts.job, tp=layout.tp), counts.stage_work(layout)
    for chunk in chunks:
        for run, times in work[chunk]:
            for weight in counts.weights(layout, run.name):
                local = local_weight(weight, model=counts.model, layout=layout, vocab=vocab)
                experts = weight.kind.startswith("expert")
                sizes = (layout.expert_shards, layout.etp) if experts else (layout.shards, layout.tp)
                yield from [ShardedWeight(weight, local.shape, *sizes)] * times


def update_messages(counts: Counts, layout: Layout, *, chunks: Iterable[int]) -> Iterator[Message]:
    """Yield every message of the update."""
    cost = find_cost(counts.job.optimizer.kind)
    if cost.elementwise:
        return
    for family in split_families(sharded_weights(counts, layout, chunks=chunks)):
        payloads = cost.payloads(family)
        (shard, axis, pieces), shards, parts = family[0].group, family[0].shards, family[0].pieces
        if shards > 1:
            yield from (
                Message("dp", payloads.collective, 1, size, shards, shard) for size in payloads.over_shards if size
            )
        if parts > 1:
            yield from (
                Message(axis, payloads.collective, 1, size, parts, pieces) for size in payloads.over_pieces if size
            )


def update_products(counts: Counts, layout: Layout, *, chunks: Iterable[int]) -> list[Product]:
    """Return the update's matrix products on the first rank, which has the largest matrix of every round."""
    cost = find_cost(counts.job.optimizer.kind)
    if cost.elementwise:
        return []
    families = split_families(sharded_weights(counts, layout, chunks=chunks))
    return [product for family in families for product in cost.products(family)]


def update_flops(counts: Counts, layout: Layout) -> int:
    """Return the update's FLOPs over all ranks: each matrix once per group of shards and pieces, repeated by every
    replica.
    """
    cost, ranks, total = find_cost(counts.job.optimizer.kind), layout.dp * layout.cp * layout.tp, 0
    if cost.elementwise:
        return 0
    for held in stages_held(layout):
        for cut in sharded_weights(counts, layout, chunks=held):
            flops = sum(product.flops for product in cost.weight_products(cut))
            total += ranks // (cut.shards * cut.pieces) * flops
    return total


def stages_held(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Stages of each pipeline rank; they do not depend on the number of micro-batches."""
    if layout.pp == 1:
        return ((0,),)
    few = layout.pp * max(2, layout.pipeline.min_rounds)
    return schedule(layout.schedule, pp=layout.pp, v=layout.v, micro_batches=few).rank_stages


def scratch_bytes(counts: Counts, layout: Layout, *, chunks: Iterable[int]) -> int:
    """Return the peak bytes that the update holds next to states and gradients."""
    cost = find_cost(counts.job.optimizer.kind)
    return cost.scratch_bytes(sharded_weights(counts, layout, chunks=chunks), counts.job)

"""Placement of weights on ranks: builds the ZeRO units of one rank's stages and attaches them to their modules.

stage → embedding, blocks, head → dense and expert weights in separate units → tp, ep, etp slices → shards over dp·cp
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from fivefold.job import SCALED_ELEMENTS, Job, Recipe
from fivefold.layout.local_weight import RankCoordinate, find_local_slice, pad_vocab
from fivefold.layout.schedule.action import list_parts
from fivefold.layout.schedule.table import Table
from fivefold.layout.sharding import (
    POLICIES,
    FsdpUnit,
    find_extra_reduce_axis,
    get_policy,
    list_units,
    reduces_every_micro_batch,
    select_trained,
)
from fivefold.layout.spec import Layout
from fivefold.layout.stages import find_first_backward_layer, list_stage_layers
from fivefold.model.spec import Model
from fivefold.model.weight import is_gemm_weight, is_quantized
from fivefold.model.weights import Weight
from fivefold.trainer.model.embed_lora import AdaptedTable
from fivefold.trainer.model.linear import WgradStore
from fivefold.trainer.model.precision import Dtypes
from fivefold.trainer.model.transformer import Transformer
from fivefold.trainer.parallel.fp8_gather import Payload, Scales
from fivefold.trainer.parallel.gradients import ExtraReduce, Gradients, InFlightReduction
from fivefold.trainer.parallel.mesh import AxisGroup, Ranks
from fivefold.trainer.parallel.shard import LocalWeight, WeightShard
from fivefold.trainer.parallel.zero import ZeroUnit, attach


@dataclass(frozen=True)
class ShardPlacement:
    """Builder of this rank's ZeRO units for ``module``, under one model, layout, job and schedule table.

    ``wgrad_store``: holds deferred weight gradients; ``in_flight_reduction``: the reduction in flight of the units.
    """

    module: Transformer
    model: Model
    layout: Layout
    job: Job
    ranks: Ranks
    table: Table
    wgrad_store: WgradStore
    in_flight_reduction: InFlightReduction

    def units(self) -> list[ZeroUnit]:
        """Build all units of this rank, in the order of its stages; allocates their parameters, not initialized."""
        rank_stages = self.table.rank_stages[self.ranks["pp"].rank]
        layers = list_stage_layers(self.model, self.layout)
        last = self.table.stages - 1
        zero_units = list[ZeroUnit]()
        embedding, *blocks, head = list_units(self.model, self.job)
        backwards = self._count_backwards()
        both_ends = {0, last} <= set(rank_stages)
        table: list[ZeroUnit] = []  # the tied embedding's unit, if the head uses it on this rank
        for stage in rank_stages:
            groups = list[list[ZeroUnit]]()  # that are prefetched together
            if stage == 0:
                groups += ([unit] for unit in self._place_embedding(embedding, backwards, both_ends=both_ends))
                table = groups[0] if self.model.shares_table and both_ends else []
            groups += (self._place_block(layer, blocks[layer], backwards[stage]) for layer in layers[stage])
            if stage == last:
                if self.model.shares_table and not both_ends:
                    table = self._zero_units(FsdpUnit("embed", embedding.weights[:1]), backwards[stage])
                    groups.append(table)
                groups += ([unit] for unit in self._place_head(head, backwards[stage], table, both_ends=both_ends))
            _link_prefetch(groups)
            zero_units += (unit for group in groups for unit in group)
        if self.job.precision.gathers == "fp8":
            _use_fp8_gathers(zero_units, self.job.precision)
        return zero_units

    def _place_embedding(self, unit: FsdpUnit, backwards: list[int], *, both_ends: bool) -> list[ZeroUnit]:
        """Build and attach the units of the embedding; ``both_ends``: the head is on this rank too."""
        shares_table, last = self.model.shares_table and both_ends, self.table.stages - 1
        # other passes run between the two gradients of a tied embedding if both its stages are on this rank
        embed = self._zero_units(unit, backwards[0], every_micro_batch=not shares_table or last == 0)
        if shares_table and embed[0].shards and embed[0].shards[0].name == "embed.tokens.weight":
            gradients = embed[0].gradients
            gradients.expected[0] += self._count_uses("embed.tokens.weight") * (
                1 if gradients.every_micro_batch else backwards[last]
            )
        reads_factor = isinstance(self.module.embed.tokens, AdaptedTable)
        keeps_embedding = shares_table or (reads_factor and self.job.stack.reshard == "backward")
        attach(self.module.embed, embed[:1], keep=keeps_embedding, shared=True, backward=reads_factor)
        return embed

    def _place_block(self, layer: int, unit: FsdpUnit, backwards: int) -> list[ZeroUnit]:
        """Build and attach the units of the block of ``layer``."""
        block = self._zero_units(unit, backwards)
        has_post_norm = self.model.get_block(layer) in ("post", "post_sum")
        # a frozen norm has no gradient that ends the backward; AltUp reads the stream before the norm
        ends_at_input = has_post_norm or self.job.freezes_text or self.model.altup is not None
        for zero_unit in block:
            zero_unit.has_backward = layer >= find_first_backward_layer(self.model, self.job)
        keeps_weights = self.job.stack.reshard == "backward"
        attach(self.module.blocks[layer], block, keep=keeps_weights, ends_at_input=ends_at_input)
        return block

    def _place_head(self, unit: FsdpUnit, backwards: int, table: list[ZeroUnit], *, both_ends: bool) -> list[ZeroUnit]:
        """Build the units of the head and attach them with the ``table`` that it shares with the embedding."""
        head = self._zero_units(unit, backwards)
        for zero_unit in (head[0], *([] if both_ends else table)):
            uses_per_weight = [self._count_uses(shard.name) for shard in zero_unit.shards]
            expected = zero_unit.gradients.expected
            expected[:] = [uses * count for uses, count in zip(uses_per_weight, expected, strict=True)]
        # prefetch_direction="": it would prefetch a block otherwise
        frozen, units = self.job.freezes_text, [*head, *table]
        attach(self.module.head, units, keep=True, shared=True, prefetch_direction="", ends_at_input=frozen)
        if table:
            head[0].add_sibling(table[0])
        return head

    def _count_backwards(self) -> list[int]:
        """Return the number of backwards of each stage on this rank per step."""
        row = self.table.rows[self.ranks["pp"].rank]
        backward_stages = [part[1] for action in row for part in list_parts(action) if part[0] == "B"]
        return [backward_stages.count(stage) for stage in range(self.table.stages)]

    def _count_uses(self, name: str) -> int:
        """Return the number of gradients of a weight in one backward of the head.

        The output projection gets one per loss, the embedding table one per multi-token prediction module; these
        gradients do not wait for each other.
        """
        losses, tied = 1 + self.model.mtp_depth, self.model.tied_embeddings
        if name == "embed.tokens.weight":
            return self.model.mtp_depth + tied * losses
        return losses if name.startswith("head.out.") else 1

    def _zero_units(self, unit: FsdpUnit, backwards: int, *, every_micro_batch: bool = True) -> list[ZeroUnit]:
        """Build the ZeRO units of the dense and the expert weights, whose shard groups differ; the first releases both.

        ``every_micro_batch``: whether gradients may be reduced after every backward.
        """
        dense = [weight for weight in unit.weights if not weight.kind.startswith("expert")]
        experts = [weight for weight in unit.weights if weight.kind.startswith("expert")]
        zero_units = [self._zero_unit(dense, backwards, experts=False, every_micro_batch=every_micro_batch)]
        if experts:
            zero_units.append(self._zero_unit(experts, backwards, experts=True, every_micro_batch=every_micro_batch))
            zero_units[0].add_sibling(zero_units[1])
        return zero_units

    def _zero_unit(
        self, every_weight: list[Weight], backwards: int, *, experts: bool, every_micro_batch: bool
    ) -> ZeroUnit:
        """Build the ZeRO unit of ``every_weight``: trained ones have gradients, frozen ones only shards.

        ``backwards``: backward passes per step.
        """
        weights = list(select_trained(FsdpUnit("", tuple(every_weight)), self.job).weights)
        ranks, prefix = self.ranks, "expert_" if experts else ""
        shard, replica = ranks[f"{prefix}shard"], ranks[f"{prefix}replica"]
        sums = list(self._list_extra_reduces(weights))
        vocab = pad_vocab(self.model, self.job, tp=self.layout.tp)
        place = RankCoordinate(ranks["tp"].rank, ranks["ep"].rank, ranks["etp"].rank)

        def make_local(weight: Weight) -> LocalWeight:
            piece = find_local_slice(weight, model=self.model, layout=self.layout, vocab=vocab, place=place)
            if weight in weights:
                copies = _count_late_copies(weights.index(weight), sums)
            else:  # both ends of the pipeline hold a frozen table
                copies = 2 if weight.name == "embed.tokens.weight" and self._is_table_shared() else 1
            return LocalWeight(weight, piece, piece.holders * replica.size * copies)

        shards = [WeightShard(make_local(weight), axis=shard) for weight in weights]
        dtypes = Dtypes(self.job.precision)
        zero_policy = get_policy(self.layout, self.job) if shard.size > 1 else POLICIES[0]
        base, frozen_axis, frozen_copies = self.job.base_format, shard, 1
        if zero_policy.weights_stay:  # frozen weights that stay gathered are on every rank
            frozen_axis, frozen_copies = AxisGroup(shard.name, 0, shard.ranks[:1], None), shard.size
        frozen = [
            WeightShard(
                local._replace(holders=local.holders * frozen_copies),
                axis=frozen_axis,
                stored=base if is_quantized(local.weight, base) else None,
            )
            for local in (make_local(weight) for weight in every_weight if weight not in weights)
        ]
        every_micro_batch &= not zero_policy.gradients_stay and reduces_every_micro_batch(self.layout, self.job)
        overlaps = "dp" in self.job.stack.overlap and ranks.streams
        gradients = Gradients(
            shards,
            shard=shard,
            replica=replica,
            sums=sums,
            keeps_full_gradients=zero_policy.gradients_stay,
            every_micro_batch=every_micro_batch,
            dtype=dtypes.summed,
            device=ranks.device,
            in_flight_reduction=self.in_flight_reduction if overlaps else None,
        )
        gradients.repeat(backwards, before=1)
        defers_gradients = every_micro_batch and any(
            is_gemm_weight(weight) or self._defers_head(weight) for weight in weights
        )
        return ZeroUnit(
            self.module,
            shards,
            gradients,
            frozen=frozen,
            shard=shard,
            policy=zero_policy,
            dtypes=dtypes,
            device=ranks.device,
            prefetches=overlaps,
            wgrad_store=self.wgrad_store if defers_gradients else None,
            offloads="optimizer" in self.layout.list_offloaded(self.job),
        )

    def _defers_head(self, weight: Weight) -> bool:
        """Return whether the weight is part of the head, whose matrix gradient zero-bubble schedules defer."""
        return weight.name.startswith("head.") and not self.job.stack.loss_facts.chunked

    def _list_extra_reduces(self, weights: list[Weight]) -> Iterator[ExtraReduce]:
        """Yield the reductions in addition to data parallelism's.

        They are for weights replicated over tp or kv, for the two copies of a stage in DualPipe, and for tied
        embeddings.
        """
        weight_axes = [find_extra_reduce_axis(weight, model=self.model, layout=self.layout) for weight in weights]
        for axis_name in ("tp", "kv"):
            chosen = tuple(index for index, weight_axis in enumerate(weight_axes) if weight_axis == axis_name)
            if chosen:
                yield ExtraReduce(self.ranks[axis_name], chosen)
        if "twin" in self.ranks.axes:
            yield ExtraReduce(self.ranks["twin"], tuple(range(len(weights))), runs_at_step_end=True)
        elif self._is_table_shared() and weights and weights[0].name == "embed.tokens.weight":
            yield ExtraReduce(self.ranks["pp_tie"], (0,), runs_at_step_end=True)

    def _is_table_shared(self) -> bool:
        """Return whether first and last stage of a tied model are on two ranks, one of them this one."""
        ends = [
            rank
            for rank, rank_stages in enumerate(self.table.rank_stages)
            if {0, self.table.stages - 1} & set(rank_stages)
        ]
        return self.model.shares_table and len(ends) == 2 and self.ranks["pp"].rank in ends


def _count_late_copies(index: int, sums: list[ExtraReduce]) -> int:
    """Return the number of ranks of other pipeline stages that also hold the weight ``index`` of a unit."""
    return prod(
        extra_reduce.axis.size
        for extra_reduce in sums
        if extra_reduce.runs_at_step_end and index in extra_reduce.weights
    )


def _use_fp8_gathers(units: list[ZeroUnit], recipe: Recipe) -> None:
    """Set up fp8 all-gathers for all units of this rank; units of one shard group share one all_reduce of scales."""
    block = SCALED_ELEMENTS.get(recipe.scaling, 0)
    scales_by_group: dict[str, Scales] = {}
    for unit in units:
        if (unit.shard.size > 1 or recipe.holds_casts) and any(
            is_gemm_weight(shard.local_weight.weight) for shard in unit.shards
        ):
            new_scales = Scales(unit.shard, block=block, dtype=unit.dtypes.weights, device=unit.device)
            unit.payload = Payload(unit.shards, scales_by_group.setdefault(unit.shard.name, new_scales))


def _link_prefetch(groups: list[list[ZeroUnit]]) -> None:
    """Link each group of a stage's units to the one to prefetch next, forward and backward.

    The dense and expert weights of a block are one group, as both are gathered before it begins. Nothing is prefetched
    for the embedding's backward.
    """
    for before, after in pairwise(groups):
        before[0].neighbours["forward"] = after
        if before[0].has_backward and not (*before[0].shards, *before[0].frozen)[0].name.startswith("embed.tokens"):
            after[0].neighbours["backward"] = before

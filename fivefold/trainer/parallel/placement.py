"""Which weights lie on which rank: builds the ZeRO units of one rank's stages and attaches them to their modules.

stage → embedding, blocks, head → dense and expert weights in separate units → tp, ep, etp slices → shards over dp·cp
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from fivefold.job import SCALED_ELEMENTS, Job, Recipe
from fivefold.layout.local_weight import RankCoordinate, local_slice, padded_vocab
from fivefold.layout.schedule.action import parts
from fivefold.layout.schedule.table import Table
from fivefold.layout.sharding import POLICIES, Unit, extra_reduce_axis, multiplies, policy, reduces_each, units
from fivefold.layout.spec import Layout
from fivefold.layout.stages import stage_layers
from fivefold.model.spec import Model
from fivefold.model.weights import Weight
from fivefold.trainer.model.linear import WgradStore
from fivefold.trainer.model.precision import Dtypes
from fivefold.trainer.model.transformer import Transformer
from fivefold.trainer.parallel.fp8_gather import Payload, Scales
from fivefold.trainer.parallel.gradients import ExtraReduce, Gradients, Underway
from fivefold.trainer.parallel.mesh import Ranks
from fivefold.trainer.parallel.shard import LocalWeight, Shard
from fivefold.trainer.parallel.zero import ZeroUnit, attach


@dataclass(frozen=True)
class Placement:
    """Builds the ZeRO units of this rank for ``module``, under one model, layout, job and schedule table.

    ``wgrad_store``: where weight gradients are deferred; ``underway``: of the units' reductions.
    """

    module: Transformer
    model: Model
    layout: Layout
    job: Job
    ranks: Ranks
    table: Table
    wgrad_store: WgradStore
    underway: Underway

    def units(self) -> list[ZeroUnit]:
        """Build all units of this rank, in the order of its stages; allocates their parameters, not initialised."""
        held, layers = self.table.rank_stages[self.ranks["pp"].rank], stage_layers(self.model.layers, self.layout)
        last, whole, made = self.table.stages - 1, units(self.model), list[ZeroUnit]()
        backwards = self._backwards()
        both_ends = {0, last} <= set(held)
        table: list[ZeroUnit] = []  # the tied embedding's unit, if the head uses it here
        for stage in held:
            found = list[ZeroUnit]()
            if stage == 0:
                shares = self.model.shares_table and both_ends
                # other passes lie between the two gradients of a table whose ends are two stages of this rank
                found += self._zero_units(whole[0], backwards[0], each=not shares or last == 0)
                if shares:
                    table = found[:1]
                    gradients = table[0].gradients
                    gradients.expected[0] += self._uses("embed.tokens.weight") * (
                        1 if gradients.each else backwards[last]
                    )
                attach(self.module.embed, found[:1], keep=bool(table), shared=True, backward=False)
            for layer in layers[stage]:
                block = self._zero_units(whole[1 + layer], backwards[stage])
                stays, post = self.job.stack.reshard == "backward", self.model.block == "post"
                attach(self.module.blocks[layer], block, keep=stays, by_entry=post)
                found += block
            if stage == last:
                head = self._zero_units(whole[-1], backwards[stage])
                if self.model.shares_table and not both_ends:
                    table = self._zero_units(Unit("embed", whole[0].weights[:1]), backwards[stage])
                    found += table
                for unit in (head[0], *([] if both_ends else table)):
                    times = [self._uses(shard.name) for shard in unit.shards]
                    expected = unit.gradients.expected
                    expected[:] = [many * each for many, each in zip(times, expected, strict=True)]
                # onward: else it fetches a block
                attach(self.module.head, [*head, *table], keep=True, shared=True, onward="")
                if table:
                    head[0].add_mate(table[0])
                found += head
            _link_prefetch(found)
            made += found
        if self.job.precision.gathers == "fp8":
            _use_fp8_gathers(made, self.job.precision)
        return made

    def _backwards(self) -> list[int]:
        """Number of backwards of each stage on this rank per step."""
        row = self.table.rows[self.ranks["pp"].rank]
        done = [part[1] for action in row for part in parts(action) if part[0] == "B"]
        return [done.count(stage) for stage in range(self.table.stages)]

    def _uses(self, name: str) -> int:
        """Gradients of a weight in one backward of the head: one per loss of the output projection's, and one per
        module of multi-token prediction of the table's, whose gradients do not wait for each other."""
        losses, tied = 1 + self.model.predicted, self.model.tied_embeddings
        if name == "embed.tokens.weight":
            return self.model.predicted + tied * losses
        return losses if name.startswith("head.out.") else 1

    def _zero_units(self, unit: Unit, backwards: int, *, each: bool = True) -> list[ZeroUnit]:
        """ZeRO units of the dense and the expert weights, whose shard groups differ; the first releases both.

        ``each``: whether gradients may be reduced after every backward.
        """
        dense = [weight for weight in unit.weights if not weight.kind.startswith("expert")]
        experts = [weight for weight in unit.weights if weight.kind.startswith("expert")]
        made = [self._zero_unit(dense, backwards, experts=False, each=each)]
        if experts:
            made.append(self._zero_unit(experts, backwards, experts=True, each=each))
            made[0].add_mate(made[1])
        return made

    def _zero_unit(self, weights: list[Weight], backwards: int, *, experts: bool, each: bool) -> ZeroUnit:
        ranks, prefix = self.ranks, "expert_" if experts else ""
        shard, replica = ranks[f"{prefix}shard"], ranks[f"{prefix}replica"]
        sums = list(self._extra_reduces(weights))
        vocab = padded_vocab(self.model, self.job, tp=self.layout.tp)
        place = RankCoordinate(ranks["tp"].rank, ranks["ep"].rank, ranks["etp"].rank)
        pieces = [local_slice(w, model=self.model, layout=self.layout, vocab=vocab, place=place) for w in weights]
        held = [
            LocalWeight(weight, piece, piece.holders * replica.size * _late_copies(index, sums))
            for index, (weight, piece) in enumerate(zip(weights, pieces, strict=True))
        ]
        shards, dtypes = [Shard(each, axis=shard) for each in held], Dtypes(self.job.precision)
        keeps = policy(self.layout, self.job) if shard.size > 1 else POLICIES[0]
        each = each and not keeps.gradients_stay and reduces_each(self.layout, self.job)
        ahead = "dp" in self.job.stack.overlap and ranks.streams
        gradients = Gradients(
            shards, shard=shard, replica=replica, sums=sums, stay=keeps.gradients_stay, each=each,
            dtype=dtypes.summed, device=ranks.device, underway=self.underway if ahead else None,
        )  # fmt: skip
        gradients.repeat(backwards, before=1)
        waits = each and any(multiplies(weight) or self._defers_head(weight) for weight in weights)
        return ZeroUnit(
            self.module, shards, gradients, shard=shard, policy=keeps, dtypes=dtypes, device=ranks.device,
            ahead=ahead, late=self.wgrad_store if waits else None,
        )  # fmt: skip

    def _defers_head(self, weight: Weight) -> bool:
        """Whether the weight is of the head, whose matrix' gradient zero-bubble schedules defer."""
        return weight.name.startswith("head.") and self.job.stack.loss != "chunked"

    def _extra_reduces(self, weights: list[Weight]) -> Iterator[ExtraReduce]:
        """Reduces beside data parallelism: weights replicated over tp or kv, DualPipe twins, tied embeddings."""
        kinds = [extra_reduce_axis(weight, model=self.model, layout=self.layout) for weight in weights]
        for kind in ("tp", "kv"):
            chosen = tuple(index for index, found in enumerate(kinds) if found == kind)
            if chosen:
                yield ExtraReduce(self.ranks[kind], chosen)
        if "twin" in self.ranks.axes:
            yield ExtraReduce(self.ranks["twin"], tuple(range(len(weights))), late=True)
        elif self._table_is_shared() and weights[0].name == "embed.tokens.weight":
            yield ExtraReduce(self.ranks["pp_tie"], (0,), late=True)

    def _table_is_shared(self) -> bool:
        """Whether first and last stage of a tied model lie on two ranks, one of them this one."""
        ends = [rank for rank, held in enumerate(self.table.rank_stages) if {0, self.table.stages - 1} & set(held)]
        return self.model.shares_table and len(ends) == 2 and self.ranks["pp"].rank in ends


def _late_copies(index: int, sums: list[ExtraReduce]) -> int:
    """How many ranks of other pipeline stages hold the weight ``index`` of a unit too."""
    return prod(also.axis.size for also in sums if also.late and index in also.weights)


def _use_fp8_gathers(units: list[ZeroUnit], recipe: Recipe) -> None:
    """Set up fp8 all_gathers for all units of this rank; units of one shard group share one all_reduce of scales."""
    block = SCALED_ELEMENTS.get(recipe.scaling, 0)
    found: dict[str, Scales] = {}
    for unit in units:
        if (unit.shard.size > 1 or recipe.holds_casts) and any(
            multiplies(shard.local_weight.weight) for shard in unit.shards
        ):
            new = Scales(unit.shard, block=block, dtype=unit.dtypes.weights, device=unit.device)
            unit.payload = Payload(unit.shards, found.setdefault(unit.shard.name, new))


def _link_prefetch(units: list[ZeroUnit]) -> None:
    """Link each unit of a stage to the one to prefetch next, forward and backward (not the embedding's backward)."""
    for before, after in pairwise(units):
        before.neighbours["forward"] = after
        if before.shards[0].name != "embed.tokens.weight":
            after.neighbours["backward"] = before

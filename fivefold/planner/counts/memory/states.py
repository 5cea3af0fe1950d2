"""Bytes of weights, gradients and optimizer states of one unit (embedding, block, head) on one rank.

    states = weights + gradients + optimizer, each unsharded or 1/S by the ZeRO stage (docs/notation.md §2)

Dense weights are sharded over the shard group of dp·cp, experts over the ranks that hold the same experts.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from fivefold.job import SCALED_ELEMENTS, Job, Recipe
from fivefold.layout.local_weight import padded_vocab
from fivefold.layout.sharding import Unit, local_weight, multiplies, padded_numel, policy, shard_numel
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.model.weights import Weight
from fivefold.optimizers.cost import find_cost
from fivefold.units import ceil_div
from fivefold.update import quantised


class UnitStates(NamedTuple):
    """Bytes of one unit's states on the first rank, and of the buffers of its all-gather."""

    whole: int = 0  # gathered (unsharded) weights
    apart: int = 0  # this rank's weights or masters outside of the gathered ones
    sums: int = 0  # unsharded gradients
    reduced: int = 0  # this rank's shard of them, if it is another buffer
    moments: int = 0
    travel: int = 0  # buffers of the all-gather: output, and input if it is a copy
    updated: int = 0  # elements that this rank's optimizer updates

    def __add__(self, other: UnitStates) -> UnitStates:  # type: ignore[override]
        return UnitStates._make(mine + theirs for mine, theirs in zip(self, other, strict=True))


def local_units(weights: Iterable[Weight], *, model: Model, layout: Layout, job: Job) -> tuple[Unit, ...]:
    """Dense and expert weights of one rank of tp, ep and etp; the head's copy of a tied table in a pipeline is a unit
    of its own.
    """
    vocab = padded_vocab(model, job, tp=layout.tp)
    local = [local_weight(weight, model=model, layout=layout, vocab=vocab) for weight in weights]
    experts = Unit("experts", tuple(weight for weight in local if weight.kind.startswith("expert")))
    table = tuple(weight for weight in local if weight.name.startswith("embed."))
    dense = tuple(weight for weight in local if weight not in table and not weight.kind.startswith("expert"))
    return (*(Unit("dense", each) for each in (dense, table) if each), *([experts] if experts.weights else ()))


def sharded(unit: Unit, layout: Layout) -> tuple[Unit, int, int]:
    """A unit with its number of shards and of replicas of the shard group."""
    if unit.name == "experts":
        return unit, layout.expert_shards, layout.expert_replicas // layout.expert_shards
    return unit, layout.shards, layout.dp * layout.cp // layout.shards


def part_states(unit: Unit, *, uncut: Iterable[Weight], shards: int, layout: Layout, job: Job) -> UnitStates:
    """States of one part (dense, experts) of a unit on the rank with the largest shards; ``uncut``: the unit's weights
    as no rank has cut them. Of ``layout`` only the ZeRO stage matters, whether it shards, and whether it has stages.
    """
    narrow = frozenset(each.name for each in uncut if quantised(each.numel, vector=each.is_vector))  # if moments scale
    recipe, keeps = job.precision, policy(layout, job)
    padded = padded_numel(unit, shards=shards)
    own, whole = padded // shards, held_bytes(unit, shards=shards, recipe=recipe)
    stays = shards == 1 and not keeps.weights_stay  # experts without replicas are never freed
    casts = recipe.gathers == "fp8" and any(map(multiplies, unit.weights))
    beside = shards > 1 and layout.zero == 2 and job.stack.shards == "beside"
    apart = casts or beside or not recipe.sends_masters or not (keeps.weights_stay or stays)
    sent_is_copy = casts or not (apart and recipe.sends_masters)
    travel = (
        0
        if shards == 1 and not recipe.holds_casts
        else _travel(unit, shards=shards, recipe=recipe, copied=sent_is_copy)
    )
    moments = find_cost(job.optimizer.kind).state_bytes(unit.weights, shards=shards, quantised=narrow, job=job)
    if updates_one(layout, job):
        moments -= 4 * len(unit.weights)
    offloaded = "optimizer" in layout.offloads(job)
    here = recipe.updated_bytes if apart else 0  # per element of this rank's shard
    if offloaded:  # the shard to gather from stays on the device (DeepSpeed's offload_optimizer)
        here = 0 if keeps.weights_stay or stays else recipe.wide_bytes
    return UnitStates(
        whole=0 if stays else whole,
        apart=own * here + (whole if stays else 0),
        sums=padded * recipe.summed_bytes,
        reduced=0 if keeps.gradients_stay else own * recipe.summed_bytes,
        moments=0 if offloaded else moments,
        travel=travel,
        updated=own,
    )


def updates_one(layout: Layout, job: Job) -> bool:
    """Return whether this rank's part of all weights is updated as one tensor, with one step count."""
    joins = job.stack.reduce_bucket > 0 and layout.zero > 0 and find_cost(job.optimizer.kind).updates_flat_buffer
    return joins and "optimizer" not in layout.offloads(job)


def held_bytes(unit: Unit, *, shards: int, recipe: Recipe) -> int:
    """Bytes of a unit's gathered weights as they are held, padding included."""
    if recipe.holds_casts:
        return gathered_bytes(unit, shards=shards, recipe=recipe)
    return padded_numel(unit, shards=shards) * recipe.weights_bytes


def gathered_bytes(unit: Unit, *, shards: int, recipe: Recipe) -> int:
    """Bytes of the all-gather of a unit's weights: ``shards`` equal shards, padding included."""
    wide = recipe.wide_bytes
    widths = [1 if recipe.gathers == "fp8" and multiplies(weight) else wide for weight in unit.weights]
    sizes = (shard_numel(weight, shards=shards) for weight in unit.weights)
    return shards * sum(size * width for size, width in zip(sizes, widths, strict=True))


def _travel(unit: Unit, *, shards: int, recipe: Recipe, copied: bool) -> int:
    """Bytes of the all-gather's output and, if ``copied``, of its input. In fp8 each weight's rows are cast before they
    are copied to the input, while there is no output yet.
    """
    whole = gathered_bytes(unit, shards=shards, recipe=recipe)
    if recipe.gathers != "fp8" or not any(map(multiplies, unit.weights)):
        return 0 if shards == 1 else whole + (whole // shards if copied else 0)
    sizes = [shard_numel(weight, shards=shards) for weight in unit.weights if multiplies(weight)]
    received = whole if shards > 1 else 0
    return whole // shards + max(received, max(sizes, default=0) * (recipe.wide_bytes + 1))


def count_scales(weight: Weight, recipe: Recipe) -> int:
    """Return the number of scales of a matrix that is gathered in fp8."""
    *experts, rows, columns = weight.shape
    block = SCALED_ELEMENTS.get(recipe.scaling)
    return prod(experts) * (ceil_div(rows, block) * ceil_div(columns, block) if block else 1)

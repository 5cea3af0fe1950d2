"""The layers of each pipeline stage.

    stage 0: embedding + layers   stage 1: layers   ...   last stage: layers + head

Layers are split evenly. If the stages do not divide the layers, middle stages take one more each before the two ends
do, which also hold embedding and head. With one or two stages more than layers, the last stage has only the head, and
the first only the embedding, as in Llama 3 405B (arXiv:2407.21783 §3.3.2). Where a layer adds what the one before it
lends, or attends to keys of an earlier one, both are in one stage: parts of layers are split so
(``Model.stage_parts``).

A stage is on pipeline rank ``stage mod pp``; if the schedule is V-shaped, every second round of stages runs backwards
over the ranks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, islice

from fivefold.job import Job
from fivefold.layout.spec import Layout, list_divisors
from fivefold.model.spec import Model
from fivefold.model.weights import find_first_adapted, resolve_freeze


def list_stage_layers(model: Model, layout: Layout) -> tuple[range, ...]:
    """Return the layers of each of the pp·v stages, in the order of the model."""
    return _cut(layout.stages or distribute_parts(model.stage_parts, layout.pp * layout.v))


def count_stage_parts(model: Model, layout: Layout) -> list[int]:
    """Return the parts of the model (``Model.stage_parts``) on each of the pp·v stages."""
    starts = list(accumulate(model.stage_parts, initial=0))[:-1]
    stages = list_stage_layers(model, layout)
    return [bisect_left(starts, layers.stop) - bisect_left(starts, layers.start) for layers in stages]


def find_first_backward_stage(model: Model, layout: Layout, job: Job) -> int:
    """Return the first stage with a trained weight; adapters or frozen parts may leave none in those below."""
    if not job.freezes_text or trains_embedding(model, job):
        return 0
    first_layer = find_first_backward_layer(model, job)
    return sum(layers.stop <= first_layer for layers in list_stage_layers(model, layout))


def find_first_backward_layer(model: Model, job: Job) -> int:
    """Return the lowest layer with a backward: the first with a trained weight, or 0 if the embedding is trained."""
    if job.adapter is None:
        return resolve_freeze(model, job.freeze).first_backward
    return 0 if job.adapter.trains_embedding else find_first_adapted(model, job.adapter)


def trains_embedding(model: Model, job: Job) -> bool:
    """Tell whether the embedding is trained, so that all layers have a backward."""
    if job.adapter is None:
        return resolve_freeze(model, job.freeze).trains_embedding
    return job.adapter.trains_embedding


def list_virtual_stages(model: Model, *, pp: int, most: int) -> list[int]:
    """Return numbers above 1 of stages on each of ``pp`` pipeline ranks, for ``most`` stages or fewer.

    They are divisors of the layers per rank, rounded up or down, and those that leave an end without layers. Layers
    that are in one stage count as one.
    """
    layers = len(model.stage_parts)
    sizes = {*list_divisors(max(1, layers // pp)), *list_divisors(-(-layers // pp))}
    sizes |= {stages // pp for stages in range(layers + 1, most + 1) if stages % pp == 0}
    return sorted(v for v in sizes if v > 1 and pp * v <= most)


@lru_cache(maxsize=1024)
def _cut(sizes: tuple[int, ...]) -> tuple[range, ...]:
    """Return the layers of stages of these sizes."""
    return tuple(range(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True))


def list_recomputed_stages(layout: Layout) -> tuple[bool, ...]:
    """Tell for each of the pp·v stages whether it is recomputed; ``ac=`` may name the first N pipeline ranks."""
    stages = layout.pp * layout.v
    if not layout.recomputed_operations or layout.recompute_ranks >= layout.pp:
        return (bool(layout.recomputed_operations),) * stages
    rounds = (divmod(stage, layout.pp) for stage in range(stages))
    is_v_shaped = layout.pipeline.is_v_shaped
    ranks = [layout.pp - 1 - rank if is_v_shaped and round_ % 2 else rank for round_, rank in rounds]
    return tuple(rank < layout.recompute_ranks for rank in ranks)


def list_recomputed_layers(model: Model, layout: Layout) -> tuple[bool, ...]:
    """Tell for each layer whether it is recomputed: in recomputed stages, every n-th layer under ``ac=full/n``."""
    stages = list_recomputed_stages(layout)
    if not any(stages) or (all(stages) and layout.recompute_every == 1):
        return (stages[0],) * model.layers
    return tuple(
        is_recomputed and layer % layout.recompute_every == 0
        for stage, is_recomputed in zip(list_stage_layers(model, layout), stages, strict=True)
        for layer in stage
    )


@lru_cache(maxsize=1024)
def distribute_parts(parts: tuple[int, ...], stages: int) -> tuple[int, ...]:
    """Return the layers of each stage, evenly, where stages are made of ``parts`` of these layers.

    Stages of unequal parts are filled from the last to the first, each until it is nearest to the layers that are left
    for each of the stages that are left.
    """
    counts = distribute_evenly(len(parts), stages)
    if len(set(parts)) > 1 and len(parts) > stages:
        counts = _fill_stages(parts, stages)
    return sum_parts(parts, counts)


def sum_parts(parts: Sequence[int], counts: Iterable[int]) -> tuple[int, ...]:
    """Return the layers of stages that have ``counts`` of the ``parts`` of a model, in order."""
    remaining = iter(parts)
    return tuple(sum(islice(remaining, count)) for count in counts)


def _fill_stages(parts: tuple[int, ...], stages: int) -> tuple[int, ...]:
    """Return the number of ``parts`` of each stage, of which each has one or more."""
    counts = list[int]()
    remaining, layers = list(parts), sum(parts)
    for earlier in reversed(range(stages)):  # the stages before this one
        size, mean = remaining.pop(), layers / (earlier + 1)
        counts.append(1)
        while len(remaining) > earlier and (not earlier or remaining[-1] < 2 * (mean - size)):
            size += remaining.pop()
            counts[-1] += 1
        layers -= size
    return tuple(reversed(counts))


@lru_cache(maxsize=1024)
def distribute_evenly(layers: int, stages: int) -> tuple[int, ...]:
    """Return the layers of each stage, of which the ends have the fewest."""
    layers_per_stage, remainder = divmod(layers, stages)
    stage_priority = [*range(1, stages - 1), 0, stages - 1] if stages > 2 else list(range(stages))
    larger_stages = set(stage_priority[:remainder])
    return tuple(layers_per_stage + (stage in larger_stages) for stage in range(stages))

"""The layers of each pipeline stage.

    stage 0: embedding + layers   stage 1: layers   ...   last stage: layers + head

Layers are split evenly. If the stages do not divide the layers, middle stages take one more each before the two ends
do, which also hold embedding and head.

A stage is on pipeline rank ``stage mod pp``; if the schedule is V-shaped, every second round of stages runs backwards
over the ranks.
"""

from __future__ import annotations

from fivefold.layout.spec import Layout


def stage_layers(layers: int, layout: Layout) -> tuple[range, ...]:
    """Return the layers of each of the pp·v stages, in the order of the model."""
    sizes = layout.stages or _distribute_evenly(layers, layout.pp * layout.v)
    starts = [sum(sizes[:stage]) for stage in range(len(sizes))]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))


def recomputed_stages(layout: Layout) -> tuple[bool, ...]:
    """Tell for each of the pp·v stages whether its layers are recomputed, by the pipeline ranks in ``ac=``."""
    ranks = (divmod(stage, layout.pp) for stage in range(layout.pp * layout.v))
    back = layout.pipeline.places_v
    places = [layout.pp - 1 - place if back and turn % 2 else place for turn, place in ranks]
    return tuple(bool(layout.recomputed_operations) and place < layout.recompute_ranks for place in places)


def recomputed_layers(layers: int, layout: Layout) -> tuple[bool, ...]:
    """Tell for each layer whether it is recomputed: in recomputed stages, every n-th layer under ``ac=full/n``."""
    return tuple(
        is_recomputed and layer % layout.recompute_every == 0
        for stage, is_recomputed in zip(stage_layers(layers, layout), recomputed_stages(layout), strict=True)
        for layer in stage
    )


def _distribute_evenly(layers: int, stages: int) -> tuple[int, ...]:
    layers_per_stage, remainder = divmod(layers, stages)
    stage_priority = [*range(1, stages - 1), 0, stages - 1] if stages > 2 else list(range(stages))
    larger_stages = set(stage_priority[:remainder])
    return tuple(layers_per_stage + (stage in larger_stages) for stage in range(stages))

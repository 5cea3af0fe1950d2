"""Which layers each pipeline stage holds.

    stage 0: embedding + layers   stage 1: layers   ...   last stage: layers + head

Split evenly; if the stages do not divide the layers, middle stages take one more each before the two ends do, which
also hold embedding and head.

A stage is on pipeline rank ``stage mod pp``; where the schedule is V-shaped, every second turn goes backwards.
"""

from __future__ import annotations

from fivefold.layout.spec import Layout


def stage_layers(layers: int, layout: Layout) -> tuple[range, ...]:
    """The layers of each of the pp·v stages, in the order of the model."""
    sizes = layout.stages or _even(layers, layout.pp * layout.v)
    starts = [sum(sizes[:stage]) for stage in range(len(sizes))]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))


def recomputed_stages(layout: Layout) -> tuple[bool, ...]:
    """Whether layers of each of the pp·v stages are recomputed, as ``ac=`` names their pipeline rank."""
    ranks = (divmod(stage, layout.pp) for stage in range(layout.pp * layout.v))
    back = layout.pipeline.places_v
    places = [layout.pp - 1 - place if back and turn % 2 else place for turn, place in ranks]
    return tuple(bool(layout.recomputed) and place < layout.recompute_ranks for place in places)


def recomputed_layers(layers: int, layout: Layout) -> tuple[bool, ...]:
    """Whether each layer is recomputed: of the stages that are, every n-th one under ``ac=full/n``."""
    return tuple(
        again and layer % layout.recompute_every == 0
        for stage, again in zip(stage_layers(layers, layout), recomputed_stages(layout), strict=True)
        for layer in stage
    )


def _even(layers: int, stages: int) -> tuple[int, ...]:
    each, more = divmod(layers, stages)
    takers = [*range(1, stages - 1), 0, stages - 1] if stages > 2 else list(range(stages))
    favoured = set(takers[:more])
    return tuple(each + (stage in favoured) for stage in range(stages))

"""Which layers each pipeline stage holds.

    stage 0: embedding + layers   stage 1: layers   ...   last stage: layers + head

Split evenly; if the stages do not divide the layers, middle stages take one more each before the two ends do, which
also hold embedding and head.
"""

from __future__ import annotations

from fivefold.layout.spec import Layout


def stage_layers(layers: int, layout: Layout) -> tuple[range, ...]:
    """The layers of each of the pp·v stages, in the order of the model."""
    sizes = layout.stages or _even(layers, layout.pp * layout.v)
    starts = [sum(sizes[:stage]) for stage in range(len(sizes))]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))


def _even(layers: int, stages: int) -> tuple[int, ...]:
    each, more = divmod(layers, stages)
    takers = [*range(1, stages - 1), 0, stages - 1] if stages > 2 else list(range(stages))
    favoured = set(takers[:more])
    return tuple(each + (stage in favoured) for stage in range(stages))

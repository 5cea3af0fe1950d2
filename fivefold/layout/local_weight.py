"""Which part of a whole weight one rank holds, before ZeRO cuts it; shapes are those of ``sharding.local_weight``.

whole [V, D] over tp 2:  rank 0 holds rows 0..V/2, rank 1 the rest, and zeros where the vocabulary is padded
"""

from __future__ import annotations

from typing import NamedTuple

from fivefold.job import Job
from fivefold.layout.sharding import local_weight
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.model.weights import Weight
from fivefold.units import ceil_div


class RankCoordinate(NamedTuple):
    """Where a rank stands on the axes that cut weights."""

    tp: int = 0
    ep: int = 0
    etp: int = 0


class LocalSlice(NamedTuple):
    """``slices`` of the whole weight lie at the front of a local tensor of ``shape``; what is over is padding.

    ``holders``: ranks of one tensor-parallel group (experts: 1) that hold this same piece.
    """

    shape: tuple[int, ...]
    slices: tuple[slice, ...]
    holders: int

    @property
    def front(self) -> tuple[slice, ...]:
        """Where the slices lie in the local tensor."""
        return tuple(slice(0, part.stop - part.start) for part in self.slices)


def local_slice(weight: Weight, *, model: Model, layout: Layout, vocab: int, place: RankCoordinate) -> LocalSlice:
    """The piece of ``weight`` on the rank at ``place``; ``vocab`` is padded."""
    local = local_weight(weight, model=model, layout=layout, vocab=vocab).shape
    expert = weight.kind.startswith("expert")
    slices, pieces = [], 1
    for dim, (whole, part) in enumerate(zip(weight.shape, local, strict=True)):
        index = 0
        if part < whole and expert:
            index = place.ep if dim == 0 else place.etp
        elif part < whole:  # fewer pieces than ranks: neighbours hold the same one; a vocabulary is padded, not copied
            pieces = layout.tp if whole == model.vocab and part * layout.tp == vocab else whole // part
            index = place.tp * pieces // layout.tp
        start = min(index * part, whole)
        slices.append(slice(start, min(start + part, whole)))
    return LocalSlice(local, tuple(slices), 1 if expert else layout.tp // pieces)


def padded_vocab(model: Model, job: Job, *, tp: int) -> int:
    """The vocabulary, padded so that tp divides it."""
    multiple = job.stack.vocab_multiple * tp
    return ceil_div(model.vocab, multiple) * multiple

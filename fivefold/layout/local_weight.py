"""Which slice of a weight one rank holds under tp, ep and etp, before ZeRO; shapes as in ``sharding.local_weight``.

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
    """A rank's coordinates on the axes that shard weights."""

    tp: int = 0
    ep: int = 0
    etp: int = 0


class LocalSlice(NamedTuple):
    """``slices`` of the whole weight fill the front of a local tensor of ``shape``; the rest is padding.

    ``holders``: how many ranks of one tp group (experts: etp group) hold this same slice.
    """

    shape: tuple[int, ...]
    slices: tuple[slice, ...]
    holders: int

    @property
    def front(self) -> tuple[slice, ...]:
        """Slices of the local tensor that hold data, without padding."""
        return tuple(slice(0, part.stop - part.start) for part in self.slices)


def local_slice(weight: Weight, *, model: Model, layout: Layout, vocab: int, place: RankCoordinate) -> LocalSlice:
    """The slice of ``weight`` on the rank at ``place``; ``vocab``: padded size."""
    local = local_weight(weight, model=model, layout=layout, vocab=vocab).shape
    expert = weight.kind.startswith("expert")
    slices, pieces = [], 1
    whole = expert and local[1:] == weight.shape[1:]  # over etp: the biases of ``down``
    for dim, (size, part) in enumerate(zip(weight.shape, local, strict=True)):
        index = 0
        if part < size and expert:
            index = place.ep if dim == 0 else place.etp
        elif part < size:  # fewer slices than ranks: neighbours hold copies; a vocabulary is padded instead
            pieces = layout.tp if size == model.vocab and part * layout.tp == vocab else size // part
            index = place.tp * pieces // layout.tp
        start = min(index * part, size)
        slices.append(slice(start, min(start + part, size)))
    holders = (layout.etp if whole else 1) if expert else layout.tp // pieces
    return LocalSlice(local, tuple(slices), holders)


def padded_vocab(model: Model, job: Job, *, tp: int) -> int:
    """Vocabulary size padded to a multiple of ``stack.vocab_multiple`` · tp."""
    multiple = job.stack.vocab_multiple * tp
    return ceil_div(model.vocab, multiple) * multiple

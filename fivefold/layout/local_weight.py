"""The slice of a weight that one rank holds under tp, ep and etp, before ZeRO; shapes as in ``sharding.shard_weight``.

full [V, D] over tp 2:  rank 0 holds rows 0..V/2, rank 1 the rest, and zeros where the vocabulary is padded
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from fivefold.job import Job
from fivefold.layout.sharding import shard_weight
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.model.weights import Weight
from fivefold.units import ceil_div


class RankCoordinate(NamedTuple):
    """The coordinates of a rank on the axes that shard weights."""

    tp: int = 0
    ep: int = 0
    etp: int = 0


Slices = tuple[slice, ...]  # of each dim of a tensor


class LocalSlice(NamedTuple):
    """A slice of a weight in a local tensor of ``shape``, padded at its end.

    ``parts``: slices of the full weight that follow one another along dim 0 of the local tensor; several of a weight
    whose parts are sharded each for itself. ``holders``: the number of ranks of one tp group (experts: etp group) that
    hold this slice.
    """

    shape: tuple[int, ...]
    parts: tuple[Slices, ...]
    holders: int

    def list_slices(self) -> Iterator[tuple[Slices, Slices]]:
        """Yield the slices of each part: of the full weight, and of the local tensor."""
        first = 0
        for part in self.parts:
            rows, *other_sizes = (size.stop - size.start for size in part)
            yield part, (slice(first, first + rows), *(slice(0, size) for size in other_sizes))
            first += rows


def find_local_slice(weight: Weight, *, model: Model, layout: Layout, vocab: int, place: RankCoordinate) -> LocalSlice:
    """Return the slice of ``weight`` on the rank at ``place``; ``vocab``: padded vocabulary size."""
    local = shard_weight(weight, model=model, layout=layout, vocab=vocab).shape
    is_expert = weight.kind.startswith("expert")
    slices, pieces = [], 1
    is_replicated = is_expert and local[1:] == weight.shape[1:]  # replicated over etp: the biases of ``down``
    for dim, (size, local_size) in enumerate(zip(weight.shape, local, strict=True)):
        index = 0
        if local_size < size and is_expert:
            index = place.ep if dim == 0 else place.etp
        elif local_size < size:  # with fewer slices than ranks neighbors hold copies; a vocabulary is padded instead
            pieces = layout.tp if size == model.vocab and local_size * layout.tp == vocab else size // local_size
            index = place.tp * pieces // layout.tp
        start = min(index * local_size, size)
        slices.append(slice(start, min(start + local_size, size)))
    holders = (layout.etp if is_replicated else 1) if is_expert else layout.tp // pieces
    if not weight.parts:
        return LocalSlice(local, (tuple(slices),), holders)
    parts = []
    for first, size in zip(accumulate((0, *weight.parts)), weight.parts, strict=False):
        start, rows = first + place.tp * (size // layout.tp), size // layout.tp
        parts.append((slice(start, start + rows), *slices[1:]))
    return LocalSlice(local, tuple(parts), holders)


def pad_vocab(model: Model, job: Job, *, tp: int) -> int:
    """Return the vocabulary size padded to a multiple of ``stack.vocab_multiple`` · tp."""
    multiple = job.stack.vocab_multiple * tp
    return ceil_div(model.vocab, multiple) * multiple

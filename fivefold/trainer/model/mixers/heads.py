"""The heads that a token mixer computes on one rank of context parallelism, for all tokens of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor


class HeadShare(NamedTuple):
    """The heads that this rank computes: the ``rank``-th of ``ranks`` equal shares of each part of a tensor."""

    rank: int = 0
    ranks: int = 1

    def take(self, tensor: Tensor, parts: Sequence[int] = (), *, dim: int = 0) -> list[Tensor]:
        """Return views of this rank's share of each of ``parts`` along ``dim``; of the full tensor without parts."""
        pieces = tensor.split(list(parts), dim) if parts else (tensor,)
        return [piece if self.ranks == 1 else piece.chunk(self.ranks, dim)[self.rank] for piece in pieces]

    def place(self, shares: Sequence[Tensor]) -> Tensor:
        """Return the tensor of which ``take`` along the first dim gives ``shares``, with zeros elsewhere."""
        rows = [len(share) * self.ranks for share in shares]
        tensor = shares[0].new_zeros(sum(rows), *shares[0].shape[1:])
        for view, share in zip(self.take(tensor, rows), shares, strict=True):
            view.copy_(share)
        return tensor


ALL_HEADS = HeadShare()


class MixerHooks(Protocol):
    """Calls around the part of a mixer that mixes tokens, if this rank has some tokens of each sequence: Ulysses."""

    share: HeadShare

    def enter(self, tokens: int, *rows: Tensor, parts: Sequence[int] = ()) -> tuple[Tensor, ...]:
        """Exchange ``rows`` [R, columns] of this rank's ``tokens`` of each sequence for all rows of its heads.

        ``parts``: the columns of each part of a tensor, which are shared out each for itself.
        """

    def leave(self, tokens: int, rows: Tensor) -> Tensor:
        """Exchange all rows of this rank's heads for its rows of all heads; ``tokens``: this rank's of a sequence."""

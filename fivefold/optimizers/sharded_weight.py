"""A weight and its piece on one rank, as the optimizer update uses it."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from fivefold.layout.sharding import count_chunk_rows
from fivefold.model.weights import Weight


class ShardedWeight(NamedTuple):
    """A weight and its piece on a rank: ZeRO cuts the piece into ``shards``, tp (etp) the weight into ``pieces``."""

    weight: Weight
    shape: tuple[int, ...]
    shards: int
    pieces: int

    @property
    def expert(self) -> bool:
        """Tell whether it holds expert weights, stacked along the first dim."""
        return self.weight.kind.startswith("expert")

    @property
    def experts(self) -> int:
        """Return the number of stacked experts on this rank; 1 for other weights."""
        return self.shape[0] if self.expert else 1

    @property
    def is_matrix(self) -> bool:
        """Tell whether the weight (of one expert) has two dims."""
        return len(self.shape) == 2 + self.expert

    @property
    def dim(self) -> int | None:
        """Return the dim that tp (etp) shards; None: the weight is replicated over tp."""
        sizes = enumerate(zip(self.shape, self.weight.shape, strict=True))
        return next(
            (dim for dim, (local_size, full_size) in sizes if dim >= self.expert and local_size != full_size), None
        )

    @property
    def columns(self) -> int:
        """Return the elements of a row; ZeRO shards by rows."""
        return prod(self.shape[2:] if len(self.shape) == 3 else self.shape[1:])

    @property
    def chunk(self) -> int:
        """Return the rows of a ZeRO shard, including padding."""
        return count_chunk_rows(prod(self.shape) // self.columns, shards=self.shards)

    @property
    def rows(self) -> int:
        """Return the rows of the first shard."""
        return min(self.chunk, prod(self.shape) // self.columns)

    @property
    def matrix_rows(self) -> int:
        """Return the rows of the piece of one matrix (one expert)."""
        return prod(self.shape) // self.columns // self.experts

    @property
    def group(self) -> tuple[str, str, str]:
        """Return the process group of the shards, and axis and process group of the pieces."""
        return ("expert_shard", "etp", "etp") if self.expert else ("shard", "tp", "tp")


def split_families(weights: Iterable[ShardedWeight]) -> list[list[ShardedWeight]]:
    """Split into dense and expert weights, which have different process groups; empty families are left out."""
    weights = list(weights)
    families = ([weight for weight in weights if weight.expert == expert] for expert in (False, True))
    return [family for family in families if family]

"""How one weight lies over ranks, as an optimizer of whole matrices sees it, and the journey to the whole and home.

    shard (rows, 1/n of ZeRO's group) ⇢ piece (of tp or etp) ⇢ whole matrix on one rank

⇢ is one all_to_all for many weights: weight i goes to rank i mod n. Every rank has equally many elements of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fivefold.train.parallel.collectives import all_to_all
from fivefold.train.parallel.mesh import Axis, Ranks
from fivefold.train.parallel.shard import Shard
from fivefold.train.parallel.zero import ZeroUnit


@dataclass(frozen=True)
class ShardedWeight:
    """A shard and the axes over which its weight is cut: ``rows`` by ZeRO, ``pieces`` by tp (of experts etp)."""

    shard: Shard
    rows: Axis
    pieces: Axis

    @property
    def copies(self) -> int:
        """Ranks of ``pieces`` that hold the same piece."""
        return self.shard.local_weight.local_slice.holders

    @property
    def dim(self) -> int | None:
        """Along which ``pieces`` cut; None: all hold the whole. Experts are cut between experts besides, over ep."""
        first = 1 if self.stacked else 0
        shapes = zip(self.shard.shape[first:], self.shard.local_weight.weight.shape[first:], strict=True)
        return next((first + dim for dim, (piece, whole) in enumerate(shapes) if piece != whole), None)

    @property
    def hidden(self) -> bool:
        """Whether it is a matrix, or matrices of experts, between hidden states."""
        return self.shard.local_weight.weight.is_hidden

    @property
    def stacked(self) -> bool:
        """Whether the first dim counts experts, each with a matrix or vector of its own."""
        return self.shard.local_weight.weight.kind.startswith("expert")


def sharded_weights(units: list[ZeroUnit], ranks: Ranks) -> Iterator[ShardedWeight]:
    """Of every weight of this rank's stages, in module order."""
    for unit in units:
        pieces = ranks["etp" if unit.shard.name == "expert_shard" else "tp"]
        for shard in unit.shards:  # no other micro-batch waits for its turn
            yield ShardedWeight(shard, replace(unit.shard, interleaver=None), replace(pieces, interleaver=None))


def gather_owned(parts: list[Tensor], axis: Axis) -> list[Tensor]:
    """A part of every tensor → all parts [ranks, ...] of those that are this rank's."""
    if axis.size == 1 or not parts:
        return [part[None] for part in parts]
    mine = parts[axis.rank :: axis.size]
    sent = [parts[rank :: axis.size] for rank in range(axis.size)]
    rows = _exchange(sent, [_numel(mine)] * axis.size, axis, like=parts[0]).view(axis.size, -1)
    split = rows.split([part.numel() for part in mine], dim=1) if mine else ()
    return [row.contiguous().view(axis.size, *part.shape) for row, part in zip(split, mine, strict=True)]


def return_owned(wholes: list[Tensor], like: list[Tensor], axis: Axis) -> list[Tensor]:
    """The way back: all parts of this rank's tensors → its part of every tensor, shaped ``like``."""
    if axis.size == 1 or not like:
        return [whole[0] for whole in wholes]
    owners = [like[rank :: axis.size] for rank in range(axis.size)]
    sent = [[whole[rank] for whole in wholes] for rank in range(axis.size)]
    flat = _exchange(sent, [_numel(owned) for owned in owners], axis, like=like[0])
    order = [index for rank in range(axis.size) for index in range(rank, len(like), axis.size)]
    found = dict(zip(order, flat.split([like[index].numel() for index in order]), strict=True))
    return [found[index].view(part.shape) for index, part in enumerate(like)]


def _exchange(sent: list[list[Tensor]], received: list[int], axis: Axis, *, like: Tensor) -> Tensor:
    flat = torch.cat([like.new_empty(0), *(part.reshape(-1) for parts in sent for part in parts)])
    return all_to_all(flat, axis, sent=[_numel(parts) for parts in sent], received=received).wait()


def _numel(parts: list[Tensor]) -> int:
    return sum(part.numel() for part in parts)

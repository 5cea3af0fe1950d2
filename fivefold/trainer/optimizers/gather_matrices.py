"""Gathers whole matrices on owner ranks for an optimizer that needs them (Muon), and returns the results.

    shard (rows, 1/n of ZeRO's group) ⇢ slice (of tp or etp) ⇢ whole matrix on one rank

⇢ is one all_to_all for many weights: rank i mod n owns weight i. All ranks hold equally many (padded) elements of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fivefold.trainer.parallel.collectives import all_to_all
from fivefold.trainer.parallel.mesh import Axis, Ranks
from fivefold.trainer.parallel.shard import Shard
from fivefold.trainer.parallel.zero import ZeroUnit


@dataclass(frozen=True)
class ShardedWeight:
    """A shard and the axes that its weight is divided over: ``rows`` by ZeRO, ``pieces`` by tp (of experts etp)."""

    shard: Shard
    rows: Axis
    pieces: Axis

    @property
    def copies(self) -> int:
        """Ranks of ``pieces`` that hold the same slice."""
        return self.shard.local_weight.local_slice.holders

    @property
    def dim(self) -> int | None:
        """Dim that ``pieces`` divides; None: it does not. The experts' first dim, divided over ep, does not count."""
        first = 1 if self.stacked else 0
        shapes = zip(self.shard.shape[first:], self.shard.local_weight.weight.shape[first:], strict=True)
        return next((first + dim for dim, (piece, whole) in enumerate(shapes) if piece != whole), None)

    @property
    def hidden(self) -> bool:
        """Whether it maps hidden states to hidden states (matrices of blocks, also of experts), which Muon updates."""
        return self.shard.local_weight.weight.is_hidden

    @property
    def stacked(self) -> bool:
        """Whether the first dim counts experts."""
        return self.shard.local_weight.weight.kind.startswith("expert")


def sharded_weights(units: list[ZeroUnit], ranks: Ranks) -> Iterator[ShardedWeight]:
    """Every weight of this rank's stages, in module order."""
    for unit in units:
        pieces = ranks["etp" if unit.shard.name == "expert_shard" else "tp"]
        for shard in unit.shards:  # no interleaver: in the update no other micro-batch runs on this rank
            yield ShardedWeight(shard, replace(unit.shard, interleaver=None), replace(pieces, interleaver=None))


def gather_owned(parts: list[Tensor], axis: Axis) -> list[Tensor]:
    """This rank's part of every tensor → all parts [ranks, ...] of tensors it owns, by one all_to_all over ``axis``."""
    if axis.size == 1 or not parts:
        return [part[None] for part in parts]
    mine = parts[axis.rank :: axis.size]
    sent = [parts[rank :: axis.size] for rank in range(axis.size)]
    rows = _exchange(sent, [_numel(mine)] * axis.size, axis, like=parts[0]).view(axis.size, -1)
    split = rows.split([part.numel() for part in mine], dim=1) if mine else ()
    return [row.contiguous().view(axis.size, *part.shape) for row, part in zip(split, mine, strict=True)]


def return_owned(wholes: list[Tensor], like: list[Tensor], axis: Axis) -> list[Tensor]:
    """Reverse of ``gather_owned``: all parts of owned tensors → this rank's part of every tensor, shaped ``like``."""
    if axis.size == 1 or not like:
        return [whole[0] for whole in wholes]
    owners = [like[rank :: axis.size] for rank in range(axis.size)]
    sent = [[whole[rank] for whole in wholes] for rank in range(axis.size)]
    flat = _exchange(sent, [_numel(owned) for owned in owners], axis, like=like[0])
    order = [index for rank in range(axis.size) for index in range(rank, len(like), axis.size)]
    found = dict(zip(order, flat.split([like[index].numel() for index in order]), strict=True))
    return [found[index].view(part.shape) for index, part in enumerate(like)]


def _exchange(sent: list[list[Tensor]], received: list[int], axis: Axis, *, like: Tensor) -> Tensor:
    """All_to_all: ``sent`` tensors and ``received`` elements by rank → what came, flat, in order of rank."""
    flat = torch.cat([like.new_empty(0), *(part.reshape(-1) for parts in sent for part in parts)])
    return all_to_all(flat, axis, sent=[_numel(parts) for parts in sent], received=received).wait()


def _numel(parts: list[Tensor]) -> int:
    return sum(part.numel() for part in parts)

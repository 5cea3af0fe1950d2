"""Gathering of full matrices on owner ranks, for an optimizer that needs them (Muon), and the way back.

    shard (rows, 1/n of ZeRO's group) ⇢ slice (of tp or etp) ⇢ full matrix on one rank

Each ⇢ is one all-to-all for many weights: rank i mod n owns weight i. All ranks hold equally many (padded) elements of
each weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fivefold.trainer.parallel.collectives import all_to_all
from fivefold.trainer.parallel.mesh import AxisGroup, Ranks
from fivefold.trainer.parallel.shard import WeightShard
from fivefold.trainer.parallel.zero import ZeroUnit


@dataclass(frozen=True)
class ShardAxes:
    """A shard and the axes that divide its weight: ``rows`` by ZeRO, ``pieces`` by tp (by etp for experts)."""

    shard: WeightShard
    rows: AxisGroup
    pieces: AxisGroup

    @property
    def copies(self) -> int:
        """Return the number of ranks of ``pieces`` that hold the same slice."""
        return self.shard.local_weight.local_slice.holders

    @property
    def dim(self) -> int | None:
        """Return the dim that ``pieces`` divides, or None. The experts' first dim, which ep divides, does not count."""
        first_dim = 1 if self.is_stacked else 0
        shapes = zip(self.shard.shape[first_dim:], self.shard.local_weight.weight.shape[first_dim:], strict=True)
        return next((first_dim + dim for dim, (piece, full) in enumerate(shapes) if piece != full), None)

    @property
    def is_hidden(self) -> bool:
        """Return whether the weight is a hidden matrix, which Muon updates: a matrix of a block or of an expert."""
        return self.shard.local_weight.weight.is_hidden

    @property
    def is_stacked(self) -> bool:
        """Return whether the first dim counts experts."""
        return self.shard.local_weight.weight.kind.startswith("expert")


def list_sharded_weights(units: list[ZeroUnit], ranks: Ranks) -> Iterator[ShardAxes]:
    """Yield every weight of this rank's stages, in module order."""
    for unit in units:
        pieces = ranks["etp" if unit.shard.name == "expert_shard" else "tp"]
        for shard in unit.shards:  # no interleaver: in the update no other micro-batch runs on this rank
            yield ShardAxes(shard, replace(unit.shard, interleaver=None), replace(pieces, interleaver=None))


def gather_owned(parts: list[Tensor], axis: AxisGroup) -> list[Tensor]:
    """Exchange this rank's part of every tensor for all parts [ranks, ...] of the tensors that this rank owns.

    It is one all-to-all over ``axis``.
    """
    if axis.size == 1 or not parts:
        return [part[None] for part in parts]
    owned_parts = parts[axis.rank :: axis.size]
    sent = [parts[rank :: axis.size] for rank in range(axis.size)]
    rows = _exchange(sent, [_count_numel(owned_parts)] * axis.size, axis, like=parts[0]).view(axis.size, -1)
    split_rows = rows.split([part.numel() for part in owned_parts], dim=1) if owned_parts else ()
    return [row.contiguous().view(axis.size, *part.shape) for row, part in zip(split_rows, owned_parts, strict=True)]


def return_owned(full_matrices: list[Tensor], like: list[Tensor], axis: AxisGroup) -> list[Tensor]:
    """Reverse ``gather_owned``: send back all parts of owned tensors and return this rank's parts.

    ``like``: this rank's parts, whose shapes the result has.
    """
    if axis.size == 1 or not like:
        return [all_parts[0] for all_parts in full_matrices]
    owners = [like[rank :: axis.size] for rank in range(axis.size)]
    sent = [[all_parts[rank] for all_parts in full_matrices] for rank in range(axis.size)]
    flat = _exchange(sent, [_count_numel(owned) for owned in owners], axis, like=like[0])
    order = [index for rank in range(axis.size) for index in range(rank, len(like), axis.size)]
    part_by_index = dict(zip(order, flat.split([like[index].numel() for index in order]), strict=True))
    return [part_by_index[index].view(part.shape) for index, part in enumerate(like)]


def _exchange(sent: list[list[Tensor]], received: list[int], axis: AxisGroup, *, like: Tensor) -> Tensor:
    """Run an all-to-all of ``sent`` tensors and ``received`` element counts by rank; return it flat, in rank order."""
    flat = torch.cat([like.new_empty(0), *(part.reshape(-1) for parts in sent for part in parts)])
    return all_to_all(flat, axis, sent=[_count_numel(parts) for parts in sent], received=received).wait()


def _count_numel(parts: list[Tensor]) -> int:
    return sum(part.numel() for part in parts)

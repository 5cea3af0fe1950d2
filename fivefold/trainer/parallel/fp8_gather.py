"""The all-gather of a ZeRO unit under ``gathers = "fp8"``: matrices of blocks in fp8, the rest in compute dtype.

    local rows, fp32 ─> bf16 ─> fp8 · 1/scale ── all_gather, bytes ── fp8 · scale ─> bf16      scale: largest |w| / 448

The largest |w| is taken over all ranks' rows in bf16, so that the cast before the matmul finds the same scale and the
same fp8 values. There is one scale per matrix, per expert, or per 128 x 128 block, and one all_reduce (max) per step
for all units
(as in pytorch/ao@v0.14.1:torchao/float8/fsdp_utils.py, precompute_float8_dynamic_scale_for_fsdp).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.linalg import vector_norm

from fivefold.model.weight import is_gemm_weight
from fivefold.trainer.model.float8.cast import E4M3, TILE, cast_per_tensor, scale_
from fivefold.trainer.parallel.collectives import all_reduce
from fivefold.trainer.parallel.mesh import AxisGroup
from fivefold.trainer.parallel.shard import WeightShard
from fivefold.units import ceil_div


class Scales:
    """fp8 scales of all matrices [experts or 1, R, C] sharded over ``axis``: fp32 [experts, 1, 1], or one per block.

    ``block``: side of the block that shares a scale; 0: the full matrix. ``dtype``: dtype of the gathered weights.
    """

    def __init__(self, axis: AxisGroup, *, block: int, dtype: torch.dtype, device: torch.device) -> None:
        self.axis, self.block, self.dtype, self.device = axis, block, dtype, device
        self._shards: list[WeightShard] = []
        self._shapes: list[tuple[int, int, int]] = []
        self.block_rows: list[Tensor] = []  # per shard: the block row of each of its rows
        self._cached: tuple[tuple[Tensor, Tensor], ...] = ()

    def join(self, shard: WeightShard) -> int:
        """Add a matrix; return its index for ``of`` and ``get_amax``."""
        *experts, rows, columns = shard.shape
        block_rows, block_columns = (self.block or size for size in (rows, columns))
        blocks_down = ceil_div(rows, block_rows)
        blocks_across = ceil_div(columns, block_columns)
        row = torch.arange(shard.first_row, shard.first_row + shard.rows, device=self.device)
        self.block_rows.append(row // rows * blocks_down + row % rows // block_rows)
        self._shapes.append((math.prod(experts), blocks_down, blocks_across))
        self._shards.append(shard)
        return len(self._shards) - 1

    def get_scale(self, place: int) -> Tensor:
        """Return the scales of the matrix at index ``place``: fp32 [experts or 1, blocks down, blocks across]."""
        return self._current()[place][1]

    def get_amax(self, place: int) -> Tensor:
        """Return the largest |w| among the weights that share each local row's scale: fp32 [rows, 1 or blocks]."""
        return self._current()[place][0].index_select(0, self.block_rows[place])

    def forget(self) -> None:
        """Drop the scales, because the weights have changed; the next use recomputes them."""
        self._cached = ()

    def _current(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Return (largest |w|, scale) of every matrix; the first call after an update runs the all_reduce."""
        if not self._cached:
            self._cached = tuple(self._compute())
        return self._cached

    def _compute(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the largest element and the scale of each block of each weight, equal on all ranks of the axis."""
        local_maxima = list[Tensor]()
        for shard, groups, (experts, down, across) in zip(self._shards, self.block_rows, self._shapes, strict=True):
            largest = _row_amax(shard.weight.detach(), across)
            block_maxima = largest.new_zeros(experts * down, across)
            local_maxima.append(
                block_maxima.scatter_reduce_(0, groups[:, None].expand(-1, across), largest, "amax").flatten()
            )
        global_maxima = all_reduce(torch.cat(local_maxima), self.axis, op=dist.ReduceOp.MAX).wait()
        largest = global_maxima.to(self.dtype).float()
        scales = cast_per_tensor(largest[:, None], amax=largest[:, None]).scale
        counts = [math.prod(shape) for shape in self._shapes]
        for shape, matrix_largest, scale in zip(self._shapes, largest.split(counts), scales.split(counts), strict=True):
            yield matrix_largest.view(-1, shape[2]), scale.view(shape)


def _row_amax(rows: Tensor, across: int) -> Tensor:
    """Return the largest |w| of each row of [rows, columns] in ``across`` column blocks: fp32 [rows, across]."""
    if not len(rows):  # of a rank that holds none of a weight; fake tensors reject the maximum of nothing
        return rows.new_zeros(0, across, dtype=torch.float32)
    if remainder := rows.shape[1] % TILE if across > 1 else 0:
        rows = F.pad(rows, (0, TILE - remainder))
    return vector_norm(rows.unflatten(1, (across, -1)), torch.inf, dim=-1, dtype=torch.float32)


class Payload:
    """The uint8 message of one unit: weight after weight, padded so that every rank sends the same number of bytes."""

    def __init__(self, shards: Sequence[WeightShard], scales: Scales) -> None:
        self.shards, self.scales = shards, scales
        self.places = [scales.join(shard) if is_gemm_weight(shard.local_weight.weight) else None for shard in shards]
        itemsize = scales.dtype.itemsize
        self.sizes = [
            shard.padded_numel * (itemsize if place is None else 1)
            for shard, place in zip(shards, self.places, strict=True)
        ]

    def pack(self) -> Tensor:
        """Return this rank's rows as bytes: fp8 for matrices, else the scales' ``dtype``; uint8 [sum(sizes)]."""
        message = torch.zeros(sum(self.sizes), dtype=torch.uint8, device=self.scales.device)
        for slot, shard, place in zip(message.split(self.sizes), self.shards, self.places, strict=True):
            part = shard.weight.detach().to(self.scales.dtype)
            if place is not None:
                part = cast_per_tensor(part, amax=self.scales.get_amax(place)).data
            flat = part.view(torch.uint8).view(-1)
            slot[: flat.numel()].copy_(flat)
        return message

    def unpack(self, received: Tensor, parts: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> None:
        """Write all ranks' messages, uint8 [ranks · bytes], into the gathered weights, [ranks, rows · columns] each.

        Matrices that are stored in fp8 are not dequantized; their ``parameters`` get the scale as an attribute.
        """
        columns = received.view(self.scales.axis.size, -1).split(self.sizes, dim=1)
        for shard, place, column, part, parameter in zip(
            self.shards, self.places, columns, parts, parameters, strict=True
        ):
            if place is None or part.dtype == E4M3:
                part.view(torch.uint8).copy_(column)
                if place is not None:
                    scale = self.scales.get_scale(place)
                    parameter.scale = scale if len(shard.shape) == 3 else scale[0]  # type: ignore[attr-defined]
                continue
            part.copy_(column.view(E4M3))
            matrix = part.view(-1)[: shard.shape.numel()].view(-1, *shard.shape[-2:])
            scale_(matrix, self.scales.get_scale(place))

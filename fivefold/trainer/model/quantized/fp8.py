"""Frozen weights in fp8 (E4M3) with a scale for each block of 128 x 128, as DeepSeek-V3 and others are published.

    block    scale = max |w| / 448; code = w / scale, rounded to E4M3
    w ≈ code · scale

Codes and scales are those of transformers to the bit, where 128 divides rows and columns; else the last blocks are
smaller, as in DeepSeek's kernels. The weight is dequantized before each product.
Sources: arXiv:2412.19437 §3.3.2; transformers@5.23.0:src/transformers/integrations/finegrained_fp8.py (Fp8Quantize,
Fp8Dequantize).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Self

import torch
from torch import Tensor

from fivefold.adapter import FP8_BLOCK
from fivefold.trainer.model.quantized.weight import MatrixSlice, QuantizedWeight
from fivefold.units import ceil_div

LARGEST_CODE = torch.finfo(torch.float8_e4m3fn).max


class Fp8Weight(QuantizedWeight):
    """The scales of a weight [out, in] in fp8: ``scales`` [out / 128, in / 128], of each block."""

    base = "fp8"

    def __init__(self, piece: MatrixSlice, *, dtype: torch.dtype, scales: Tensor) -> None:
        self.piece, self.shape, self.dtype = piece, piece.shape, dtype
        self.scales = scales

    @classmethod
    def allocate(
        cls, slices: Sequence[MatrixSlice], *, dtype: torch.dtype, device: torch.device
    ) -> tuple[list[Self], list[Tensor]]:
        """Return the weights of ``slices`` without values, and the buffer of their scales."""
        grids = [[ceil_div(size, FP8_BLOCK) for size in piece.shape] for piece in slices]
        sizes = [prod(grid) for grid in grids]
        buffer = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        parts = buffer.split(sizes) if sizes else ()
        weights = [
            cls(piece, dtype=dtype, scales=part.view(grid))
            for piece, part, grid in zip(slices, parts, grids, strict=True)
        ]
        return weights, [buffer]

    def quantize(self, weight: Tensor) -> Tensor:
        """Set the scales to those of the full ``weight``, and return the codes [out · in] of the slice."""
        return self.keep(*quantize_fp8(weight.to(self.scales.device, self.dtype)))

    def keep(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Set the scales to those of the full weight, and return of its ``codes`` those of the slice."""
        self.scales.copy_(self.piece.cut(scales, rows=FP8_BLOCK, columns=FP8_BLOCK))
        return self.piece.cut(codes.view(self.piece.full)).flatten()

    def dequantize(self, elements: Tensor) -> Tensor:
        """Return the weight [out, in] of all ``elements``."""
        out: Tensor = dequantize_fp8(elements, self.scales, list(self.shape), self.dtype, 0)
        return out

    def dequantize_rows(self, elements: Tensor, *, first: int, rows: int) -> Tensor:
        """Return ``rows`` rows from row ``first`` on in fp32; ``elements`` has only those of these rows."""
        out: Tensor = dequantize_fp8(elements, self.scales, [rows, *self.shape[1:]], self.dtype, first)
        return out.float()


@torch.library.custom_op("fivefold::quantize_fp8", mutates_args=())
def quantize_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes of ``weight``, a flat tensor of bytes, and the scale of each block in fp32."""
    rows, columns = weight.shape
    padding = (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK)
    blocks = torch.nn.functional.pad(weight.float(), padding)
    blocks = blocks.view(blocks.shape[0] // FP8_BLOCK, FP8_BLOCK, -1, FP8_BLOCK)
    absmax = blocks.abs().amax((1, 3))
    factors = torch.where(absmax > 0, LARGEST_CODE / absmax, 1.0)
    scaled = (blocks * factors[:, None, :, None]).clamp_(-LARGEST_CODE, LARGEST_CODE)
    codes = scaled.view(rows + padding[3], columns + padding[1])[:rows, :columns].to(torch.float8_e4m3fn)
    return codes.contiguous().view(torch.uint8).flatten(), 1.0 / factors


@quantize_fp8.register_fake
def _(weight: Tensor) -> tuple[Tensor, Tensor]:
    grid = [ceil_div(size, FP8_BLOCK) for size in weight.shape]
    return weight.new_empty(weight.numel(), dtype=torch.uint8), weight.new_empty(grid, dtype=torch.float32)


@torch.library.custom_op("fivefold::dequantize_fp8", mutates_args=())
def dequantize_fp8(elements: Tensor, scales: Tensor, shape: list[int], dtype: torch.dtype, first: int) -> Tensor:
    """Return rows from row ``first`` on of a weight, [``shape``] in ``dtype``: products in fp32, rounded once."""
    out = torch.empty(shape, dtype=dtype, device=elements.device)
    rows, columns = shape
    codes = elements.view(torch.float8_e4m3fn).view(shape)
    start = 0
    while start < rows:  # the rows of one row of blocks
        block = (first + start) // FP8_BLOCK
        stop = min(rows, (block + 1) * FP8_BLOCK - first)
        factors = scales[block].repeat_interleave(FP8_BLOCK)[:columns]
        out[start:stop] = codes[start:stop].float().mul_(factors)
        start = stop
    return out


@dequantize_fp8.register_fake
def _(elements: Tensor, scales: Tensor, shape: list[int], dtype: torch.dtype, first: int) -> Tensor:
    return elements.new_empty(shape, dtype=dtype)

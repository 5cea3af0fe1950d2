"""Frozen weights in fp8 (E4M3) with a scale for each block of 128 x 128, as DeepSeek-V3 and others are published.

    block    scale = max |w| / 448; code = w / scale, rounded to E4M3
    w ≈ code · scale

Codes and scales are those of transformers to the bit, where 128 divides rows and columns; else the last blocks are
smaller, as in DeepSeek's kernels. The weight is dequantized before each product. Routed experts are stacked.
Sources: arXiv:2412.19437 §3.3.2; transformers@5.23.0:src/transformers/integrations/finegrained_fp8.py (Fp8Quantize,
Fp8Dequantize).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fivefold.base_format import FP8_BLOCK
from fivefold.trainer.model.quantized.weight import BlockScaledWeight
from fivefold.units import ceil_div

LARGEST_CODE = torch.finfo(torch.float8_e4m3fn).max


class Fp8Weight(BlockScaledWeight):
    """The scales of a weight [out, in] in fp8: ``scales`` [out / 128, in / 128], of each block; of experts stacked."""

    block = (FP8_BLOCK, FP8_BLOCK)
    scale_dtype = torch.float32

    def quantize_matrix(self, matrix: Tensor, *, expert: int | None = None) -> Tensor:
        """Set the scales to those of the full ``matrix``, and return the codes [out · in] of its slice."""
        return self.keep(*quantize_fp8(matrix.to(self.scales.device, self.dtype)), expert=expert)

    def keep(self, codes: Tensor, *scales: Tensor, expert: int | None = None) -> Tensor:
        """Set the scales [out / 128, in / 128] to those of a full matrix, and return of its ``codes`` the slice's."""
        (grid,), piece = scales, self.piece.matrix
        self.set_scales(grid, expert=expert)
        return piece.cut(codes.view(torch.uint8).view(piece.full)).flatten()

    def dequantize(self, elements: Tensor) -> Tensor:
        """Return the weight [out, in] of all ``elements``."""
        shape = list(self.shape)
        return dequantize_fp8(elements, self.scales, shape, self.dtype, 0, shape[-2])

    def dequantize_rows(self, elements: Tensor, *, first: int, rows: int) -> Tensor:
        """Return ``rows`` rows from row ``first`` on in fp32; ``elements`` has only those of these rows."""
        *_, matrix_rows, columns = self.shape
        out: Tensor = dequantize_fp8(elements, self.scales, [rows, columns], self.dtype, first, matrix_rows)
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
def dequantize_fp8(
    elements: Tensor, scales: Tensor, shape: list[int], dtype: torch.dtype, first: int, matrix_rows: int
) -> Tensor:
    """Return rows from row ``first`` on of a weight, [``shape``] in ``dtype``: products in fp32, rounded once.

    ``matrix_rows``: rows of the weight, or of that of each expert.
    """
    out = torch.empty(shape, dtype=dtype, device=elements.device)
    columns = shape[-1]
    flat, codes = out.view(-1, columns), elements.view(torch.float8_e4m3fn).view(-1, columns)
    blocks = scales.view(-1, *scales.shape[-2:])
    start = 0
    while start < len(flat):  # the rows of one row of blocks
        expert, row = divmod(first + start, matrix_rows)
        block = row // FP8_BLOCK
        stop = min(len(flat), start + min((block + 1) * FP8_BLOCK, matrix_rows) - row)
        factors = blocks[expert, block].repeat_interleave(FP8_BLOCK)[:columns]
        flat[start:stop] = codes[start:stop].float().mul_(factors)
        start = stop
    return out


dequantize_fp8.register_fake(lambda elements, scales, shape, dtype, *_: elements.new_empty(shape, dtype=dtype))

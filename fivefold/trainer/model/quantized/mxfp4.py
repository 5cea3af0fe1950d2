"""Frozen weights of routed experts in MXFP4 (E2M1) with a scale for each 32 elements of a row, as gpt-oss is published.

    block    exponent = ⌊log2 max |w|⌋ − 2; code = w / 2^exponent, rounded to nearest of E2M1, ties to the even code
    w ≈ value[code] · 2^exponent

Two codes share a byte, the first in its low half; an exponent has one byte, with a bias of 127. The weight is
dequantized before each product, which is exact in bf16.
Sources: OCP Microscaling Formats 1.0 §5.3, §6.3; transformers@5.23.0:src/transformers/integrations/mxfp4.py
(convert_moe_packed_tensors).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fivefold.base_format import MXFP4_BLOCK
from fivefold.trainer.model.float8.blocks import E2M1, round_to_e2m1
from fivefold.trainer.model.quantized.weight import BlockScaledWeight
from fivefold.units import ceil_div

SCALE_BIAS = 127
VALUES = (*E2M1, *(-value for value in E2M1))  # of the codes
LARGEST_EXPONENT = 2  # of E2M1, whose largest value is 6
CHUNK_ELEMENTS = 2**20  # elements that are dequantized at once without a kernel of their own


class Mxfp4Weight(BlockScaledWeight):
    """The scales of experts [E, out, in] in MXFP4: ``scales`` [E, out, in / 32] of bytes. Elements: two in a byte."""

    block = (1, MXFP4_BLOCK)
    scale_dtype = torch.uint8

    def quantize_matrix(self, matrix: Tensor, *, expert: int | None = None) -> Tensor:
        """Set the scales to those of the full ``matrix``, and return the elements [out · in / 2] of its slice."""
        return self.keep(*quantize_mxfp4(matrix.to(self.scales.device, self.dtype)), expert=expert)

    def keep(self, codes: Tensor, *scales: Tensor, expert: int | None = None) -> Tensor:
        """Set the scales [out, in / 32] to those of a full matrix, and return of its ``codes`` the slice's."""
        (exponents,), piece = scales, self.piece.matrix
        self.set_scales(exponents, expert=expert)
        return piece.cut(codes.view(piece.full[0], -1), columns=2).flatten()

    def dequantize(self, elements: Tensor) -> Tensor:
        """Return the experts [E, out, in] of all ``elements``."""
        return dequantize_mxfp4(elements, self.scales, list(self.shape), self.dtype)

    def dequantize_rows(self, elements: Tensor, *, first: int, rows: int) -> Tensor:
        """Return ``rows`` rows from row ``first`` on in fp32; ``elements`` has only those of these rows."""
        scales = self.scales.view(-1, self.scales.shape[-1])[first : first + rows]
        out: Tensor = dequantize_mxfp4(elements, scales, [rows, self.shape[-1]], self.dtype)
        return out.float()


@torch.library.custom_op("fivefold::quantize_mxfp4", mutates_args=())
def quantize_mxfp4(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the packed elements of ``matrix`` [out, in], a flat tensor of bytes, and the scales [out, in / 32]."""
    rows, columns = matrix.shape
    blocks = torch.nn.functional.pad(matrix.float(), (0, -columns % MXFP4_BLOCK)).view(rows, -1, MXFP4_BLOCK)
    absmax = blocks.abs().amax(-1)
    _, exponents = torch.frexp(absmax)  # of a mantissa from a half to one
    exponents = (exponents - 1 - LARGEST_EXPONENT).clamp_(-SCALE_BIAS, SCALE_BIAS)
    exponents = exponents.masked_fill_(absmax == 0, -SCALE_BIAS)
    codes = round_to_e2m1(torch.ldexp(blocks, -exponents[..., None])).view(rows, -1)[:, :columns]
    packed = codes[:, ::2] | (codes[:, 1::2] << 4)
    return packed.flatten(), (exponents + SCALE_BIAS).to(torch.uint8)


@quantize_mxfp4.register_fake
def _(matrix: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = matrix.shape
    grid = (rows, ceil_div(columns, MXFP4_BLOCK))
    return matrix.new_empty(matrix.numel() // 2, dtype=torch.uint8), matrix.new_empty(grid, dtype=torch.uint8)


@torch.library.custom_op("fivefold::dequantize_mxfp4", mutates_args=())
def dequantize_mxfp4(elements: Tensor, scales: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
    """Return the weight of ``shape`` in ``dtype``."""
    out = torch.empty(shape, dtype=dtype, device=elements.device)
    if not out.numel():
        return out
    columns = shape[-1]
    values = torch.tensor(VALUES, device=elements.device)
    rows = max(1, CHUNK_ELEMENTS // columns)
    parts = out.view(-1, columns).split(rows)
    packed_parts = elements.view(-1, columns // 2).split(rows)
    for part, packed, exponents in zip(parts, packed_parts, scales.view(-1, scales.shape[-1]).split(rows), strict=True):
        codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
        factors = (exponents.int() - SCALE_BIAS).repeat_interleave(MXFP4_BLOCK, -1)[:, :columns]
        part.copy_(torch.ldexp(values[codes.int()], factors))
    return out


dequantize_mxfp4.register_fake(lambda elements, scales, shape, dtype: elements.new_empty(shape, dtype=dtype))

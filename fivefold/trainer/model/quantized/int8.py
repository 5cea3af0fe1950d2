"""Frozen weights in int8 with a scale for each row, in the format of bitsandbytes' LLM.int8.

    row     absmax = max |w|; code = round(w · 127 / absmax)
    w ≈ code · absmax / 127

Codes and scales are those of bitsandbytes to the bit. The products are not LLM.int8's, which quantize the input too:
the weight is dequantized before each.
Sources: arXiv:2208.07339 §3; bitsandbytes-foundation/bitsandbytes@0.50.2:bitsandbytes/backends/default/ops.py
(int8_vectorwise_quant), bitsandbytes/nn/modules.py (Int8Params) and bitsandbytes/_ops.py (int8_vectorwise_dequant).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from fivefold.base_format import BaseFormat
from fivefold.trainer.model.quantized.weight import MatrixSlice, QuantizedWeight

LARGEST_CODE = 127.0
CHUNK_ELEMENTS = 2**20  # elements that are dequantized at once without a kernel of their own


class Int8Weight(QuantizedWeight):
    """The scales of a weight [out, in] in int8: ``absmax`` [out], of each full row."""

    def __init__(self, base: BaseFormat, piece: MatrixSlice, *, dtype: torch.dtype, absmax: Tensor) -> None:
        self.base, self.piece, self.shape, self.dtype = base, piece, piece.shape, dtype
        self.absmax = absmax

    @classmethod
    def allocate(
        cls, base: BaseFormat, slices: Sequence[MatrixSlice], *, dtype: torch.dtype, device: torch.device
    ) -> tuple[list[Self], list[Tensor]]:
        """Return the weights of ``slices`` without values, and the buffer of their scales."""
        rows = [piece.shape[0] for piece in slices]
        scales = torch.zeros(sum(rows), dtype=torch.float32, device=device)
        parts = scales.split(rows) if rows else ()
        weights = [cls(base, piece, dtype=dtype, absmax=part) for piece, part in zip(slices, parts, strict=True)]
        return weights, [scales]

    def quantize_matrix(self, matrix: Tensor, *, expert: int | None = None) -> Tensor:
        """Set the scales to those of the full ``matrix``, and return the codes [out · in] of the slice."""
        half = matrix.to(self.absmax.device, self.dtype).half()  # as Int8Params casts it
        return self.keep(*quantize_int8(half))

    def keep(self, codes: Tensor, *scales: Tensor, expert: int | None = None) -> Tensor:
        """Set the scales [out] to those of a full matrix, and return of its ``codes`` those of the slice."""
        (absmax,) = scales
        self.absmax.copy_(self.piece.cut(absmax[:, None], columns=self.piece.full[1])[:, 0])
        return self.piece.cut(codes.view(self.piece.full)).flatten()

    def dequantize(self, elements: Tensor) -> Tensor:
        """Return the weight [out, in] of all ``elements``."""
        return dequantize_int8(elements, self.absmax, list(self.shape), self.dtype)

    def dequantize_rows(self, elements: Tensor, *, first: int, rows: int) -> Tensor:
        """Return ``rows`` rows from row ``first`` on in fp32; ``elements`` has only those of these rows."""
        shape = [rows, *self.shape[1:]]
        out: Tensor = dequantize_int8(elements, self.absmax[first : first + rows], shape, self.dtype)
        return out.float()


@torch.library.custom_op("fivefold::quantize_int8", mutates_args=())
def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes of ``weight``, a flat tensor of bytes, and the absmax of each row in fp32."""
    absmax = weight.abs().amax(1).float()
    codes = torch.round(weight * (LARGEST_CODE / absmax)[:, None]).nan_to_num_(0.0).to(torch.int8)  # rows of zeros
    return codes.view(torch.uint8).flatten(), absmax


@quantize_int8.register_fake
def _(weight: Tensor) -> tuple[Tensor, Tensor]:
    codes = weight.new_empty(weight.numel(), dtype=torch.uint8)
    return codes, weight.new_empty(weight.shape[0], dtype=torch.float32)


@torch.library.custom_op("fivefold::dequantize_int8", mutates_args=())
def dequantize_int8(elements: Tensor, absmax: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
    """Return the weight of ``shape`` in ``dtype``: products in fp32, rounded once."""
    out = torch.empty(shape, dtype=dtype, device=elements.device)
    if not out.numel():
        return out
    codes = elements.view(torch.int8).view(shape)
    rows = max(1, CHUNK_ELEMENTS // shape[1])
    for part, chunk, scales in zip(out.split(rows), codes.split(rows), absmax.split(rows), strict=True):
        part.copy_((chunk * scales[:, None]).mul_(1 / LARGEST_CODE))
    return out


dequantize_int8.register_fake(lambda elements, absmax, shape, dtype: elements.new_empty(shape, dtype=dtype))

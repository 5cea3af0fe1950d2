"""Casts to fp8 with their scales in one kernel; of whole matrices, whose largest |x| comes first, in two."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fivefold.trainer.model.kernels.fused.launch import ELEMENTS, power
from fivefold.units import ceil_div

SQUARE = 64  # rows and columns of a program over a transposed tensor, where neighbours lie in a column


class Format(NamedTuple):
    """Bits of mantissa, and exponent of the smallest normal number."""

    mantissa: int
    smallest: int


FORMATS = {torch.float8_e4m3fn: Format(3, -6), torch.float8_e5m2: Format(2, -14)}


def cast(
    x: Tensor, amax: Tensor | None, data: Tensor, scale: Tensor, *, rows: int, columns: int, powers: bool
) -> None:  # fmt: skip
    """Write ``data`` and ``scale`` of ``x``, which has elements. A scale is of ``rows`` x ``columns``; of all in a
    matrix where rows are 0, in the tensor where -1, with the largest |x| ``amax`` if it is known; of whole rows where
    columns are 0.
    """
    from triton import knobs

    from fivefold.trainer.model.kernels.triton import casts

    source = x.view(1, 1, -1) if x.dim() == 1 else x.flatten(0, -3) if x.dim() > 2 else x.view(-1, *x.shape)
    matrices, height, width = source.shape
    known = None
    if rows < 1:
        known = _bits(source, casts) if amax is None else amax.float().reshape(1).view(torch.int32)
        known = known.amax(0, keepdim=True) if rows < 0 else known
    tall, block = _program(source, rows=rows, columns=columns)
    each = block if known is not None else columns or width
    kind = FORMATS[data.dtype]
    casts.cast[(ceil_div(height, tall), ceil_div(width, each), matrices)](
        source, scale if known is None else known, data, scale, height, width, *source.stride(), each,
        torch.finfo(data.dtype).max, 0 if known is None or len(known) == 1 else 1,
        SHARED=rows > 1, KNOWN=known is not None, POWERS=powers, SMALLEST=kind.smallest,
        ROUND=kind.mantissa if knobs.runtime.interpret else 0, HEIGHT=tall, BLOCK=block, num_warps=8,
    )  # fmt: skip


def _bits(source: Tensor, casts: object) -> Tensor:
    """Largest |x| of each matrix as the bits of an fp32, int32 [matrices]."""
    matrices, height, width = source.shape
    tall, block = _program(source, rows=0, columns=0)
    partial = source.new_empty(matrices, ceil_div(height, tall), dtype=torch.int32)
    casts.largest[(partial.shape[1], matrices)](  # type: ignore[attr-defined]
        source, partial, height, width, *source.stride(), HEIGHT=tall, BLOCK=block, num_warps=8
    )
    return partial.amax(1)


def _program(source: Tensor, *, rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns, powers of two, that a program holds at once."""
    if rows > 1:
        return rows, ELEMENTS // rows
    if columns > 0:
        return ELEMENTS // columns, columns
    if source.stride(-1) != 1:
        return SQUARE, SQUARE
    block = min(ELEMENTS // 4, power(source.shape[-1]))
    return min(ELEMENTS // block, power(source.shape[-2])), block

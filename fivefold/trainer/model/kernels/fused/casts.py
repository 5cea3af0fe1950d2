"""Casts to fp8 with their scales in one kernel; scales of full matrices take two, the first for the largest |x|."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fivefold.trainer.model.kernels.fused.launch import ELEMENTS, round_up_to_power_of_two
from fivefold.units import ceil_div

SQUARE = 64  # rows and columns of a program over a transposed tensor, whose columns are contiguous in memory


class Float8Format(NamedTuple):
    """An fp8 format: bits of mantissa, and exponent of the smallest normal number."""

    mantissa: int
    smallest: int


FORMATS = {torch.float8_e4m3fn: Float8Format(3, -6), torch.float8_e5m2: Float8Format(2, -14)}


def cast(
    x: Tensor, amax: Tensor | None, data: Tensor, scale: Tensor, *, rows: int, columns: int, power_of_two_scales: bool
) -> None:
    """Write ``data`` and ``scale`` of ``x``, which must have elements.

    A scale covers ``rows`` x ``columns``; the full matrix if rows are 0, the full tensor if -1, with the largest |x|
    ``amax`` if it is known; full rows if columns are 0.
    """
    from triton import knobs

    from fivefold.trainer.model.kernels.triton import casts

    source = x.view(1, 1, -1) if x.dim() == 1 else x.flatten(0, -3) if x.dim() > 2 else x.view(-1, *x.shape)
    matrices, height, width = source.shape
    amax_bits = None
    if rows < 1:
        amax_bits = _bits(source, casts) if amax is None else amax.float().reshape(1).view(torch.int32)
        amax_bits = amax_bits.amax(0, keepdim=True) if rows < 0 else amax_bits
    program_rows, program_columns = _choose_program(source, rows=rows, columns=columns)
    columns_per_program = program_columns if amax_bits is not None else columns or width
    fp8_format = FORMATS[data.dtype]
    casts.cast[(ceil_div(height, program_rows), ceil_div(width, columns_per_program), matrices)](
        source,
        scale if amax_bits is None else amax_bits,
        data,
        scale,
        height,
        width,
        *source.stride(),
        columns_per_program,
        torch.finfo(data.dtype).max,
        0 if amax_bits is None or len(amax_bits) == 1 else 1,
        SHARED=rows > 1,
        KNOWN=amax_bits is not None,
        POWERS=power_of_two_scales,
        SMALLEST=fp8_format.smallest,
        ROUND=fp8_format.mantissa if knobs.runtime.interpret else 0,
        HEIGHT=program_rows,
        BLOCK=program_columns,
        num_warps=8,
    )


def _bits(source: Tensor, casts: object) -> Tensor:
    """Return the largest |x| of each matrix as the bits of an fp32, int32 [matrices]."""
    matrices, height, width = source.shape
    program_rows, program_columns = _choose_program(source, rows=0, columns=0)
    partial = source.new_empty(matrices, ceil_div(height, program_rows), dtype=torch.int32)
    casts.block_amax[(partial.shape[1], matrices)](  # type: ignore[attr-defined]
        source, partial, height, width, *source.stride(), HEIGHT=program_rows, BLOCK=program_columns, num_warps=8
    )
    return partial.amax(1)


def _choose_program(source: Tensor, *, rows: int, columns: int) -> tuple[int, int]:
    """Return the rows and columns, powers of two, that a program holds at once."""
    if rows > 1:
        return rows, ELEMENTS // rows
    if columns > 0:
        return ELEMENTS // columns, columns
    if source.stride(-1) != 1:
        return SQUARE, SQUARE
    block = min(ELEMENTS // 4, round_up_to_power_of_two(source.shape[-1]))
    return min(ELEMENTS // block, round_up_to_power_of_two(source.shape[-2])), block

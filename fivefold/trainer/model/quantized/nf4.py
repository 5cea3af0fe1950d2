"""Frozen weights in 4-bit NormalFloat with double quantization (QLoRA), in the format of bitsandbytes.

    block of 64 elements   absmax = max |w|; w / absmax → nearest of 16 values, two in a byte, the upper half first
    256 of these absmax    minus their mean over the weight → one byte each, of 256 values between ± the largest
    w ≈ value[code] · (value2[code of absmax] · largest + mean)

Codes and scales are those of bitsandbytes to the bit. ``dequantize`` is one operation, which allocates only its output.
Sources: arXiv:2305.14314 §3; bitsandbytes-foundation/bitsandbytes@0.50.2:bitsandbytes/functional.py (get_4bit_type,
create_dynamic_map, quantize_4bit), bitsandbytes/backends/default/ops.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Self

import torch
from torch import Tensor

from fivefold.adapter import NF4_BLOCK, NF4_SCALES_BLOCK
from fivefold.trainer.model.quantized.weight import MatrixSlice, QuantizedWeight
from fivefold.units import ceil_div

# 16 quantiles of a normal distribution in [-1, 1], with an exact 0
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
ZERO_CODE = 7
SMALLEST = 1e-38  # absmax that values are divided by
TABLE_STEPS = 32767.5  # in each of the two halves of [-1, 1]; found by comparing codes, bitsandbytes 0.50.2
CHUNK_BLOCKS = 2**14  # blocks that are dequantized at once without a kernel of their own: 2**20 elements


class Nf4Weight(QuantizedWeight):
    """The scales of a weight [out, in] in nf4, whose elements are packed two to a byte.

    ``scales``: codes of the absmax of each block of the slice; ``largest``: the largest of each 256 of these in the
    full weight, whose blocks are in its order; ``mean``: [1]. ``runs``: see ``_list_runs``.
    """

    base = "nf4"

    def __init__(
        self, piece: MatrixSlice, *, dtype: torch.dtype, scales: Tensor, largest: Tensor, mean: Tensor
    ) -> None:
        self.piece, self.shape, self.dtype = piece, piece.shape, dtype
        self.scales, self.largest, self.mean = scales, largest, mean
        self.runs = _list_runs(piece)

    @classmethod
    def allocate(
        cls, slices: Sequence[MatrixSlice], *, dtype: torch.dtype, device: torch.device
    ) -> tuple[list[Self], list[Tensor]]:
        """Return the weights of ``slices`` without values, and the two buffers of their scales, of bytes and fp32."""
        blocks = [ceil_div(piece.shape.numel(), NF4_BLOCK) for piece in slices]
        groups = [ceil_div(piece.full.numel(), NF4_BLOCK * NF4_SCALES_BLOCK) for piece in slices]
        codes = torch.zeros(sum(blocks), dtype=torch.uint8, device=device)
        floats = torch.zeros(sum(groups) + len(groups), dtype=torch.float32, device=device)
        sizes = [size for count in groups for size in (count, 1)]
        parts = iter(floats.split(sizes) if sizes else ())
        scales = codes.split(blocks) if blocks else ()
        weights = [
            cls(piece, dtype=dtype, scales=part, largest=next(parts), mean=next(parts))
            for piece, part in zip(slices, scales, strict=True)
        ]
        return weights, [codes, floats]

    def quantize_matrix(self, matrix: Tensor, *, expert: int | None = None) -> Tensor:
        """Set the scales to those of the full ``matrix``, and return the slice's elements [out · in / 2] of bytes."""
        return self.keep(*quantize_nf4(matrix.to(self.scales.device, self.dtype)))

    def keep(self, codes: Tensor, *scales: Tensor, expert: int | None = None) -> Tensor:
        """Set the scales to those of a full matrix, and return of its ``codes``, two in a byte, those of the slice.

        ``scales``: codes of the scales, their largest values and their mean [1], as ``quantize_nf4`` returns them.
        """
        blocks, largest, mean = scales
        self.scales.copy_(blocks[_list_blocks(self.runs, blocks.device)])
        self.largest.copy_(largest)
        self.mean.copy_(mean)
        if self.shape == self.piece.full:
            return codes
        return self.piece.cut(codes.view(self.piece.full[0], -1), columns=2).flatten()

    def dequantize(self, elements: Tensor) -> Tensor:
        """Return the weight [out, in] of all ``elements``."""
        out: Tensor = dequantize_nf4(
            elements, self.scales, self.largest, self.mean, list(self.shape), self.dtype, self.runs
        )
        return out

    def dequantize_rows(self, elements: Tensor, *, first: int, rows: int) -> Tensor:
        """Return ``rows`` rows from row ``first`` on in fp32; ``elements`` has only those of these rows."""
        columns = self.shape[1:].numel()
        scales = _absmax(self.scales, self.largest, self.mean, self.runs).repeat_interleave(NF4_BLOCK)
        values = _unpack(elements)[: rows * columns] * scales[first * columns : (first + rows) * columns]
        return values.to(self.dtype).float().view(rows, *self.shape[1:])


@torch.library.custom_op("fivefold::quantize_nf4", mutates_args=())
def quantize_nf4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the packed elements of ``weight``, the codes of its scales, their largest values and their mean [1]."""
    values, absmax = _scale_by_absmax(weight.float().flatten(), NF4_BLOCK)
    if weight.numel() % NF4_BLOCK:
        absmax[-1:].clamp_(min=SMALLEST)
    codes = _find_nearest(values, list_nf4_values(weight.device))
    codes = torch.nn.functional.pad(codes, (0, len(codes) % 2), value=ZERO_CODE)
    mean = absmax.mean(dim=0, keepdim=True)
    values, largest = _scale_by_absmax(absmax - mean, NF4_SCALES_BLOCK)
    on_cpu = weight.device.type == "cpu"
    if on_cpu:  # bitsandbytes' CPU kernel looks codes up in a table of this many steps
        values = ((values + 1) * TABLE_STEPS + 0.5).int() / TABLE_STEPS - 1
    scales = _find_nearest(values, list_scale_values(weight.device))
    if on_cpu:  # and gives equal absmax, which are 0 apart from their mean, the code 0
        scales.masked_fill_(largest.repeat_interleave(NF4_SCALES_BLOCK)[: len(scales)] == 0, 0)
    return (codes[::2] << 4) | codes[1::2], scales, largest, mean


@quantize_nf4.register_fake
def _(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    blocks = ceil_div(weight.numel(), NF4_BLOCK)
    sizes = (ceil_div(weight.numel(), 2), blocks)
    packed, scales = (weight.new_empty(size, dtype=torch.uint8) for size in sizes)
    largest, mean = (weight.new_empty(size, dtype=torch.float32) for size in (ceil_div(blocks, NF4_SCALES_BLOCK), 1))
    return packed, scales, largest, mean


@torch.library.custom_op("fivefold::dequantize_nf4", mutates_args=())
def dequantize_nf4(
    packed: Tensor,
    scales: Tensor,
    largest: Tensor,
    mean: Tensor,
    shape: list[int],
    dtype: torch.dtype,
    runs: list[int],
) -> Tensor:
    """Return the weight of ``shape`` in ``dtype``: products in fp32, rounded once."""
    out = torch.empty(shape, dtype=dtype, device=packed.device)
    flat, absmax = out.view(-1), _absmax(scales, largest, mean, runs)
    step = CHUNK_BLOCKS * NF4_BLOCK
    for start in range(0, flat.numel(), step):
        stop = min(start + step, flat.numel())
        values = _unpack(packed[start // 2 : ceil_div(stop, 2)])[: stop - start]
        full = (stop - start) // NF4_BLOCK * NF4_BLOCK
        chunk = absmax[start // NF4_BLOCK :]
        values[:full].view(-1, NF4_BLOCK).mul_(chunk[: full // NF4_BLOCK, None])
        if full < stop - start:
            values[full:].mul_(chunk[full // NF4_BLOCK])
        flat[start:stop] = values
    return out


@dequantize_nf4.register_fake
def _(
    packed: Tensor,
    scales: Tensor,
    largest: Tensor,
    mean: Tensor,
    shape: list[int],
    dtype: torch.dtype,
    runs: list[int],
) -> Tensor:
    return packed.new_empty(shape, dtype=dtype)


def _list_runs(piece: MatrixSlice) -> list[int]:
    """Return the blocks of a slice in the full weight: first, stride, number of runs and blocks of a run of each part.

    Full rows are one run of blocks that follow one another; of some columns each row is a run.
    """
    _, full_columns = piece.full
    runs = []
    for rows, columns in piece.parts:
        first = rows.start * full_columns + columns.start
        number, numel = rows.stop - rows.start, columns.stop - columns.start
        if numel == full_columns:
            number, numel = 1, number * full_columns
        runs += [first // NF4_BLOCK, full_columns // NF4_BLOCK, number, ceil_div(numel, NF4_BLOCK)]
    return runs


def _list_blocks(runs: list[int], device: torch.device) -> Tensor:
    """Return the numbers in the full weight of the blocks of ``runs`` (``_list_runs``)."""
    parts = []
    for first, stride, number, blocks in zip(*(iter(runs),) * 4, strict=True):
        starts = first + stride * torch.arange(number, device=device)
        parts.append((starts[:, None] + torch.arange(blocks, device=device)).flatten())
    return torch.cat(parts)


def _unpack(packed: Tensor) -> Tensor:
    """Return the values in fp32 of packed elements, two of each byte."""
    return _pairs(packed.device)[packed.int()].view(-1)


def _absmax(scales: Tensor, largest: Tensor, mean: Tensor, runs: list[int]) -> Tensor:
    """Return the absmax of each block in fp32."""
    values = list_scale_values(scales.device)[scales.int()]
    return values.mul_(largest[_list_blocks(runs, scales.device) // NF4_SCALES_BLOCK]).add_(mean)


def _scale_by_absmax(flat: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return fp32 ``flat`` in units of the |x| max of each block, and these."""
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % block)).view(-1, block)
    absmax = padded.abs().amax(1)
    scaled = (padded * (1 / absmax.clamp(min=SMALLEST))[:, None]).clamp_(-1, 1)
    return scaled.view(-1)[: len(flat)], absmax


def _find_nearest(flat: Tensor, values: Tensor) -> Tensor:
    """Return the indices of the nearest ``values``, which are sorted."""
    return torch.bucketize(flat, (values[:-1] + values[1:]) / 2, out_int32=True).to(torch.uint8)


@cache
def list_nf4_values(device: torch.device) -> Tensor:
    """Return the values of the 16 codes in fp32."""
    return torch.tensor(NF4_VALUES, device=device)


@cache
def _pairs(device: torch.device) -> Tensor:
    """Return the two values of each byte [256, 2]."""
    values = list_nf4_values(device)
    return torch.stack((values.repeat_interleave(16), values.repeat(16)), dim=1)


@cache
def list_scale_values(device: torch.device) -> Tensor:
    """Return the 256 values of the signed dynamic data type: 7 decades, each with twice the values of the one below.

    Source: arXiv:1511.04561; bitsandbytes' ``create_dynamic_map``.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        bounds = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32)
        means = 10 ** (decade - 6) * ((bounds[:-1] + bounds[1:]) / 2)
        values += [*means.tolist(), *(-means).tolist()]
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)

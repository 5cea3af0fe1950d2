"""Frozen weights in 4 bits in the formats of bitsandbytes: NormalFloat (nf4) or floats (fp4).

    block of 64 elements   absmax = max |w|; w / absmax → nearest of 16 values, two in a byte, the upper half first
    w ≈ value[code] · absmax

Double quantization (QLoRA) holds absmax in few bits too:

    256 of these absmax    minus their mean over the weight → one byte each, of 256 values between ± the largest
    absmax ≈ value2[code of absmax] · largest + mean

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

from fivefold.base_format import FOUR_BIT_BLOCK, FOUR_BIT_SCALES_BLOCK, BaseFormat
from fivefold.trainer.model.quantized.weight import MatrixSlice, QuantizedWeight
from fivefold.units import ceil_div

# By their codes: 16 quantiles of a normal distribution in [-1, 1], with an exact 0; and floats of a sign, two bits of
# exponent and one of mantissa, in units of the largest
VALUES: dict[str, tuple[float, ...]] = {
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "fp4": (0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0, 0, -0.0625, -8.0, -12.0, -4.0, -6.0, -2.0, -3.0),
}  # fmt: skip
SMALLEST = 1e-38  # absmax that values are divided by
TABLE_STEPS = 32767.5  # in each of the two halves of [-1, 1]; found by comparing codes, bitsandbytes 0.50.2
CHUNK_BLOCKS = 2**14  # blocks that are dequantized at once without a kernel of their own: 2**20 elements


class FourBitWeight(QuantizedWeight):
    """The scales of a weight [out, in] in 4 bits, whose elements are packed two to a byte.

    ``scales``: the absmax of each block of the slice in fp32. With double quantization: codes of these; the largest of
    each 256 of them in the full weight, whose blocks are in its order; and their mean [1]. ``runs``: see
    ``_list_runs``.
    """

    def __init__(self, base: BaseFormat, piece: MatrixSlice, *, dtype: torch.dtype, scales: list[Tensor]) -> None:
        self.base, self.piece, self.shape, self.dtype = base, piece, piece.shape, dtype
        self.scales = scales
        self.runs = _list_runs(piece)

    @classmethod
    def allocate(
        cls, base: BaseFormat, slices: Sequence[MatrixSlice], *, dtype: torch.dtype, device: torch.device
    ) -> tuple[list[Self], list[Tensor]]:
        """Return the weights of ``slices`` without values, and the buffers of their scales.

        With double quantization these are two, of bytes and fp32.
        """
        blocks = [ceil_div(piece.shape.numel(), FOUR_BIT_BLOCK) for piece in slices]
        block_dtype = torch.uint8 if base.double_quantization else torch.float32
        buffers = [torch.zeros(sum(blocks), dtype=block_dtype, device=device)]
        scales = [[part] for part in (buffers[0].split(blocks) if blocks else ())]
        if base.double_quantization:
            groups = [ceil_div(piece.full.numel(), FOUR_BIT_BLOCK * FOUR_BIT_SCALES_BLOCK) for piece in slices]
            buffers.append(torch.zeros(sum(groups) + len(groups), dtype=torch.float32, device=device))
            sizes = [size for count in groups for size in (count, 1)]
            outer = iter(buffers[1].split(sizes) if sizes else ())
            scales = [[*parts, next(outer), next(outer)] for parts in scales]
        weights = [cls(base, piece, dtype=dtype, scales=parts) for piece, parts in zip(slices, scales, strict=True)]
        return weights, buffers

    def quantize_matrix(self, matrix: Tensor, *, expert: int | None = None) -> Tensor:
        """Set the scales to those of the full ``matrix``, and return the slice's elements [out · in / 2] of bytes."""
        codes, scales = quantize_four_bit(matrix.to(self.scales[0].device, self.dtype), self.base.name)
        return self.keep(codes, *(quantize_scales(scales) if self.base.double_quantization else (scales,)))

    def keep(self, codes: Tensor, *scales: Tensor, expert: int | None = None) -> Tensor:
        """Set the scales to those of a full matrix, and return of its ``codes``, two in a byte, those of the slice.

        ``scales``: as ``quantize_four_bit`` or ``quantize_scales`` returns them.
        """
        blocks, *outer = scales
        self.scales[0].copy_(blocks[_list_blocks(self.runs, blocks.device)])
        for held, given in zip(self.scales[1:], outer, strict=True):
            held.copy_(given)
        if self.shape == self.piece.full:
            return codes
        return self.piece.cut(codes.view(self.piece.full[0], -1), columns=2).flatten()

    def dequantize(self, elements: Tensor) -> Tensor:
        """Return the weight [out, in] of all ``elements``."""
        return dequantize_four_bit(elements, self.scales, list(self.shape), self.dtype, self.base.name, self.runs)

    def dequantize_rows(self, elements: Tensor, *, first: int, rows: int) -> Tensor:
        """Return ``rows`` rows from row ``first`` on in fp32; ``elements`` has only those of these rows."""
        columns = self.shape[1:].numel()
        scales = _absmax(self.scales, self.runs).repeat_interleave(FOUR_BIT_BLOCK)
        values = (
            _unpack(elements, self.base.name)[: rows * columns] * scales[first * columns : (first + rows) * columns]
        )
        return values.to(self.dtype).float().view(rows, *self.shape[1:])


@torch.library.custom_op("fivefold::quantize_four_bit", mutates_args=())
def quantize_four_bit(weight: Tensor, base: str) -> tuple[Tensor, Tensor]:
    """Return the packed elements of ``weight`` in nf4 or fp4, and the absmax of its blocks."""
    values, absmax = _scale_by_absmax(weight.float().flatten(), FOUR_BIT_BLOCK)
    if weight.numel() % FOUR_BIT_BLOCK:
        absmax[-1:].clamp_(min=SMALLEST)
    values = torch.nn.functional.pad(values, (0, len(values) % 2))
    codebook = list_values(base, weight.device)
    order = codebook.argsort()  # codes of fp4 are not those of sorted values
    codes = order[_find_nearest(values, codebook[order]).int()].to(torch.uint8)
    return (codes[::2] << 4) | codes[1::2], absmax


@quantize_four_bit.register_fake
def _(weight: Tensor, base: str) -> tuple[Tensor, Tensor]:
    packed = weight.new_empty(ceil_div(weight.numel(), 2), dtype=torch.uint8)
    return packed, weight.new_empty(ceil_div(weight.numel(), FOUR_BIT_BLOCK), dtype=torch.float32)


@torch.library.custom_op("fivefold::quantize_scales", mutates_args=())
def quantize_scales(absmax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes of scales, the largest of each 256 without the mean, and their mean [1]."""
    mean = absmax.mean(dim=0, keepdim=True)
    values, largest = _scale_by_absmax(absmax - mean, FOUR_BIT_SCALES_BLOCK)
    on_cpu = absmax.device.type == "cpu"
    if on_cpu:  # bitsandbytes' CPU kernel looks codes up in a table of this many steps
        values = ((values + 1) * TABLE_STEPS + 0.5).int() / TABLE_STEPS - 1
    scales = _find_nearest(values, list_scale_values(absmax.device))
    if on_cpu:  # and gives equal absmax, which are 0 apart from their mean, the code 0
        scales.masked_fill_(largest.repeat_interleave(FOUR_BIT_SCALES_BLOCK)[: len(scales)] == 0, 0)
    return scales, largest, mean


@quantize_scales.register_fake
def _(absmax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    largest, mean = (absmax.new_empty(size) for size in (ceil_div(len(absmax), FOUR_BIT_SCALES_BLOCK), 1))
    return torch.empty_like(absmax, dtype=torch.uint8), largest, mean


@torch.library.custom_op("fivefold::dequantize_four_bit", mutates_args=())
def dequantize_four_bit(
    packed: Tensor, scales: list[Tensor], shape: list[int], dtype: torch.dtype, base: str, runs: list[int]
) -> Tensor:
    """Return the weight of ``shape`` in ``dtype``: products in fp32, rounded once."""
    out = torch.empty(shape, dtype=dtype, device=packed.device)
    flat, absmax = out.view(-1), _absmax(scales, runs)
    step = CHUNK_BLOCKS * FOUR_BIT_BLOCK
    for start in range(0, flat.numel(), step):
        stop = min(start + step, flat.numel())
        values = _unpack(packed[start // 2 : ceil_div(stop, 2)], base)[: stop - start]
        full = (stop - start) // FOUR_BIT_BLOCK * FOUR_BIT_BLOCK
        chunk = absmax[start // FOUR_BIT_BLOCK :]
        values[:full].view(-1, FOUR_BIT_BLOCK).mul_(chunk[: full // FOUR_BIT_BLOCK, None])
        if full < stop - start:
            values[full:].mul_(chunk[full // FOUR_BIT_BLOCK])
        flat[start:stop] = values
    return out


dequantize_four_bit.register_fake(lambda packed, scales, shape, dtype, *_: packed.new_empty(shape, dtype=dtype))


def _list_runs(piece: MatrixSlice) -> list[int]:
    """Return the blocks of a slice in the full weight: first, stride, number of runs and blocks of a run of each part.

    Full rows are one run of blocks that follow one another, and so is a full weight, whose parts may end within a
    block; of some columns each row is a run.
    """
    _, full_columns = piece.full
    runs = []
    for rows, columns in MatrixSlice.from_shape(piece.full).parts if piece.shape == piece.full else piece.parts:
        first = rows.start * full_columns + columns.start
        number, numel = rows.stop - rows.start, columns.stop - columns.start
        if numel == full_columns:
            number, numel = 1, number * full_columns
        runs += [first // FOUR_BIT_BLOCK, full_columns // FOUR_BIT_BLOCK, number, ceil_div(numel, FOUR_BIT_BLOCK)]
    return runs


def _list_blocks(runs: list[int], device: torch.device) -> Tensor:
    """Return the numbers in the full weight of the blocks of ``runs`` (``_list_runs``)."""
    parts = []
    for first, stride, number, blocks in zip(*(iter(runs),) * 4, strict=True):
        starts = first + stride * torch.arange(number, device=device)
        parts.append((starts[:, None] + torch.arange(blocks, device=device)).flatten())
    return torch.cat(parts)


def _unpack(packed: Tensor, base: str) -> Tensor:
    """Return the values in fp32 of packed elements, two of each byte."""
    return _pairs(base, packed.device)[packed.int()].view(-1)


def _absmax(scales: list[Tensor], runs: list[int]) -> Tensor:
    """Return the absmax of each block in fp32."""
    if len(scales) == 1:
        return scales[0]
    codes, largest, mean = scales
    values = list_scale_values(codes.device)[codes.int()]
    return values.mul_(largest[_list_blocks(runs, codes.device) // FOUR_BIT_SCALES_BLOCK]).add_(mean)


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
def list_values(base: str, device: torch.device) -> Tensor:
    """Return the values of the 16 codes of nf4 or fp4 in fp32."""
    values = torch.tensor(VALUES[base], device=device)
    return values / values.max()


@cache
def _pairs(base: str, device: torch.device) -> Tensor:
    """Return the two values of each byte [256, 2]."""
    values = list_values(base, device)
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

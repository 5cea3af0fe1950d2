"""Casts to fp8 with scales: value ≈ data · scale.

    factor = maximum of the format / largest |x| of the part        data = fp8(x · factor), scale = 1 / factor

One scale per tensor, matrix, row, 1 x 128 tile or 128 x 128 block (DeepSeek-V3, arXiv:2412.19437 §3.3). Rounds to
nearest even and saturates; NaN or infinity turns all elements of its scale into NaN. The scales equal those of torchao
0.18.0 bit for bit (pytorch/ao:torchao/float8/float8_utils.py, amax_to_scale).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.linalg import vector_norm

from fivefold.trainer.model.kernels.fused import casts
from fivefold.units import ceil_div

TILE = 128
MIN_AMAX = 1e-12  # lower bound of amax, so that zeros have a finite factor
CHUNK_ELEMENTS = 2**22  # elements that are converted to fp32 at a time
E4M3 = torch.float8_e4m3fn
ALL, ONE = 0, -1  # rows or columns per scale: ALL of a matrix; ONE scale for the full tensor


class Cast(NamedTuple):
    """A tensor in fp8: ``data`` [..., R, C] and ``scale`` in fp32.

    ``scale`` is [], or [..., R or 1 or blocks, C or 1 or tiles]. With one-byte scales (``blocks.py``) ``outer``
    [..., 1, 1] in fp32, if there is one, multiplies the full matrix.
    """

    data: Tensor
    scale: Tensor
    outer: Tensor | None = None


def cast_per_tensor(
    x: Tensor,
    *,
    amax: Tensor | None = None,
    dtype: torch.dtype = E4M3,
    power_of_two_scales: bool = False,
    fused: bool = False,
) -> Cast:
    """Cast with one scale [] for all of ``x``.

    ``amax``: max |x| if it is already known, of any shape that broadcasts to ``x``. ``power_of_two_scales``: the factor
    is rounded down to a power of two; ``fused``: use Triton's kernels, as in all casts here.
    """
    return Cast(*_cast(x, amax, ONE, ONE, dtype, power_of_two_scales, fused))


def cast_per_matrix(
    x: Tensor, *, dtype: torch.dtype = E4M3, power_of_two_scales: bool = False, fused: bool = False
) -> Cast:
    """Cast with one scale per matrix: ``x`` [..., R, C] → scale [..., 1, 1]."""
    return Cast(*_cast(x, None, ALL, ALL, dtype, power_of_two_scales, fused))


def cast_per_row(
    x: Tensor, *, dtype: torch.dtype = E4M3, power_of_two_scales: bool = False, fused: bool = False
) -> Cast:
    """Cast with one scale per row: ``x`` [..., R, C] → scale [..., R, 1]."""
    return Cast(*_cast(x, None, 1, ALL, dtype, power_of_two_scales, fused))


def cast_per_tile(
    x: Tensor, *, dtype: torch.dtype = E4M3, power_of_two_scales: bool = False, fused: bool = False
) -> Cast:
    """Cast with one scale per 1 x 128 tile: ``x`` [..., R, C] → scale [..., R, ⌈C/128⌉].

    The last tile of a row may be short.
    """
    return Cast(*_cast(x, None, 1, TILE, dtype, power_of_two_scales, fused))


# For rows dispatched to experts in fp8: with power-of-two scales the second cast, along columns for wgrad, changes
# only exponents (DeepSeek-V3 §3.3.3).
TILES_OF_POWERS = partial(cast_per_tile, power_of_two_scales=True)


def cast_per_block(
    w: Tensor, *, dtype: torch.dtype = E4M3, power_of_two_scales: bool = False, fused: bool = False
) -> Cast:
    """Cast with one scale per 128 x 128 block: ``w`` [..., R, C] → scale [..., ⌈R/128⌉, ⌈C/128⌉].

    Blocks at the border may be small.
    """
    return Cast(*_cast(w, None, TILE, TILE, dtype, power_of_two_scales, fused))


def widen(cast: Cast, dtype: torch.dtype) -> Tensor:
    """Dequantize: ``data`` · ``scale`` in ``dtype``, computed in fp32."""
    return _widen(cast.data, cast.scale, dtype)


def add_cast_(total: Tensor, cast: Cast, *, fresh: bool) -> None:
    """Add the matrices of ``cast`` to ``total`` [ranks, numel of a shard] in place, padded at the end.

    ``fresh``: overwrite ``total`` instead.
    """
    _add_cast_(total, cast.data, cast.scale, fresh)


def scale_(x: Tensor, scale: Tensor) -> None:
    """Multiply ``x`` [..., R, C] in place by a scale of the shapes that a ``Cast`` has."""
    _scale_(x, scale)


@torch.library.custom_op("fivefold::cast", mutates_args=())
def _cast(
    x: Tensor, amax: Tensor | None, rows: int, columns: int, dtype: torch.dtype, power_of_two_scales: bool, fused: bool
) -> tuple[Tensor, Tensor]:
    """Return data and scale, so that ``x`` ≈ data · scale, with a scale for each ``rows`` x ``columns`` elements.

    ``amax``: their largest absolute values if known, of the scale's shape; None: they are computed. It is one custom
    op, so that the dry run counts only its outputs, as for a fused kernel; ``fused``: a Triton kernel computes it.
    """
    data = torch.empty(x.shape, dtype=dtype, device=x.device)
    format_max = torch.finfo(dtype).max
    if fused and x.numel() and (amax is None or amax.numel() == 1):
        scale = x.new_empty(_scale_shape(x, rows, columns) if amax is None else amax.shape, dtype=torch.float32)
        casts.cast(x, amax, data, scale, rows=rows, columns=columns, power_of_two_scales=power_of_two_scales)
        return data, scale
    largest = _amax(x, rows, columns) if amax is None else amax
    factor = (format_max / largest.double().clamp(min=MIN_AMAX)).float()
    if power_of_two_scales:
        factor = factor.log2().floor_().exp2_()
    source, target = _rows(x), _rows(data)
    for row_slice in list_row_chunks(source):
        scaled = source[..., row_slice, :] * _broadcast_scale(factor, source.shape, row_slice)
        target[..., row_slice, :] = scaled.clamp_(-format_max, format_max).to(dtype)
    return data, factor.reciprocal()


@_cast.register_fake
def _(
    x: Tensor, amax: Tensor | None, rows: int, columns: int, dtype: torch.dtype, power_of_two_scales: bool, fused: bool
) -> tuple[Tensor, Tensor]:
    data = torch.empty(x.shape, dtype=dtype, device=x.device)
    return data, torch.empty(_scale_shape(x, rows, columns) if amax is None else amax.shape, device=x.device)


@torch.library.custom_op("fivefold::widen", mutates_args=())
def _widen(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute ``widen`` as one custom op."""
    out = torch.empty(data.shape, dtype=dtype, device=data.device)
    source, target = _rows(data), _rows(out)
    for row_slice in list_row_chunks(source):
        target[..., row_slice, :] = (
            source[..., row_slice, :].float().mul_(_broadcast_scale(scale, source.shape, row_slice)).to(dtype)
        )
    return out


_widen.register_fake(lambda data, scale, dtype: torch.empty(data.shape, dtype=dtype, device=data.device))


@torch.library.custom_op("fivefold::scale_", mutates_args=("x",))
def _scale_(x: Tensor, scale: Tensor) -> None:
    """Compute ``scale_`` as one custom op."""
    for row_slice in list_row_chunks(x):
        x[..., row_slice, :].mul_(_broadcast_scale(scale, x.shape, row_slice))


_scale_.register_fake(lambda *_: None)


@torch.library.custom_op("fivefold::add_cast_", mutates_args=("total",))
def _add_cast_(total: Tensor, data: Tensor, scale: Tensor, fresh: bool) -> None:
    """Compute ``add_cast_`` as one custom op."""
    values = widen(Cast(data, scale), torch.float32).view(-1)
    padded = F.pad(values, (0, total.numel() - values.numel())).view(total.shape)
    total.copy_(padded) if fresh else total.add_(padded)


_add_cast_.register_fake(lambda *_: None)


def _scale_shape(x: Tensor, rows: int, columns: int) -> tuple[int, ...]:
    """Return the shape of the scales of ``x`` with ``rows`` x ``columns`` elements each."""
    if rows == ONE:
        return ()
    parts = zip(x.shape[-2:], (rows, columns), strict=True)
    return (*x.shape[:-2], *(ceil_div(size, part_size) if part_size else 1 for size, part_size in parts))


def _amax(x: Tensor, rows: int, columns: int) -> Tensor:
    """Return max |x| of each ``rows`` x ``columns`` part, in fp32."""
    if x.numel() == 0:
        return x.new_zeros(_scale_shape(x, rows, columns), dtype=torch.float32)
    if rows == ONE:
        return vector_norm(x, torch.inf, dtype=torch.float32)
    if columns == ALL:
        dims = (-1,) if rows else (-2, -1)
        return vector_norm(x, torch.inf, dim=dims, keepdim=True, dtype=torch.float32)
    padded = F.pad(x, (0, -x.shape[-1] % columns, 0, -x.shape[-2] % rows))
    parts = padded.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
    return vector_norm(parts, torch.inf, dim=(-3, -1), dtype=torch.float32)


def _broadcast_scale(scale: Tensor, shape: torch.Size, part: slice) -> Tensor:
    """Return the scales for the rows ``part`` of a tensor of ``shape``, in a shape that broadcasts to them."""
    if scale.dim() < 2:
        return scale.view(-1)  # with a dim, so that type promotion makes the product fp32
    if scale.shape[-2] == shape[-2]:
        scale = scale[..., part, :]
    elif scale.shape[-2] > 1:
        rows = torch.arange(part.start, part.stop, device=scale.device) // TILE
        scale = scale.index_select(-2, rows)
    if scale.shape[-1] in (1, shape[-1]):
        return scale
    return scale.repeat_interleave(TILE, -1)[..., : shape[-1]]


def _rows(x: Tensor) -> Tensor:
    """Return ``x`` with at least two dims: a vector [n] as a column [n, 1]."""
    return x if x.dim() > 1 else x.view(-1, 1)


def list_row_chunks(x: Tensor) -> list[slice]:
    """Return slices of the rows of ``x``; each has at most ``CHUNK_ELEMENTS`` elements, or is one row."""
    rows, row_elements = x.shape[-2], max(1, x.numel() // max(1, x.shape[-2]))
    chunk_rows = max(1, CHUNK_ELEMENTS // row_elements)
    return [slice(start, min(start + chunk_rows, rows)) for start in range(0, rows, chunk_rows)]

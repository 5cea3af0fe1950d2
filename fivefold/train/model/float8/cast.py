"""Tensors in eight bits: what they hold times their scale is the value.

    factor = largest of the format / largest |x| of the part        data = fp8(x · factor), scale = 1 / factor

One scale for all, for each matrix, row, 1 x 128 tile or 128 x 128 block (DeepSeek-V3, arXiv:2412.19437 §3.3). Rounds
to nearest even and saturates; a NaN or an infinity makes NaN of all that shares its scale. Scales as torchao makes them
(torchao 0.18.0, pytorch/ao:torchao/float8/float8_utils.py, amax_to_scale), so that both hold the same bits.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.linalg import vector_norm

from fivefold.units import ceil_div

TILE = 128
LEAST = 1e-12  # largest |x| that a part of zeros is taken to have
CHUNK_ELEMENTS = 2**22  # that are fp32 at once
E4M3 = torch.float8_e4m3fn
ALL, ONE = 0, -1  # rows or columns that share a scale: as many as there are in a matrix; one scale for everything


class Cast(NamedTuple):
    """``data`` [..., R, C] in fp8, ``scale`` in fp32: one for all [], or [..., R or 1 or tiles, C or 1 or tiles]."""

    data: Tensor
    scale: Tensor


def by_tensor(x: Tensor, *, amax: Tensor | None = None, dtype: torch.dtype = E4M3, powers: bool = False) -> Cast:
    """One scale [] for all of ``x``; ``amax``: the largest |x| where it is known already, of any shape that spreads to
    that of ``x``. ``powers``: of two, below what would be."""
    return Cast(*_cast(x, amax, ONE, ONE, dtype, powers))


def by_matrix(x: Tensor, *, dtype: torch.dtype = E4M3, powers: bool = False) -> Cast:
    """``x`` [..., R, C] → scale [..., 1, 1]."""
    return Cast(*_cast(x, None, ALL, ALL, dtype, powers))


def by_row(x: Tensor, *, dtype: torch.dtype = E4M3, powers: bool = False) -> Cast:
    """``x`` [..., R, C] → scale [..., R, 1]."""
    return Cast(*_cast(x, None, 1, ALL, dtype, powers))


def by_tile(x: Tensor, *, dtype: torch.dtype = E4M3, powers: bool = False) -> Cast:
    """``x`` [..., R, C] → scale [..., R, C/128], the last of a row's tiles as long as what is left."""
    return Cast(*_cast(x, None, 1, TILE, dtype, powers))


# As rows travel to experts and are multiplied there: their scales are powers of two, so that those of another cast,
# along columns, change no more than the exponents (DeepSeek-V3 §3.3.3).
TILES_OF_POWERS = partial(by_tile, powers=True)


def by_block(w: Tensor, *, dtype: torch.dtype = E4M3, powers: bool = False) -> Cast:
    """``w`` [..., R, C] → scale [..., R/128, C/128], the last ones as large as what is left."""
    return Cast(*_cast(w, None, TILE, TILE, dtype, powers))


def widen(cast: Cast, dtype: torch.dtype) -> Tensor:
    """The values."""
    found: Tensor = _widen(cast.data, cast.scale, dtype)
    return found


def scale_(x: Tensor, scale: Tensor) -> None:
    """Multiply ``x`` [..., R, C], in place, by a scale as of a cast; what ``widen`` gives where ``x`` is the data."""
    _scale_(x, scale)


@torch.library.custom_op("fivefold::cast", mutates_args=())
def _cast(
    x: Tensor, amax: Tensor | None, rows: int, columns: int, dtype: torch.dtype, powers: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One operation, which on a GPU holds no more than it returns: so the dry run sees it."""
    top = torch.finfo(dtype).max
    largest = _largest(x, rows, columns) if amax is None else amax
    factor = (top / largest.double().clamp(min=LEAST)).float()
    if powers:
        factor = factor.log2().floor_().exp2_()
    data = torch.empty(x.shape, dtype=dtype, device=x.device)
    source, target = _rows(x), _rows(data)
    for part in _row_chunks(source):
        wide = source[..., part, :] * _spread(factor, source.shape, part)
        target[..., part, :] = wide.clamp_(-top, top).to(dtype)
    return data, factor.reciprocal()


@_cast.register_fake
def _(
    x: Tensor, amax: Tensor | None, rows: int, columns: int, dtype: torch.dtype, powers: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    data = torch.empty(x.shape, dtype=dtype, device=x.device)
    return data, torch.empty(_scales(x, rows, columns) if amax is None else amax.shape, device=x.device)


@torch.library.custom_op("fivefold::widen", mutates_args=())
def _widen(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(data.shape, dtype=dtype, device=data.device)
    source, target = _rows(data), _rows(out)
    for part in _row_chunks(source):
        target[..., part, :] = source[..., part, :].float().mul_(_spread(scale, source.shape, part)).to(dtype)
    return out


@_widen.register_fake
def _(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(data.shape, dtype=dtype, device=data.device)


@torch.library.custom_op("fivefold::scale_", mutates_args=("x",))
def _scale_(x: Tensor, scale: Tensor) -> None:
    for part in _row_chunks(x):
        x[..., part, :].mul_(_spread(scale, x.shape, part))


@_scale_.register_fake
def _(x: Tensor, scale: Tensor) -> None:
    pass


def _scales(x: Tensor, rows: int, columns: int) -> tuple[int, ...]:
    if rows == ONE:
        return ()
    parts = zip(x.shape[-2:], (rows, columns), strict=True)
    return (*x.shape[:-2], *(ceil_div(size, few) if few else 1 for size, few in parts))


def _largest(x: Tensor, rows: int, columns: int) -> Tensor:
    """|x| of each part, in fp32."""
    if x.numel() == 0:
        return x.new_zeros(_scales(x, rows, columns), dtype=torch.float32)
    if rows == ONE:
        return vector_norm(x, torch.inf, dtype=torch.float32)  # type: ignore[no-any-return]
    if columns == ALL:
        dims = (-1,) if rows else (-2, -1)
        return vector_norm(x, torch.inf, dim=dims, keepdim=True, dtype=torch.float32)  # type: ignore[no-any-return]
    padded = F.pad(x, (0, -x.shape[-1] % columns, 0, -x.shape[-2] % rows))
    parts = padded.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
    return vector_norm(parts, torch.inf, dim=(-3, -1), dtype=torch.float32)  # type: ignore[no-any-return]


def _spread(scale: Tensor, shape: torch.Size, part: slice) -> Tensor:
    """Of the rows ``part`` of a tensor of ``shape``, each element's, or one that stands for many."""
    if scale.dim() < 2:
        return scale.view(-1)  # with a dim, so that what it multiplies is widened to fp32
    if scale.shape[-2] == shape[-2]:
        scale = scale[..., part, :]
    elif scale.shape[-2] > 1:
        rows = torch.arange(part.start, part.stop, device=scale.device) // TILE
        scale = scale.index_select(-2, rows)
    if scale.shape[-1] in (1, shape[-1]):
        return scale
    return scale.repeat_interleave(TILE, -1)[..., : shape[-1]]


def _rows(x: Tensor) -> Tensor:
    """A flat one as a column."""
    return x if x.dim() > 1 else x.view(-1, 1)


def _row_chunks(x: Tensor) -> list[slice]:
    """Rows so few that they have no more than ``CHUNK_ELEMENTS`` elements."""
    rows, each = x.shape[-2], max(1, x.numel() // max(1, x.shape[-2]))
    few = max(1, CHUNK_ELEMENTS // each)
    return [slice(start, min(start + few, rows)) for start in range(0, rows, few)]

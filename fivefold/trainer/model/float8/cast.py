"""Casts to fp8 with scales: value ≈ data · scale.

    factor = largest of the format / largest |x| of the part        data = fp8(x · factor), scale = 1 / factor

One scale per tensor, matrix, row, 1 x 128 tile or 128 x 128 block (DeepSeek-V3, arXiv:2412.19437 §3.3). Rounds to
nearest even and saturates; NaN or infinity turns all elements of its scale into NaN. Bit for bit the scales of torchao
0.18.0 (pytorch/ao:torchao/float8/float8_utils.py, amax_to_scale).
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
LEAST = 1e-12  # lower bound of amax, so that zeros have a finite factor
CHUNK_ELEMENTS = 2**22  # elements that are widened to fp32 at a time
E4M3 = torch.float8_e4m3fn
ALL, ONE = 0, -1  # rows or columns per scale: ALL of a matrix; ONE scale for the whole tensor


class Cast(NamedTuple):
    """``data`` [..., R, C] in fp8 and ``scale`` in fp32: [], or [..., R or 1 or blocks, C or 1 or tiles]. With scales
    of one byte (``blocks.py``) ``outer`` [..., 1, 1] in fp32, if there is one, multiplies the whole matrix.
    """

    data: Tensor
    scale: Tensor
    outer: Tensor | None = None


def by_tensor(
    x: Tensor, *, amax: Tensor | None = None, dtype: torch.dtype = E4M3, powers: bool = False, fused: bool = False
) -> Cast:  # fmt: skip
    """One scale [] for all of ``x``; ``amax``: max |x| if it is known already, of any shape that broadcasts to ``x``.
    ``powers``: the factor is rounded down to a power of two; ``fused``: by Triton's kernels, as in all of these."""
    return Cast(*_cast(x, amax, ONE, ONE, dtype, powers, fused))


def by_matrix(
    x: Tensor, *, dtype: torch.dtype = E4M3, powers: bool = False, fused: bool = False
) -> Cast:  # fmt: skip
    """One scale per matrix: ``x`` [..., R, C] → scale [..., 1, 1]."""
    return Cast(*_cast(x, None, ALL, ALL, dtype, powers, fused))


def by_row(
    x: Tensor, *, dtype: torch.dtype = E4M3, powers: bool = False, fused: bool = False
) -> Cast:  # fmt: skip
    """One scale per row: ``x`` [..., R, C] → scale [..., R, 1]."""
    return Cast(*_cast(x, None, 1, ALL, dtype, powers, fused))


def by_tile(
    x: Tensor, *, dtype: torch.dtype = E4M3, powers: bool = False, fused: bool = False
) -> Cast:  # fmt: skip
    """One scale per 1 x 128 tile: ``x`` [..., R, C] → scale [..., R, ⌈C/128⌉]; the last tile of a row may be short."""
    return Cast(*_cast(x, None, 1, TILE, dtype, powers, fused))


# For rows dispatched to experts in fp8: with power-of-two scales the second cast, along columns for wgrad, changes
# only exponents (DeepSeek-V3 §3.3.3).
TILES_OF_POWERS = partial(by_tile, powers=True)


def by_block(
    w: Tensor, *, dtype: torch.dtype = E4M3, powers: bool = False, fused: bool = False
) -> Cast:  # fmt: skip
    """One scale per 128 x 128 block: ``w`` [..., R, C] → scale [..., ⌈R/128⌉, ⌈C/128⌉]; border blocks may be small."""
    return Cast(*_cast(w, None, TILE, TILE, dtype, powers, fused))


def widen(cast: Cast, dtype: torch.dtype) -> Tensor:
    """Dequantise: ``data`` · ``scale`` in ``dtype``, computed in fp32."""
    found: Tensor = _widen(cast.data, cast.scale, dtype)
    return found


def add_cast_(total: Tensor, cast: Cast, *, fresh: bool) -> None:
    """Add the matrices of ``cast`` to ``total`` [ranks, numel of a shard] in place, padded at the end; ``fresh``: write
    over it.
    """
    _add_cast_(total, cast.data, cast.scale, fresh)


def scale_(x: Tensor, scale: Tensor) -> None:
    """Multiply ``x`` [..., R, C] in place by a scale of the shapes that a ``Cast`` has."""
    _scale_(x, scale)


@torch.library.custom_op("fivefold::cast", mutates_args=())
def _cast(
    x: Tensor, amax: Tensor | None, rows: int, columns: int, dtype: torch.dtype, powers: bool, fused: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Data and scale as one custom op, so that the dry run counts only its outputs, as of a fused GPU kernel."""
    data, top = torch.empty(x.shape, dtype=dtype, device=x.device), torch.finfo(dtype).max
    if fused and x.numel() and (amax is None or amax.numel() == 1):
        scale = x.new_empty(_scale_shape(x, rows, columns) if amax is None else amax.shape, dtype=torch.float32)
        casts.cast(x, amax, data, scale, rows=rows, columns=columns, powers=powers)
        return data, scale
    largest = _amax(x, rows, columns) if amax is None else amax
    factor = (top / largest.double().clamp(min=LEAST)).float()
    if powers:
        factor = factor.log2().floor_().exp2_()
    source, target = _rows(x), _rows(data)
    for part in row_chunks(source):
        wide = source[..., part, :] * _broadcast_scale(factor, source.shape, part)
        target[..., part, :] = wide.clamp_(-top, top).to(dtype)
    return data, factor.reciprocal()


@_cast.register_fake
def _(
    x: Tensor, amax: Tensor | None, rows: int, columns: int, dtype: torch.dtype, powers: bool, fused: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    data = torch.empty(x.shape, dtype=dtype, device=x.device)
    return data, torch.empty(_scale_shape(x, rows, columns) if amax is None else amax.shape, device=x.device)


@torch.library.custom_op("fivefold::widen", mutates_args=())
def _widen(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``widen`` as one custom op."""
    out = torch.empty(data.shape, dtype=dtype, device=data.device)
    source, target = _rows(data), _rows(out)
    for part in row_chunks(source):
        target[..., part, :] = source[..., part, :].float().mul_(_broadcast_scale(scale, source.shape, part)).to(dtype)
    return out


@_widen.register_fake
def _(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(data.shape, dtype=dtype, device=data.device)


@torch.library.custom_op("fivefold::scale_", mutates_args=("x",))
def _scale_(x: Tensor, scale: Tensor) -> None:
    """``scale_`` as one custom op."""
    for part in row_chunks(x):
        x[..., part, :].mul_(_broadcast_scale(scale, x.shape, part))


@_scale_.register_fake
def _(x: Tensor, scale: Tensor) -> None:
    pass


@torch.library.custom_op("fivefold::add_cast_", mutates_args=("total",))
def _add_cast_(total: Tensor, data: Tensor, scale: Tensor, fresh: bool) -> None:
    """``add_cast_`` as one custom op."""
    wide = widen(Cast(data, scale), torch.float32).view(-1)
    padded = F.pad(wide, (0, total.numel() - wide.numel())).view(total.shape)
    total.copy_(padded) if fresh else total.add_(padded)


@_add_cast_.register_fake
def _(total: Tensor, data: Tensor, scale: Tensor, fresh: bool) -> None:
    pass


def _scale_shape(x: Tensor, rows: int, columns: int) -> tuple[int, ...]:
    """Shape of the scales of ``x`` with ``rows`` x ``columns`` elements each."""
    if rows == ONE:
        return ()
    parts = zip(x.shape[-2:], (rows, columns), strict=True)
    return (*x.shape[:-2], *(ceil_div(size, few) if few else 1 for size, few in parts))


def _amax(x: Tensor, rows: int, columns: int) -> Tensor:
    """Max |x| of each ``rows`` x ``columns`` part, in fp32."""
    if x.numel() == 0:
        return x.new_zeros(_scale_shape(x, rows, columns), dtype=torch.float32)
    if rows == ONE:
        return vector_norm(x, torch.inf, dtype=torch.float32)  # type: ignore[no-any-return]
    if columns == ALL:
        dims = (-1,) if rows else (-2, -1)
        return vector_norm(x, torch.inf, dim=dims, keepdim=True, dtype=torch.float32)  # type: ignore[no-any-return]
    padded = F.pad(x, (0, -x.shape[-1] % columns, 0, -x.shape[-2] % rows))
    parts = padded.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
    return vector_norm(parts, torch.inf, dim=(-3, -1), dtype=torch.float32)  # type: ignore[no-any-return]


def _broadcast_scale(scale: Tensor, shape: torch.Size, part: slice) -> Tensor:
    """Scales for the rows ``part`` of a tensor of ``shape``, in a shape that broadcasts to them."""
    if scale.dim() < 2:
        return scale.view(-1)  # with a dim, so that type promotion widens the product to fp32
    if scale.shape[-2] == shape[-2]:
        scale = scale[..., part, :]
    elif scale.shape[-2] > 1:
        rows = torch.arange(part.start, part.stop, device=scale.device) // TILE
        scale = scale.index_select(-2, rows)
    if scale.shape[-1] in (1, shape[-1]):
        return scale
    return scale.repeat_interleave(TILE, -1)[..., : shape[-1]]


def _rows(x: Tensor) -> Tensor:
    """``x`` with at least two dims: a vector [n] as a column [n, 1]."""
    return x if x.dim() > 1 else x.view(-1, 1)


def row_chunks(x: Tensor) -> list[slice]:
    """Slices of the rows of ``x``; each has at most ``CHUNK_ELEMENTS`` elements, or is one row."""
    rows, each = x.shape[-2], max(1, x.numel() // max(1, x.shape[-2]))
    few = max(1, CHUNK_ELEMENTS // each)
    return [slice(start, min(start + few, rows)) for start in range(0, rows, few)]

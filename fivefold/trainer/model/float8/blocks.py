"""Casts to short blocks along a row, each with a scale of one byte: MXFP8 and NVFP4.

    MXFP8   32 share 2^⌈log2(amax / 448)⌉ in e8m0                                    data = e4m3(x / scale)
    NVFP4   16 share e4m3(amax / 6 / outer), outer = amax of the matrix / (6 · 448)  data = e2m1(x / (scale · outer))

Round to nearest even, saturating; no stochastic rounding, no Hadamard transform. Two e2m1 share a byte, the first in
its low half. OCP MX v1.0 §5 with NVIDIA's rounding up of scales (arXiv:2506.08027 §3.1); NVFP4: arXiv:2509.25149.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.linalg import vector_norm

from fivefold.trainer.model.float8.cast import E4M3, Cast, list_row_chunks
from fivefold.units import ceil_div

MX, NV = 32, 16  # elements that share a scale
E8M0 = torch.float8_e8m0fnu
LARGEST_VALUE = {MX: 448.0, NV: 6.0}  # of e4m3 and of e2m1
BIAS = 127  # of e8m0
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # value of each code; bit 3 is the sign
# |x| at or below the n-th rounds to code n or less: halfway between neighbours; ties go to the even code
_HALVES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def cast_mxfp8(x: Tensor) -> Cast:
    """Cast to MXFP8: ``x`` [..., R, C] → data e4m3 [..., R, C], scale e8m0 [..., R, ⌈C/32⌉].

    The last block may be short.
    """
    data, scale, _ = _cast_blocks(x, None, MX)
    return Cast(data, scale)


def cast_nvfp4(x: Tensor, *, amax: Tensor | None = None) -> Cast:
    """Cast to NVFP4: ``x`` [..., R, C] → data uint8 [..., R, ⌈C/2⌉], scale e4m3 [..., R, ⌈C/16⌉], outer [..., 1, 1].

    ``outer`` is fp32. ``amax``: the largest |x| of each matrix if it is already known, of outer's shape.
    """
    return Cast(*_cast_blocks(x, amax, NV))


def has_block_scales(cast: Cast) -> bool:
    """Return whether ``cast`` is in MXFP8 or NVFP4."""
    return cast.scale.dtype in (E8M0, E4M3)


def dequantize(cast: Cast) -> Tensor:
    """Dequantize to fp32 without ``outer``; an odd row of NVFP4 gets one more zero."""
    is_nvfp4 = cast.data.dtype == torch.uint8
    data = _unpack(cast.data) if is_nvfp4 else cast.data.float()
    return data.mul_(cast.scale.float().repeat_interleave(NV if is_nvfp4 else MX, -1)[..., : data.shape[-1]])


def widen_blocks(cast: Cast, *, columns: int) -> Tensor:
    """Dequantize to fp32 [..., R, ``columns``]."""
    values = dequantize(cast)[..., :columns]
    return values if cast.outer is None else values * cast.outer


def product_of_blocks(a: Cast, b: Cast) -> Tensor:
    """Multiply ``a`` [M, K] by ``b`` [N, K] transposed → fp32 [M, N]."""
    product = dequantize(a) @ dequantize(b).t()
    for outer in (a.outer, b.outer):
        if outer is not None:
            product.mul_(outer)
    return product


@torch.library.custom_op("fivefold::cast_blocks", mutates_args=())
def _cast_blocks(x: Tensor, amax: Tensor | None, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute data, scale and outer (no elements for MXFP8) as one custom op; ``amax``: see ``cast_nvfp4``."""
    data, scale, outer = _empty(x, group_size)
    if group_size == NV:
        if amax is None:
            amax = vector_norm(x, torch.inf, dim=(-2, -1), keepdim=True, dtype=torch.float32) if x.numel() else outer
        outer = (amax / (LARGEST_VALUE[NV] * LARGEST_VALUE[MX])).view(outer.shape)
    for part in list_row_chunks(x):
        rows = x[..., part, :].float()
        data[..., part, :], scale[..., part, :] = _mx(rows) if group_size == MX else _nv(rows, outer)
    return data, scale, outer


_cast_blocks.register_fake(lambda x, amax, group_size: _empty(x, group_size))


def _empty(x: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    *stacked, rows, columns = x.shape
    is_nvfp4 = group_size == NV
    data = x.new_empty(
        *stacked, rows, ceil_div(columns, 2) if is_nvfp4 else columns, dtype=torch.uint8 if is_nvfp4 else E4M3
    )
    scale = x.new_empty(*stacked, rows, ceil_div(columns, group_size), dtype=E4M3 if is_nvfp4 else E8M0)
    return data, scale, x.new_empty(*((*stacked, 1, 1) if is_nvfp4 else (0,)), dtype=torch.float32)


def _mx(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return data and scale of fp32 ``x``."""
    amax = _block_amax(x, MX).double()
    mantissa, exponent = torch.frexp(amax / LARGEST_VALUE[MX])
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).masked_fill(amax == 0, -BIAS)
    biased = (exponent + BIAS).clamp(0, 2 * BIAS)
    inverse = (2 * BIAS - biased).to(torch.uint8).view(E8M0).float()
    scale = biased.masked_fill(~amax.isfinite(), 2 * BIAS + 1).to(torch.uint8).view(E8M0)
    scaled = x * inverse.repeat_interleave(MX, -1)[..., : x.shape[-1]]
    return scaled.clamp_(-LARGEST_VALUE[MX], LARGEST_VALUE[MX]).to(E4M3), scale


def _nv(x: Tensor, outer: Tensor) -> tuple[Tensor, Tensor]:
    """Return packed data and scale of fp32 ``x``; a block whose scale is 0 becomes 0."""
    scale = (_block_amax(x, NV) / LARGEST_VALUE[NV] / outer).masked_fill_(outer == 0, 0.0)
    scale = scale.clamp_(max=LARGEST_VALUE[MX]).to(E4M3)
    full_scale = (scale.float() * outer).repeat_interleave(NV, -1)[..., : x.shape[-1]]
    ratio = (x / full_scale).masked_fill_(full_scale == 0, 0.0)
    code = round_to_e2m1(ratio)
    code = F.pad(code, (0, code.shape[-1] % 2))
    return code[..., ::2] | (code[..., 1::2] << 4), scale


def round_to_e2m1(x: Tensor) -> Tensor:
    """Return the code of the nearest value of E2M1 in a byte each; ties go to the even code, and beyond 6 to 6."""
    halves = torch.tensor(_HALVES, device=x.device)
    halves[1::2] = halves[1::2].nextafter(halves.new_zeros(()))
    code = torch.bucketize(x.abs().contiguous(), halves, out_int32=True) | (x.signbit().int() << 3)
    return code.to(torch.uint8)


def _unpack(data: Tensor) -> Tensor:
    """Unpack bytes [..., C] to fp32 [..., 2 C]."""
    values = torch.tensor([*E2M1, *(-value for value in E2M1)], device=data.device)
    return values[torch.stack((data & 15, data >> 4), -1).flatten(-2).int()]


def _block_amax(x: Tensor, group_size: int) -> Tensor:
    """Return the largest |x| of each block of a row, fp32 [..., R, ⌈C/each⌉]."""
    padded = F.pad(x, (0, -x.shape[-1] % group_size))
    return vector_norm(padded.unflatten(-1, (-1, group_size)), torch.inf, dim=-1)

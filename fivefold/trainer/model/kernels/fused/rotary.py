"""Rotary embedding in one kernel that also copies the dims that are not rotated. Saved: the tables."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fivefold.trainer.model.kernels.fused.launch import round_up_to_power_of_two


class _FusedRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, first: int) -> Tensor:
        ctx.first = first
        ctx.save_for_backward(cos, sin)
        return rotate(x, cos, sin, first, False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return rotate(grad, cos, sin, ctx.first, True), None, None, None


def rotate_first(x_BTNH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
    """Compute ``rotate_first`` of ``kernels/rotary.py`` in one kernel."""
    return _FusedRotate.apply(x_BTNH, cos_TH, sin_TH, 0)


def rotate_last(x_BTNH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
    """Compute ``rotate_last`` of ``kernels/rotary.py`` in one kernel."""
    first = x_BTNH.shape[-1] - cos_TH.shape[-1]
    return _FusedRotate.apply(x_BTNH, cos_TH, sin_TH, first)


def append_rotated(k_BTNH: Tensor, key_BT1H: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
    """Compute ``append_rotated`` of ``kernels/rotary.py``: a kernel rotates the shared key, PyTorch copies it."""
    rotated_key = rotate_first(key_BT1H, cos_TH, sin_TH)
    return torch.cat((k_BTNH, rotated_key.expand(-1, -1, k_BTNH.shape[2], -1)), dim=-1)


@torch.library.custom_op("fivefold::rotate", mutates_args=())
def rotate(x: Tensor, cos: Tensor, sin: Tensor, first: int, is_inverse: bool) -> Tensor:
    """Rotate ``x`` [B, T, N, H], dims from ``first``, by tables [T, 1, h] or their inverse → contiguous."""
    from fivefold.trainer.model.kernels.triton import rotary

    source = x if x.stride(-1) == 1 else x.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sequences, tokens, heads, dim = x.shape
    rotated_dims = cos.shape[-1]
    cos, sin = cos.contiguous(), sin.contiguous()
    if y.numel():
        head_elements = round_up_to_power_of_two(heads) * round_up_to_power_of_two(dim)
        rotary.turn[(sequences * tokens,)](
            source,
            cos,
            sin,
            y,
            tokens,
            heads,
            dim,
            first,
            rotated_dims,
            *source.stride()[:3],
            -1.0 if is_inverse else 1.0,
            HEADS=round_up_to_power_of_two(heads),
            HALF=round_up_to_power_of_two(rotated_dims // 2),
            REST=round_up_to_power_of_two(dim - rotated_dims) if dim > rotated_dims else 0,
            num_warps=min(16, max(1, head_elements // 512)),
        )
    return y


rotate.register_fake(lambda x, *_: torch.empty(x.shape, dtype=x.dtype, device=x.device))

"""Rotary position embedding (arXiv:2104.09864) as an autograd function: it saves the tables, nothing of x."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x · cos + (x with its halves swapped) · sin."""
    low, high = x.chunk(2, dim=-1)
    return (x * cos).add_(torch.cat((high, low), dim=-1).mul_(sin))


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return turn(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return turn(grad, cos, -sin), None, None


def rotate(x_BTNH: Tensor, *, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
    """Apply rotary position embedding over halves of the head dim, by ``rotary_tables`` [T, 1, H] in ``x``'s dtype."""
    return _Rotate.apply(x_BTNH, cos_TH, sin_TH)


def rotate_first(x_BTNH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
    """Rotate the first dims of each head, as many as the tables have; the others are unchanged."""
    n_unrotated = x_BTNH.shape[-1] - cos_TH.shape[-1]
    if not n_unrotated:
        return rotate(x_BTNH, cos_TH=cos_TH, sin_TH=sin_TH)
    rotated_dims, unrotated_dims = x_BTNH.split((cos_TH.shape[-1], n_unrotated), dim=-1)
    return torch.cat((rotate(rotated_dims, cos_TH=cos_TH, sin_TH=sin_TH), unrotated_dims), dim=-1)


def rotate_last(x_BTNH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
    """Rotate the last dims of each head, as many as the tables have; the others are unchanged."""
    unrotated_dims, rotated_dims = x_BTNH.split((x_BTNH.shape[-1] - cos_TH.shape[-1], cos_TH.shape[-1]), dim=-1)
    return torch.cat((unrotated_dims, rotate(rotated_dims, cos_TH=cos_TH, sin_TH=sin_TH)), dim=-1)


def append_rotated(k_BTNH: Tensor, key_BT1H: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
    """Append the rotary key [B, T, 1, H], rotated, to the key of every head."""
    rotated_key = rotate(key_BT1H, cos_TH=cos_TH, sin_TH=sin_TH)
    return torch.cat((k_BTNH, rotated_key.expand(-1, -1, k_BTNH.shape[2], -1)), dim=-1)


def turn_pairs(x: Tensor, cos: Tensor, sin: Tensor, *, sign: int = 1) -> Tensor:
    """Return a copy of ``x`` whose last dims, as many as the tables have, are rotated in pairs of neighbours."""
    out = x.contiguous().clone()
    last = out[..., -cos.shape[-1] :]
    swapped = last.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    last.mul_(cos).addcmul_(swapped, sin, value=sign)
    return out


class _RotatePairs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.sign = sign
        return turn_pairs(x, cos, sin, sign=sign)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return turn_pairs(grad, cos, sin, sign=-ctx.sign), None, None, None


def rotate_pairs(x_BTNH: Tensor, cos_TH: Tensor, sin_TH: Tensor, is_inverse: bool = False) -> Tensor:
    """Rotate the last dims of each head in pairs of neighbours, by tables ``paired``; ``is_inverse``: back."""
    return _RotatePairs.apply(x_BTNH, cos_TH, sin_TH, -1 if is_inverse else 1)

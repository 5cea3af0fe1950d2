"""Norms as autograd functions: keep x and one fp32 statistic per row (two for LayerNorm).

    rms    x / rms(x) · w        layer    (x − mean(x)) / std(x) · w + b        over the last dim

Sources: Zhang and Sennrich, arXiv:1910.07467; Ba et al., arXiv:1607.06450.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        rstd = norm.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        return torch.mul(x, rstd).to(x.dtype).mul_(weight)  # x · rstd is fp32, as rstd is

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, rstd = ctx.saved_tensors
        normal = x * rstd  # fp32, as is all below
        product = grad * normal
        weight_grad = product.flatten(0, -2).sum(0).to(weight.dtype)
        inner = product.mul_(weight).mean(-1, keepdim=True)
        del product
        wide = grad * weight.float()
        return wide.sub_(normal.mul_(inner)).mul_(rstd).to(x.dtype), weight_grad, None


def rms_norm(x: Tensor, weight: Tensor, *, epsilon: float) -> Tensor:
    """``x / rms(x) · weight`` over the last dim, computed in fp32. ``x`` [..., D], ``weight`` [D] → [..., D]."""
    out: Tensor = _RmsNorm.apply(x, weight, epsilon)  # type: ignore[no-untyped-call]
    return out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, *, epsilon: float) -> Tensor:
    """``(x − mean) / std · weight + bias`` over the last dim. ``x`` [..., D], ``weight``, ``bias`` [D] → [..., D]."""
    return F.layer_norm(x, weight.shape, weight, bias, epsilon)

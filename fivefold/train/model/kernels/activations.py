"""Activations of feed-forward layers as autograd functions: keep their inputs, and compute the activation again.

swiglu    silu(gate) · up        weighted_swiglu    silu(gate) · up · share of a row (experts)
clamped   g σ(1.702 g) (u + 1), g = gate up to 7, u = up from −7 to 7 (gpt-oss, arXiv:2508.10925)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

GAIN, LIMIT = 1.702, 7.0


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        up_grad = F.silu(gate).mul_(grad)
        return torch.ops.aten.silu_backward(grad * up, gate), up_grad


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) · up``, elementwise (Shazeer, arXiv:2002.05202)."""
    out: Tensor = _Swiglu.apply(gate, up)  # type: ignore[no-untyped-call]
    return out


class _WeightedSwiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, share: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, share)
        return F.silu(gate).mul_(up).mul_(share[:, None])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate, up, share = ctx.saved_tensors
        silu = F.silu(gate)
        share_gradient = (gradient * up).mul_(silu).sum(-1, dtype=share.dtype)
        weighted = (gradient * share[:, None]).to(gradient.dtype)
        up_gradient = silu.mul_(weighted)
        return torch.ops.aten.silu_backward(weighted.mul_(up), gate), up_gradient, share_gradient


def weighted_swiglu(gate: Tensor, up: Tensor, share: Tensor) -> Tensor:
    """``silu(gate) · up · share``; ``gate``, ``up`` [n, F], ``share`` [n] in fp32."""
    out: Tensor = _WeightedSwiglu.apply(gate, up, share)  # type: ignore[no-untyped-call]
    return out


class _WeightedClamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, share: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, share)
        out = gate.clamp(max=LIMIT)
        out.mul_((out * GAIN).sigmoid_())
        return out.mul_(up.clamp(-LIMIT, LIMIT).add_(1)).mul_(share[:, None])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate, up, share = ctx.saved_tensors
        weighted = (gradient * share[:, None]).to(gradient.dtype)
        low, bound = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        sigmoid = (low * GAIN).sigmoid_()
        glu = low * sigmoid
        share_gradient = (bound + 1).mul_(gradient).mul_(glu).sum(-1, dtype=share.dtype)
        up_gradient = glu.mul_(weighted).masked_fill_(bound.ne(up), 0)
        # d/dg of g σ(αg) is σ (1 + αg (1 − σ))
        slope = low.mul_(GAIN).addcmul_(low, sigmoid, value=-1).add_(1).mul_(sigmoid)
        gate_gradient = slope.mul_(weighted).mul_(bound.add_(1)).masked_fill_(gate.gt(LIMIT), 0)
        return gate_gradient, up_gradient, share_gradient


def weighted_clamped_swiglu(gate: Tensor, up: Tensor, share: Tensor) -> Tensor:
    """The clamped SwiGLU of ``gate``, ``up`` [n, F], times ``share`` [n] in fp32."""
    out: Tensor = _WeightedClamped.apply(gate, up, share)  # type: ignore[no-untyped-call]
    return out

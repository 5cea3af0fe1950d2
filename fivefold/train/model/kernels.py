"""Memory-bound operations as autograd functions that keep as little as a GPU kernel would.

    rms_norm keeps x and 1/rms · swiglu keeps gate and up · rotate keeps nothing · cross_entropy turns the logits, in
    the dtype of the matmuls, into their own gradient in place.

Written out here so that CPU, GPU and fake tensors keep the same bytes, which ``plan/count/operations/op.py`` counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fivefold.job import LOSS_CHUNK_ELEMENTS

Nats = Callable[[Tensor, Tensor, Tensor | float | None], Tensor]  # as ``nats``


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        rstd = norm.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        return torch.mul(x, rstd).to(x.dtype).mul_(weight)  # the product is fp32, as rstd is

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, rstd = ctx.saved_tensors
        normal = x * rstd  # this and all below in fp32
        product = grad * normal
        weight_grad = product.flatten(0, -2).sum(0).to(weight.dtype)
        inner = product.mul_(weight).mean(-1, keepdim=True)
        del product
        wide = grad * weight.float()
        return wide.sub_(normal.mul_(inner)).mul_(rstd).to(x.dtype), weight_grad, None


def rms_norm(x: Tensor, weight: Tensor, *, epsilon: float) -> Tensor:
    """``x / rms(x) · weight`` over the last dim, in fp32 inside. ``x`` [..., D], ``weight`` [D] → [..., D]."""
    out: Tensor = _RmsNorm.apply(x, weight, epsilon)  # type: ignore[no-untyped-call]
    return out


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.nn.functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        up_grad = torch.nn.functional.silu(gate).mul_(grad)
        return torch.ops.aten.silu_backward(grad * up, gate), up_grad


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) · up``, elementwise (Shazeer, arXiv:2002.05202)."""
    out: Tensor = _Swiglu.apply(gate, up)  # type: ignore[no-untyped-call]
    return out


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return (x * cos).add_(torch.cat((high, low), dim=-1).mul_(sin))


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, -sin), None, None


def rotate(x_BTNH: Tensor, *, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
    """Rotary position embedding over halves of the head dim, by ``rotary_tables`` [T, 1, H] in ``x``'s dtype."""
    out: Tensor = _Rotate.apply(x_BTNH, cos_TH, sin_TH)  # type: ignore[no-untyped-call]
    return out


def nats(logits: Tensor, targets: Tensor, times: Tensor | float | None, *, words: int | None = None) -> Tensor:
    """Σ over rows of −log softmax(logits)[target], in nats and fp32. ``logits`` [rows, V], ``targets`` [rows].

    With ``times``, ``logits`` become ``times`` · their gradient. What is beyond ``words`` of them is padding.
    """
    total = torch.zeros((), dtype=torch.float32, device=logits.device)
    if words is not None and words < logits.shape[1]:
        logits[:, words:] = -torch.inf
    for rows in row_chunks(logits):
        part, target = logits[rows], targets[rows, None]
        share = part.softmax(-1, dtype=torch.float32)
        # Σ exp is known from the largest share, exp(top) / Σ exp, which never vanishes
        lse = part.amax(-1, keepdim=True).float() - share.amax(-1, keepdim=True).log_()
        total += (lse - part.gather(-1, target)).sum()
        if times is not None:
            share.scatter_add_(-1, target, torch.full_like(lse, -1.0))
            part.copy_(share.mul_(times))
        del share  # before the next is made
    return total


def row_chunks(logits: Tensor) -> list[slice]:
    """Rows so few that their logits in fp32 are no more than ``LOSS_CHUNK_ELEMENTS``."""
    rows = max(1, LOSS_CHUNK_ELEMENTS // logits.shape[1])
    return [slice(start, start + rows) for start in range(0, logits.shape[0], rows)]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, scale: float, loss: Nats) -> Tensor:
        total = loss(logits, targets, scale if ctx.needs_input_grad[0] else None)
        ctx.save_for_backward(logits)
        return total * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (logits,) = ctx.saved_tensors
        return logits.detach().mul_(grad), None, None, None


def cross_entropy(logits: Tensor, targets: Tensor, *, scale: float, loss: Nats = nats) -> Tensor:
    """``scale`` · Σ over rows of −log softmax(logits)[target], in nats. ``logits`` [rows, V], ``targets`` [rows].

    Overwrites ``logits`` with their gradient: use them for nothing else, and run backward once. ``loss``: ``nats``, or
    that of words which are cut over ranks.
    """
    out: Tensor = _CrossEntropy.apply(logits, targets, scale, loss)  # type: ignore[no-untyped-call]
    return out

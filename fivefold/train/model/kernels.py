"""Memory-bound operations as autograd functions that save as little for the backward as a fused GPU kernel.

    rms_norm saves x and 1/rms · swiglu saves gate and up · rotate saves nothing of x · cross_entropy overwrites the
    logits, in the dtype of the matmuls, with their own gradient.

Written out here so that CPU, GPU and fake tensors save the same bytes, which ``plan/count/operations/op.py`` counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fivefold.job import LOSS_CHUNK_ELEMENTS

Nats = Callable[[Tensor, Tensor, Tensor | float | None], Tensor]  # signature of ``nats`` and its vocab-parallel form


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
    """x · cos + (x with its halves swapped) · sin."""
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

    With ``times``, ``logits`` are overwritten with ``times`` · their gradient. Columns from ``words`` on are padding.
    """
    total = torch.zeros((), dtype=torch.float32, device=logits.device)
    if words is not None and words < logits.shape[1]:
        logits[:, words:] = -torch.inf
    for rows in row_chunks(logits):
        part, target = logits[rows], targets[rows, None]
        share = part.softmax(-1, dtype=torch.float32)
        # log Σ exp from the largest probability, exp(max) / Σ exp, which is at least 1 / V
        lse = part.amax(-1, keepdim=True).float() - share.amax(-1, keepdim=True).log_()
        total += (lse - part.gather(-1, target)).sum()
        if times is not None:
            share.scatter_add_(-1, target, torch.full_like(lse, -1.0))
            part.copy_(share.mul_(times))
        del share  # freed before that of the next chunk is allocated
    return total


def row_chunks(logits: Tensor) -> list[slice]:
    """Slices of rows; each has at most ``LOSS_CHUNK_ELEMENTS`` logits (they are widened to fp32), at least one row."""
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
    its vocab-parallel form.
    """
    out: Tensor = _CrossEntropy.apply(logits, targets, scale, loss)  # type: ignore[no-untyped-call]
    return out

"""Memory-bound operations as autograd functions that keep as little as a GPU kernel would.

    rms_norm keeps x and 1/rms · swiglu keeps gate and up · rotate keeps nothing · cross_entropy keeps the logits
    once, in the dtype of the matmuls, and turns them into their own gradient in place.

Written out here so that CPU, GPU and fake tensors keep the same bytes, which ``plan/count/ops.py`` counts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fivefold.job import LOSS_CHUNK_ELEMENTS


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        wide = x.float()
        rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True).add_(epsilon))
        return (wide * rstd).to(x.dtype).mul_(weight), rstd

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, weight, _ = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _rstd: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, rstd = ctx.saved_tensors
        normal = x.float() * rstd
        wide = grad.float()
        weight_grad = (wide * normal).flatten(0, -2).sum(0).to(weight.dtype)
        wide = wide * weight
        inner = (wide * normal).mean(-1, keepdim=True)
        return wide.sub_(normal.mul_(inner)).mul_(rstd).to(x.dtype), weight_grad, None


def rms_norm(x: Tensor, weight: Tensor, *, epsilon: float) -> Tensor:
    """``x / rms(x) · weight`` over the last dim, in fp32 inside. ``x`` [..., D], ``weight`` [D] → [..., D]."""
    out: Tensor = _RmsNorm.apply(x, weight, epsilon)[0]  # type: ignore[no-untyped-call]
    return out


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(gate: Tensor, up: Tensor) -> Tensor:
        return torch.nn.functional.silu(gate).mul_(up)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

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
    return torch.cat((torch.addcmul(low * cos, high, sin, value=-1), torch.addcmul(high * cos, low, sin)), dim=-1)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return _turn(x, cos, sin)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1], inputs[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, -sin), None, None


def rotate(x_BTNH: Tensor, *, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
    """Rotary position embedding over halves of the head dim; ``cos`` and ``sin`` [T, 1, H/2] in ``x``'s dtype."""
    out: Tensor = _Rotate.apply(x_BTNH, cos_TH, sin_TH)  # type: ignore[no-untyped-call]
    return out


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, scale: float) -> Tensor:
        lse = torch.empty_like(targets, dtype=torch.float32)
        total = torch.zeros((), dtype=torch.float32, device=logits.device)
        for rows in _row_chunks(logits):
            wide = logits[rows].float()
            top = wide.amax(-1)
            lse[rows] = wide.sub(top[:, None]).exp_().sum(-1).log_().add_(top)
            total += (lse[rows] - wide.gather(-1, targets[rows, None]).squeeze(-1)).sum()
        ctx.save_for_backward(logits, targets, lse)
        ctx.scale = scale
        return total * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, lse = ctx.saved_tensors
        factor = grad * ctx.scale
        for rows in _row_chunks(logits):
            wide = torch.sub(logits[rows], lse[rows, None]).exp_()  # in fp32, as lse is
            wide.scatter_add_(-1, targets[rows, None], wide.new_full((wide.shape[0], 1), -1.0))
            logits[rows] = wide.mul_(factor)
        return logits, None, None


def _row_chunks(logits: Tensor) -> list[slice]:
    rows = max(1, LOSS_CHUNK_ELEMENTS // logits.shape[1])
    return [slice(start, start + rows) for start in range(0, logits.shape[0], rows)]


def cross_entropy(logits: Tensor, targets: Tensor, *, scale: float) -> Tensor:
    """``scale`` · Σ over rows of −log softmax(logits)[target], in nats. ``logits`` [rows, V], ``targets`` [rows].

    Backward overwrites ``logits`` with their gradient: run it once, and use the logits for nothing else.
    """
    out: Tensor = _CrossEntropy.apply(logits, targets, scale)  # type: ignore[no-untyped-call]
    return out

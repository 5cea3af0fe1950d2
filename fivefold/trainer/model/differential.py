"""Differential attention (arXiv:2410.05258): heads in pairs attend to the same values, and one output is subtracted.

    o = softmax(q·kᵀ·scale) · [v1, v2]        d_i = o_i − λ o_(i + N/2)        y_i = (1 − λ₀) d_i / rms(d_i)
    λ = e^(q1·k1) − e^(q2·k2) + λ₀             λ₀ = 0.8 − 0.6 e^(−0.3 · layer)

v1 and v2 are the first and second half of the value heads, so that an output has twice the dims of a head. Two cores
run, on the same queries and keys. The difference saves their outputs, which they save themselves, and a statistic of
each pair of heads. Same formulas as transformers 5.23, ``DiffLlamaAttention``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fivefold.trainer.model.mixers.convolution import get_sum_dtype
from fivefold.trainer.model.operation import exclude_from_graphs


def compute_initial_factor(layer: int) -> float:
    """Return λ₀ of ``layer``."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer)


@exclude_from_graphs
def repeat_halves(v_BTKH: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and the second half of the value heads, each twice: [B, T, K, H] each."""
    return _RepeatHalves.apply(v_BTKH)


@exclude_from_graphs
def subtract_heads(
    o1_BTNH: Tensor, o2_BTNH: Tensor, q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, initial: float, epsilon: float
) -> Tensor:
    """Return y [B, T, N/2, 2H] of the outputs of both cores; ``initial``: λ₀; q1 to k2 [H] make λ."""
    settings = initial, epsilon
    return _SubtractHeads.apply(o1_BTNH, o2_BTNH, q1, k1, q2, k2, *settings)


class _RepeatHalves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: Tensor) -> tuple[Tensor, Tensor]:
        first, second = v.chunk(2, dim=2)
        return torch.cat((first, first), dim=2), torch.cat((second, second), dim=2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        v_grad = torch.empty_like(grads[0])
        for grad, into in zip(grads, v_grad.chunk(2, dim=2), strict=True):
            torch.add(*grad.chunk(2, dim=2), out=into)
        return v_grad


class _SubtractHeads(torch.autograd.Function):
    """Saves both outputs, the vectors of λ and 1/rms [B, T, N/2, 1]."""

    @staticmethod
    def forward(
        ctx: Any,
        o1: Tensor,
        o2: Tensor,
        q1: Tensor,
        k1: Tensor,
        q2: Tensor,
        k2: Tensor,
        initial: float,
        epsilon: float,
    ) -> Tensor:
        factor = _exponentiate(q1, k1, o1) - _exponentiate(q2, k2, o1) + initial
        difference = _subtract(o1, o2, factor)
        rstd = difference.square().mean(-1, keepdim=True).add_(epsilon).rsqrt_()
        ctx.save_for_backward(o1, o2, q1, k1, q2, k2, rstd)
        ctx.initial = initial
        return difference.mul_(rstd).mul_(1 - initial).to(o1.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        o1, o2, q1, k1, q2, k2, rstd = ctx.saved_tensors
        """Return the gradients of both outputs and of the four vectors of λ.

        With d̂ = d / rms(d) and g = (1 − λ₀) · dy:   dd = (g − d̂ · mean(g · d̂)) / rms(d)
        d(o_i) = dd   ·   d(o_(i + N/2)) = −λ · dd   ·   dλ = −Σ dd · o_(i + N/2)   ·   dq1 = dλ · e^(q1·k1) · k1, …
        """
        exp1 = _exponentiate(q1, k1, o1)
        exp2 = _exponentiate(q2, k2, o1)
        factor = exp1 - exp2 + ctx.initial
        normal = _subtract(o1, o2, factor).mul_(rstd)
        difference_grad = grad.to(normal.dtype) * (1 - ctx.initial)
        mean = (difference_grad * normal).mean(-1, keepdim=True)
        difference_grad.addcmul_(normal, mean, value=-1).mul_(rstd)
        del normal, mean
        factor_grad = torch.zeros_like(factor)
        output_grads = []
        for output, part in zip((o1, o2), difference_grad.chunk(2, dim=-1), strict=True):  # of v1, of v2
            factor_grad -= (part * output.chunk(2, dim=2)[1]).sum()
            output_grad = torch.empty_like(output, memory_format=torch.contiguous_format)
            kept, subtracted = output_grad.chunk(2, dim=2)
            kept.copy_(part)
            torch.mul(part, -factor, out=subtracted) if part.dtype == output.dtype else subtracted.copy_(part * -factor)
            output_grads.append(output_grad)
        vector_grads = (
            (factor_grad * exponential * other).to(other.dtype)
            for exponential, other in ((exp1, k1), (exp1, q1), (-exp2, k2), (-exp2, q2))
        )
        return *output_grads, *vector_grads, None, None


def _exponentiate(q: Tensor, k: Tensor, output: Tensor) -> Tensor:
    """Return e^(q·k) in the dtype of sums of ``output``."""
    dtype = get_sum_dtype(output.dtype)
    return (q.to(dtype) * k.to(dtype)).sum().exp()


def _subtract(o1: Tensor, o2: Tensor, factor: Tensor) -> Tensor:
    """Return d [B, T, N/2, 2H] of the outputs of both cores [B, T, N, H]."""
    *batch, heads, dim = o1.shape
    difference = torch.empty(*batch, heads // 2, 2 * dim, dtype=factor.dtype, device=o1.device)
    for output, into in zip((o1, o2), difference.chunk(2, dim=-1), strict=True):
        kept, subtracted = output.chunk(2, dim=2)
        into.copy_(kept).addcmul_(subtracted, -factor)
    return difference

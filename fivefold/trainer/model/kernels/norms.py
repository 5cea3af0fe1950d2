"""Norms as autograd functions: they save x and one fp32 statistic per row (two for LayerNorm).

    rms    x / rms(x) · w        layer    (x − mean(x)) / std(x) · w + b        over the last dim

``plus_one``: the factor is 1 + w (Gemma, Nemotron).
Sources: Zhang and Sennrich, arXiv:1910.07467; Ba et al., arXiv:1607.06450.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class RankSums:
    """Sums over the ranks that hold parts of the rows of a norm; ``width``: total number of columns."""

    width: int

    def __call__(self, rows: Tensor) -> Tensor:
        """Return this rank's sums [R, n] summed over all ranks; ``rows`` may be overwritten."""
        raise NotImplementedError


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, epsilon: float, plus_one: bool, sums: RankSums | None
    ) -> Tensor:
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square_()
        means = squares.div_(x.shape[-1]) if sums is None else sums(squares).div_(sums.width)
        rstd = means.add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        ctx.plus_one, ctx.sums = plus_one, sums
        out = torch.mul(x, rstd).to(x.dtype)  # x · rstd is fp32, because rstd is
        return out if weight is None else _times_(out, weight, plus_one)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        x, weight, rstd = ctx.saved_tensors
        sums = ctx.sums
        normal = x * rstd  # fp32, like everything below
        product = grad * normal
        if weight is None:
            inner = product.mean(-1, keepdim=True)
            del product
            return (grad - normal.mul_(inner)).mul_(rstd).to(x.dtype), None, None, None, None
        weight_grad = _sum_rows(product, weight)
        product = _times_(product, weight, ctx.plus_one)
        inner = product.mean(-1, keepdim=True) if sums is None else sums(product.sum(-1, keepdim=True)).div_(sums.width)
        del product
        x_grad = grad * weight.float()
        if ctx.plus_one:
            x_grad.add_(grad)
        return x_grad.sub_(normal.mul_(inner)).mul_(rstd).to(x.dtype), weight_grad, None, None, None


def _times_(x: Tensor, weight: Tensor, plus_one: bool) -> Tensor:
    """Multiply ``x`` in place by weight or 1 + weight, without computing 1 + weight.

    It would be rounded to the weight's dtype.
    """
    return x.addcmul_(x, weight) if plus_one else x.mul_(weight)


def _sum_rows(x: Tensor, weight: Tensor) -> Tensor:
    """Return Σ over rows of ``x`` in the shape of ``weight``: [D], or [N, D] for heads with weights of their own."""
    sum_dtype = x.dtype if x.dtype == torch.float64 else torch.float32
    return x.flatten(0, -1 - weight.dim()).sum(0, dtype=sum_dtype).to(weight.dtype)


def rms_norm(x: Tensor, weight: Tensor | None, *, epsilon: float, plus_one: bool = False) -> Tensor:
    """Return ``x / rms(x) · weight`` over the last dim, computed in fp32. ``x`` [..., D], ``weight`` [D] → [..., D].

    Without ``weight``: x / rms(x). ``plus_one``: the factor is 1 + weight (Gemma).
    """
    return _RmsNorm.apply(x, weight, epsilon, plus_one, None)


def spread_rms_norm(x: Tensor, weight: Tensor, *, epsilon: float, plus_one: bool = False, sums: RankSums) -> Tensor:
    """Compute ``rms_norm`` of rows whose columns are sharded over ranks: ``x`` [R, local D], ``weight`` [local D]."""
    return _RmsNorm.apply(x, weight, epsilon, plus_one, sums)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float, plus_one: bool
    ) -> Tensor:
        mean = x.mean(-1, keepdim=True, dtype=torch.float32)
        centred = x - mean  # fp32, because the mean is
        norm = torch.linalg.vector_norm(centred, dim=-1, keepdim=True)
        rstd = norm.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.plus_one, ctx.biased = plus_one, bias is not None
        out = centred.mul_(rstd).to(x.dtype)
        if weight is not None:
            _times_(out, weight, plus_one)
        return out if bias is None else out.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        x, weight, mean, rstd = ctx.saved_tensors
        normal = (x - mean).mul_(rstd)  # fp32, like everything below
        product = grad * normal
        if weight is None:
            inner = product.mean(-1, keepdim=True)
            del product
            x_grad = (grad - normal.mul_(inner)).sub_(grad.mean(-1, keepdim=True, dtype=rstd.dtype))
            return x_grad.mul_(rstd).to(x.dtype), None, None, None, None
        weight_grad = _sum_rows(product, weight)
        inner = _times_(product, weight, ctx.plus_one).mean(-1, keepdim=True)
        del product
        bias_grad = _sum_rows(grad, weight) if ctx.biased else None
        x_grad = grad * weight.float()
        if ctx.plus_one:
            x_grad.add_(grad)
        x_grad.sub_(x_grad.mean(-1, keepdim=True))
        return x_grad.sub_(normal.mul_(inner)).mul_(rstd).to(x.dtype), weight_grad, bias_grad, None, None


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *, epsilon: float, plus_one: bool = False
) -> Tensor:
    """Return ``(x − mean) / std · weight + bias`` over the last dim, computed in fp32.

    Arguments as for ``rms_norm``.
    """
    return _LayerNorm.apply(x, weight, bias, epsilon, plus_one)


class _SpreadLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, plus_one: bool, sums: RankSums
    ) -> Tensor:
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square_()
        moments = sums(torch.cat((x.sum(-1, keepdim=True, dtype=torch.float32), squares), dim=-1)).div_(sums.width)
        mean = moments[:, :1].contiguous()
        rstd = (moments[:, 1:] - mean.square()).clamp_(min=0).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.plus_one, ctx.biased, ctx.sums = plus_one, bias is not None, sums
        out = _times_((x - mean).mul_(rstd).to(x.dtype), weight, plus_one)
        return out if bias is None else out.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None, None]:
        x, weight, mean, rstd = ctx.saved_tensors
        normal = (x - mean).mul_(rstd)
        product = grad * normal
        weight_grad = _sum_rows(product, weight)
        inner = _times_(product, weight, ctx.plus_one).sum(-1, keepdim=True)
        del product
        bias_grad = _sum_rows(grad, weight) if ctx.biased else None
        x_grad = grad * weight.float()
        if ctx.plus_one:
            x_grad.add_(grad)
        row_means = ctx.sums(torch.cat((x_grad.sum(-1, keepdim=True), inner), dim=-1)).div_(ctx.sums.width)
        x_grad.sub_(row_means[:, :1]).sub_(normal.mul_(row_means[:, 1:]))
        return x_grad.mul_(rstd).to(x.dtype), weight_grad, bias_grad, None, None, None


def spread_layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, epsilon: float, plus_one: bool = False, sums: RankSums
) -> Tensor:
    """Compute ``layer_norm`` of rows whose columns are sharded over ranks; sums of x and x² are reduced together."""
    return _SpreadLayerNorm.apply(x, weight, bias, epsilon, plus_one, sums)

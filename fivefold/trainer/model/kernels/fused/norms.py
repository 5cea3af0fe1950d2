"""RMSNorm and LayerNorm in one pass forward and one backward. Saved: x and in fp32 rstd of each row, and its mean."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fivefold.job import count_norm_programs
from fivefold.trainer.model.kernels import norms as eager
from fivefold.trainer.model.kernels.fused.launch import tile
from fivefold.units import ceil_div


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        epsilon: float,
        centered: bool,
        plus_one: bool,
    ) -> Tensor:
        outputs: list[Tensor] = norm(x, weight, bias, epsilon, centered, plus_one)
        y, *stats = outputs
        ctx.save_for_backward(x, weight, *stats)
        ctx.biased, ctx.plus_one = bias is not None, plus_one
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *stats = ctx.saved_tensors
        dx, partial = norm_backward(grad, x, weight, stats, ctx.biased, ctx.plus_one)
        if weight is None:
            return dx, None, None, None, None, None
        weight_gradients = partial.sum(0).to(weight.dtype)
        return dx, weight_gradients[0], weight_gradients[1] if ctx.biased else None, None, None, None


def rms_norm(x: Tensor, weight: Tensor | None, *, epsilon: float, plus_one: bool = False) -> Tensor:
    """Compute ``rms_norm`` of ``kernels/norms.py`` in one kernel, or in PyTorch if heads have their own weights."""
    if weight is not None and weight.dim() > 1:
        return eager.rms_norm(x, weight, epsilon=epsilon, plus_one=plus_one)
    return _Norm.apply(x, weight, None, epsilon, False, plus_one)


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *, epsilon: float, plus_one: bool = False
) -> Tensor:
    """Compute ``layer_norm`` of ``kernels/norms.py`` in one kernel, or in PyTorch if heads have their own weights."""
    if weight is not None and weight.dim() > 1:
        return eager.layer_norm(x, weight, bias, epsilon=epsilon, plus_one=plus_one)
    return _Norm.apply(x, weight, bias, epsilon, True, plus_one)


@torch.library.custom_op("fivefold::norm", mutates_args=())
def norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float, centered: bool, plus_one: bool
) -> list[Tensor]:
    """Normalize ``x`` [..., D].

    Return it with rstd [..., 1] in fp32 and, if ``centered`` (LayerNorm), the mean [..., 1].
    """
    from fivefold.trainer.model.kernels.triton import norms

    source, (y, *stats) = _rows(x), _empty_norm(x, centered)
    rows, width = source.shape
    if rows:
        size = tile(rows, width)
        norms.forward[(ceil_div(rows, size.rows),)](
            source,
            source if weight is None else weight,
            source if bias is None else bias,
            y,
            stats[0],
            stats[-1],
            rows,
            width,
            source.stride(0),
            epsilon,
            CENTERED=centered,
            WEIGHTED=weight is not None,
            BIASED=bias is not None,
            PLUS_ONE=plus_one,
            TILE=size.rows,
            BLOCK=size.columns,
            num_warps=size.warps,
        )
    return [y, *stats]


norm.register_fake(lambda x, weight, bias, epsilon, centered, *_: _empty_norm(x, centered))


@torch.library.custom_op("fivefold::norm_backward", mutates_args=())
def norm_backward(
    gradient: Tensor, x: Tensor, weight: Tensor | None, stats: list[Tensor], biased: bool, plus_one: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradient of x, and fp32 partial sums [programs, 0 to 2, D] of that of the weight (and the bias)."""
    from fivefold.trainer.model.kernels.triton import norms

    source, gradient_rows, (dx, partial) = _rows(x), _rows(gradient), _empty_backward(x, (weight is not None) + biased)
    rows, width = source.shape
    if not rows:
        return dx, partial.zero_()
    size = tile(rows, width)
    norms.backward[(len(partial),)](
        gradient_rows,
        source,
        source if weight is None else weight,
        stats[0],
        stats[-1],
        dx,
        partial,
        rows,
        width,
        gradient_rows.stride(0),
        source.stride(0),
        CENTERED=len(stats) == 2,
        WEIGHTED=weight is not None,
        BIASED=biased,
        PLUS_ONE=plus_one,
        TILE=size.rows,
        BLOCK=size.columns,
        num_warps=size.warps,
    )
    return dx, partial


norm_backward.register_fake(
    lambda gradient, x, weight, stats, biased, *_: _empty_backward(x, (weight is not None) + biased)
)


def _empty_norm(x: Tensor, centered: bool) -> list[Tensor]:
    stats = [torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device) for _ in range(1 + centered)]
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device), *stats]


def _empty_backward(x: Tensor, weights: int) -> tuple[Tensor, Tensor]:
    """Return empty outputs of ``norm_backward``; ``weights``: number of vectors [D] that the norm has."""
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    partial = torch.empty(count_norm_programs(rows, width), weights, width, dtype=torch.float32, device=x.device)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), partial


def _rows(x: Tensor) -> Tensor:
    """Return ``x`` [..., D] as [rows, D] with adjacent columns; a view if its strides allow."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()

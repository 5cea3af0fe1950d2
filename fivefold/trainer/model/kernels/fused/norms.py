"""RMSNorm and LayerNorm in one pass forward and one backward. Kept: x and in fp32 rstd of each row, and its mean."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fivefold.job import norm_programs
from fivefold.trainer.model.kernels import norms as eager
from fivefold.trainer.model.kernels.fused.launch import tile
from fivefold.units import ceil_div


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float, centered: bool,
        plus_one: bool,
    ) -> Tensor:  # fmt: skip
        made: list[Tensor] = norm(x, weight, bias, epsilon, centered, plus_one)
        y, *stats = made
        ctx.save_for_backward(x, weight, *stats)
        ctx.biased, ctx.plus_one = bias is not None, plus_one
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *stats = ctx.saved_tensors
        dx, partial = norm_backward(grad, x, weight, stats, ctx.biased, ctx.plus_one)
        if weight is None:
            return dx, None, None, None, None, None
        summed = partial.sum(0).to(weight.dtype)
        return dx, summed[0], summed[1] if ctx.biased else None, None, None, None


def rms_norm(x: Tensor, weight: Tensor | None, *, epsilon: float, plus_one: bool = False) -> Tensor:
    """As ``kernels/norms.py``, in one kernel; by PyTorch's own where heads have weights of their own."""
    if weight is not None and weight.dim() > 1:
        return eager.rms_norm(x, weight, epsilon=epsilon, plus_one=plus_one)
    out: Tensor = _Norm.apply(x, weight, None, epsilon, False, plus_one)  # type: ignore[no-untyped-call]
    return out


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, epsilon: float, plus_one: bool = False
) -> Tensor:  # fmt: skip
    """As ``kernels/norms.py``, in one kernel; by PyTorch's own where heads have weights of their own."""
    if weight.dim() > 1:
        return eager.layer_norm(x, weight, bias, epsilon=epsilon, plus_one=plus_one)
    out: Tensor = _Norm.apply(x, weight, bias, epsilon, True, plus_one)  # type: ignore[no-untyped-call]
    return out


@torch.library.custom_op("fivefold::norm", mutates_args=())
def norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float, centered: bool, plus_one: bool
) -> list[Tensor]:  # fmt: skip
    """``x`` [..., D] → normed, and in fp32 rstd [..., 1]; ``centered``: LayerNorm, and also the mean [..., 1]."""
    from fivefold.trainer.model.kernels.triton import norms

    source, (y, *stats) = _rows(x), _empty_norm(x, centered)
    rows, width = source.shape
    if rows:
        size = tile(rows, width)
        norms.forward[(ceil_div(rows, size.rows),)](
            source, source if weight is None else weight, source if bias is None else bias, y, stats[0], stats[-1],
            rows, width, source.stride(0), epsilon,
            CENTERED=centered, WEIGHTED=weight is not None, BIASED=bias is not None, PLUS_ONE=plus_one,
            TILE=size.rows, BLOCK=size.columns, num_warps=size.warps,
        )  # fmt: skip
    return [y, *stats]


@norm.register_fake
def _(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float, centered: bool, plus_one: bool
) -> list[Tensor]:  # fmt: skip
    return _empty_norm(x, centered)


@torch.library.custom_op("fivefold::norm_backward", mutates_args=())
def norm_backward(
    gradient: Tensor, x: Tensor, weight: Tensor | None, stats: list[Tensor], biased: bool, plus_one: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradient of x, and partial sums [programs, 0 to 2, D] in fp32 of that of the weight (and the bias)."""
    from fivefold.trainer.model.kernels.triton import norms

    source, back, (dx, partial) = _rows(x), _rows(gradient), _empty_backward(x, (weight is not None) + biased)
    rows, width = source.shape
    if not rows:
        return dx, partial.zero_()
    size = tile(rows, width)
    norms.backward[(len(partial),)](
        back, source, source if weight is None else weight, stats[0], stats[-1], dx, partial, rows, width,
        back.stride(0), source.stride(0),
        CENTERED=len(stats) == 2, WEIGHTED=weight is not None, BIASED=biased, PLUS_ONE=plus_one,
        TILE=size.rows, BLOCK=size.columns, num_warps=size.warps,
    )  # fmt: skip
    return dx, partial


@norm_backward.register_fake
def _(
    gradient: Tensor, x: Tensor, weight: Tensor | None, stats: list[Tensor], biased: bool, plus_one: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _empty_backward(x, (weight is not None) + biased)


def _empty_norm(x: Tensor, centered: bool) -> list[Tensor]:
    stats = [torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device) for _ in range(1 + centered)]
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device), *stats]


def _empty_backward(x: Tensor, weights: int) -> tuple[Tensor, Tensor]:
    """``weights``: how many vectors [D] the norm has."""
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    partial = torch.empty(norm_programs(rows, width), weights, width, dtype=torch.float32, device=x.device)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), partial


def _rows(x: Tensor) -> Tensor:
    """``x`` [..., D] as [rows, D] with adjacent columns; a view where its strides allow."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()

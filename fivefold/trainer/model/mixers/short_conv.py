"""Gated short convolution (LFM2) on rows [R, D]: B, C, x = project(h);  y = C · conv(B · x);  out(y).

The convolution is causal and depthwise: each channel is the weighted sum of its last few tokens. The core saves its
input [R, 3D], and under context parallelism the tokens before it; the backward computes the convolution again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fivefold.model.spec import Model
from fivefold.trainer.model.linear import Linear
from fivefold.trainer.model.lora import project
from fivefold.trainer.model.mixers.convolution import (
    Conv,
    Halo,
    convolve,
    convolve_backward,
    convolve_halo_backward,
    filter_gradient,
    get_sum_dtype,
)
from fivefold.trainer.model.operation import Run, call_directly, exclude_from_graphs
from fivefold.trainer.model.rotary import RowInputs


class ShortConvMixer(nn.Module):
    """The token mixer of a layer that is a gated short convolution."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        shape = model.short_conv
        assert shape is not None
        self.run: Run = call_directly
        self.halo: Halo | None = None  # set by context parallelism
        self.project = Linear(model.width, 3 * model.width, bias=shape.bias)
        self.conv = Conv(model.width, taps=shape.taps, bias=shape.bias)
        self.out = Linear(model.width, model.width, bias=shape.bias)

    def forward(self, h_RD: Tensor, rows: RowInputs) -> Tensor:
        """Mix the tokens of each sequence: [R, D] → [R, D]."""
        (bcx,) = project(self.run, "mixer.project", h_RD, self.project, keys_B=rows.keys)
        y_RD = self.run("mixer.core", gated_conv, bcx, self.conv.weight, self.conv.bias, rows.tokens, self.halo)
        del bcx
        (out_RD,) = project(self.run, "mixer.out", y_RD, self.out, keys_B=rows.keys)
        return out_RD


@exclude_from_graphs
def gated_conv(bcx: Tensor, weight: Tensor, bias: Tensor | None, tokens: int, halo: Halo | None = None) -> Tensor:
    """Return ``C · (conv(B · x) + bias)`` [R, D] of ``B | C | x`` [R, 3D], in sequences of ``tokens``.

    ``halo``: exchanges the tokens before and after those that this rank has of each sequence; None: it has all.
    """
    return _GatedConv.apply(bcx, weight, bias, tokens, halo)


class _GatedConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bcx: Tensor, weight: Tensor, bias: Tensor | None, tokens: int, halo: Halo | None) -> Tensor:
        ctx.tokens, ctx.halo = tokens, halo
        b, c, x = bcx.view(-1, tokens, bcx.shape[1]).chunk(3, dim=-1)
        gated = b * x
        reach = weight.shape[-1] - 1
        before = None if halo is None or not reach else halo.get_before(gated[:, -reach:])
        ctx.save_for_backward(bcx, weight, bias, before)
        convolved = convolve(gated, weight, bias, before)
        del gated
        return convolved.mul_(c).to(bcx.dtype).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        bcx, weight, bias, before = ctx.saved_tensors
        b, c, x = bcx.view(-1, ctx.tokens, bcx.shape[1]).chunk(3, dim=-1)
        grad = grad.view(b.shape)
        bcx_grad = torch.empty_like(bcx)
        b_grad, c_grad, x_grad = bcx_grad.view(-1, ctx.tokens, bcx.shape[1]).chunk(3, dim=-1)
        gated = b * x
        torch.mul(convolve(gated, weight, bias, before), grad, out=c_grad)
        inner = grad.to(get_sum_dtype(grad.dtype)) * c
        weight_grad = filter_gradient(inner, gated, weight, before)
        bias_grad = None if bias is None else inner.sum((0, 1)).to(bias.dtype)
        del gated
        if before is None:
            inner = convolve_backward(inner, weight)
        else:
            before_grad = convolve_halo_backward(inner, weight)
            inner = convolve_backward(inner, weight)
            inner[:, -before.shape[1] :] += ctx.halo.return_before(before_grad.to(before.dtype))
        torch.mul(inner, x, out=b_grad)
        torch.mul(inner, b, out=x_grad)
        return bcx_grad, weight_grad, bias_grad, None, None

"""The causal depthwise convolution of token mixers, with and without SiLU: y[t] = Σ_k w[k] · x[t + k + 1 − taps] + b.

It saves only its input; the backward computes the convolution again. Sums are in fp32.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.trainer.model.mixers.heads import HeadShare
from fivefold.trainer.model.operation import exclude_from_graphs


class Conv(nn.Module):
    """The filters of a causal depthwise convolution: weight [D, taps], and a bias [D]."""

    def __init__(self, width: int, *, taps: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, taps))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None


class Halo(Protocol):
    """The tokens before and after those that this rank has of each sequence (context parallelism)."""

    def get_before(self, last: Tensor) -> Tensor:
        """Return [B, taps − 1, D] of the tokens before this rank's, zeros at the first rank; ``last``: its own last."""

    def return_before(self, gradient: Tensor) -> Tensor:
        """Return the gradient of ``last`` that the rank after this one has.

        ``gradient``: gradient of what ``get_before`` returned.
        """


def convolve(x_BTD: Tensor, weight_DK: Tensor, bias_D: Tensor | None, before: Tensor | None = None) -> Tensor:
    """Return the causal depthwise convolution of ``x``, summed in fp32: y[t] = Σ_k w[k] · x[t + k + 1 − taps] + b.

    ``before``: the taps − 1 tokens before ``x``; None: zeros.
    """
    taps = weight_DK.shape[-1]
    weight_KD = weight_DK.t().to(get_sum_dtype(x_BTD.dtype))
    y_BTD = x_BTD * weight_KD[-1]
    for back in range(1, min(taps, x_BTD.shape[1])):
        y_BTD[:, back:].addcmul_(x_BTD[:, :-back], weight_KD[-1 - back])
    if before is not None:
        for back in range(1, taps):
            y_BTD[:, :back].addcmul_(before[:, -back:], weight_KD[-1 - back])
    return y_BTD if bias_D is None else y_BTD.add_(bias_D)


def convolve_backward(grad_BTD: Tensor, weight_DK: Tensor) -> Tensor:
    """Return the gradient of the input of ``convolve`` from that of its output, in the dtype of the latter."""
    taps = weight_DK.shape[-1]
    weight_KD = weight_DK.t().to(grad_BTD.dtype)
    x_grad = grad_BTD * weight_KD[-1]
    for back in range(1, min(taps, grad_BTD.shape[1])):
        x_grad[:, :-back].addcmul_(grad_BTD[:, back:], weight_KD[-1 - back])
    return x_grad


def convolve_halo_backward(grad_BTD: Tensor, weight_DK: Tensor) -> Tensor:
    """Return the gradient [B, taps − 1, D] of the tokens ``before`` those of ``convolve``."""
    reach = weight_DK.shape[-1] - 1
    weight_KD = weight_DK.t().to(grad_BTD.dtype)
    gradient = grad_BTD.new_zeros(len(grad_BTD), reach, grad_BTD.shape[2])
    for back in range(1, reach + 1):
        gradient[:, -back:].addcmul_(grad_BTD[:, :back], weight_KD[-1 - back])
    return gradient


def filter_gradient(grad_BTD: Tensor, x_BTD: Tensor, weight_DK: Tensor, before: Tensor | None = None) -> Tensor:
    """Return the gradient of the filters of ``convolve``: Σ over tokens of the output's gradient · the input's tap."""
    gradient = torch.zeros_like(weight_DK, dtype=grad_BTD.dtype)
    taps = weight_DK.shape[-1]
    for back in range(min(taps, x_BTD.shape[1])):
        tokens = x_BTD.shape[1] - back
        gradient[:, -1 - back] = (grad_BTD[:, back:] * x_BTD[:, :tokens]).sum((0, 1))
        if before is not None and back:
            gradient[:, -1 - back] += (grad_BTD[:, :back] * before[:, -back:]).sum((0, 1))
    return gradient.to(weight_DK.dtype)


def get_sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums over tokens: fp32, or fp64 for fp64."""
    return dtype if dtype == torch.float64 else torch.float32


@exclude_from_graphs
def convolve_silu(weight: Tensor, tokens: int, share: HeadShare, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Return silu(conv(·)) of each of the ``inputs`` [R, ·], whose filters follow one another in ``weight``.

    ``share``: the share of the filters of each input that the inputs have.
    """
    return _ConvolveSilu.apply(weight, tokens, share, *inputs)


def convolve_silu_rows(x: Tensor, weight: Tensor, bias: Tensor | None, *, tokens: int) -> Tensor:
    """Return silu(conv(``x``)) [R, D] in the dtype of ``x``, in sequences of ``tokens``."""
    x_BTD = x.view(-1, tokens, x.shape[1])
    return F.silu(convolve(x_BTD, weight, bias), inplace=True).to(x.dtype).flatten(0, 1)


def convolve_silu_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *, tokens: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of input, filters and bias of ``convolve_silu_rows``."""
    x_BTD = x.view(-1, tokens, x.shape[1])
    convolved = convolve(x_BTD, weight, bias)
    inner = torch.ops.aten.silu_backward(grad.view(x_BTD.shape).to(convolved.dtype), convolved)
    del convolved
    weight_grad = filter_gradient(inner, x_BTD, weight)
    bias_grad = None if bias is None else inner.sum((0, 1)).to(bias.dtype)
    return convolve_backward(inner, weight).to(x.dtype).flatten(0, 1), weight_grad, bias_grad


class _ConvolveSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: int, share: HeadShare, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(weight, *inputs)
        ctx.settings = tokens, share
        filters = share.take(weight, [x.shape[1] * share.ranks for x in inputs])
        return tuple(convolve_silu_rows(x, part, None, tokens=tokens) for x, part in zip(inputs, filters, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, *inputs = ctx.saved_tensors
        tokens, share = ctx.settings
        filters = share.take(weight, [x.shape[1] * share.ranks for x in inputs])
        results = [
            convolve_silu_backward(grad, x, part, None, tokens=tokens)
            for grad, x, part in zip(grads, inputs, filters, strict=True)
        ]
        filter_grads = [part for _, part, _ in results]
        weight_grad = torch.cat(filter_grads) if share.ranks == 1 else share.place(filter_grads)
        return weight_grad, None, None, *(grad for grad, _, _ in results)

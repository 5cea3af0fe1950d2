"""Output projection and cross-entropy by chunks of rows, so that logits [rows, V] never exist for all rows at once.

    backward, per chunk of rows:   logits = h Wᵀ  →  loss, g = ∂loss/∂logits in place  →  dh = g W,  dW += gᵀ h

The loss is read only after the step, so the forward keeps h and computes nothing: no GEMM runs twice, and no dW
is stored until the backward. dW is never deferred: that would keep the logits. Liger does the same in the forward; for
a comparison with it and cut cross-entropy (arXiv:2411.09009) see decision 023.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.job import LOSS_CHUNK_ROWS
from fivefold.trainer.model.kernels.loss import Nats
from fivefold.trainer.model.linear import Linear, accumulate_grad


def chunked_loss(
    h: Tensor, out: Linear, targets: Tensor, *, scale: float, loss: Nats, into: Tensor | None = None
) -> Tensor:
    """``scale`` · Σ over rows of −log softmax(out(h))[target] in nats. ``h`` [rows, D], ``targets`` of any shape.

    Where ``h`` requires a gradient the scalar is NaN until its backward, which may run once, has filled it in.
    ``into``: where the scalar lies then, an element of another tensor.
    """
    found: Tensor = _Chunked.apply(h, out.matrix, targets, out, scale, loss, into)  # type: ignore[no-untyped-call]
    return found


class _Chunked(torch.autograd.Function):
    """Forward saves h; without gradients it computes the loss. Backward computes loss, dh, dW and db by chunks."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, _weight: Tensor, targets: Tensor, out: Linear, scale: float, loss: Nats,
        into: Tensor | None,
    ) -> Tensor:  # fmt: skip
        total = torch.zeros((), dtype=torch.float32, device=h.device) if into is None else into.zero_()
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(h, targets)
            ctx.out, ctx.scale, ctx.loss, ctx.total = out, scale, loss, total.fill_(math.nan)
            return total.detach()  # shares ``total``'s storage; returning ``total`` would make ctx refer to itself
        whole, targets = out.hooks.enter(h), targets.flatten()
        for rows in _chunks(whole):
            total += loss(F.linear(whole[rows], out.matrix, out.bias), targets[rows], None)
        return total * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        h, targets = ctx.saved_tensors
        out: Linear = ctx.out
        whole, targets, total, times = out.hooks.enter(h), targets.flatten(), ctx.total.zero_(), grad * ctx.scale
        gradient = torch.empty_like(whole)
        weight = bias = None
        for rows in _chunks(whole):
            logits = F.linear(whole[rows], out.matrix, out.bias)
            total += ctx.loss(logits, targets[rows], times)
            torch.mm(logits, out.matrix, out=gradient[rows])
            weight = logits.t() @ whole[rows] if weight is None else weight.addmm_(logits.t(), whole[rows])
            if out.bias is not None:
                bias = logits.sum(0) if bias is None else bias.add_(logits.sum(0))
            del logits  # freed before those of the next chunk are allocated
        total *= ctx.scale
        del whole
        entered = out.hooks.begin_enter_backward(gradient)
        del gradient
        if out.bias is not None and bias is not None:
            accumulate_grad(out.bias, bias)
        assert weight is not None
        accumulate_grad(out.matrix, weight)
        return entered(), None, None, None, None, None, None


def _chunks(rows: Tensor) -> list[slice]:
    """Slices of ``LOSS_CHUNK_ROWS`` rows; the last may be shorter."""
    return [slice(start, start + LOSS_CHUNK_ROWS) for start in range(0, len(rows), LOSS_CHUNK_ROWS)]

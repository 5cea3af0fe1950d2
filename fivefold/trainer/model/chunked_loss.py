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
    """Return ``scale`` · Σ over rows of −log softmax(out(h))[target] in nats.

    ``h``: [rows, D]; ``targets`` of any shape. If ``h`` requires a gradient the scalar is NaN until its backward, which
    may run once, has filled it in. ``into``: an element of another tensor, in which the scalar is stored then.
    """
    return _Chunked.apply(h, out.matrix, targets, out, scale, loss, into)


class _Chunked(torch.autograd.Function):
    """Save h in the forward, which computes the loss only without gradients.

    Compute loss, dh, dW and db by chunks later.
    """

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        _weight: Tensor,
        targets: Tensor,
        out: Linear,
        scale: float,
        loss: Nats,
        into: Tensor | None,
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=h.device) if into is None else into.zero_()
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(h, targets)
            ctx.out, ctx.scale, ctx.loss, ctx.total = out, scale, loss, total.fill_(math.nan)
            return total.detach()  # shares ``total``'s storage; returning ``total`` would make ctx refer to itself
        all_rows, targets = out.hooks.enter(h), targets.flatten()
        for rows in _list_chunks(all_rows):
            total += loss(F.linear(all_rows[rows], out.matrix, out.bias), targets[rows], None)
        return total * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        h, targets = ctx.saved_tensors
        out: Linear = ctx.out
        all_rows = out.hooks.enter(h)
        targets = targets.flatten()
        total = ctx.total.zero_()
        factor = grad * ctx.scale
        gradient, trains = torch.empty_like(all_rows), out.matrix.requires_grad
        weight_gradient = bias_gradient = None
        for rows in _list_chunks(all_rows):
            logits = F.linear(all_rows[rows], out.matrix, out.bias)
            total += ctx.loss(logits, targets[rows], factor)
            torch.mm(logits, out.matrix, out=gradient[rows])
            if trains:
                weight_gradient = (
                    logits.t() @ all_rows[rows]
                    if weight_gradient is None
                    else weight_gradient.addmm_(logits.t(), all_rows[rows])
                )
            if trains and out.bias is not None:
                bias_gradient = logits.sum(0) if bias_gradient is None else bias_gradient.add_(logits.sum(0))
            del logits  # freed before those of the next chunk are allocated
        total *= ctx.scale
        del all_rows
        wait_gradient = out.hooks.begin_enter_backward(gradient)
        del gradient
        if out.bias is not None and bias_gradient is not None:
            accumulate_grad(out.bias, bias_gradient)
        if weight_gradient is not None:
            accumulate_grad(out.matrix, weight_gradient)
        return wait_gradient(), None, None, None, None, None, None


def _list_chunks(rows: Tensor) -> list[slice]:
    """Return slices of ``LOSS_CHUNK_ROWS`` rows; the last may be shorter."""
    return [slice(start, start + LOSS_CHUNK_ROWS) for start in range(0, len(rows), LOSS_CHUNK_ROWS)]

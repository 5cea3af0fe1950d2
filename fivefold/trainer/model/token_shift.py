"""What RWKV-4 mixes before its projections: each token and the one before it, in shares of each channel.

h₋[t] = h[t − 1], 0 before a sequence        mix(h, h₋) = m · h + (1 − m) · h₋
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fivefold.trainer.model.operation import exclude_from_graphs


@exclude_from_graphs
def shift_tokens(h_RD: Tensor, tokens: int) -> Tensor:
    """Return the rows of the tokens before those of ``h`` [R, D]; zeros before a sequence, which has ``tokens``."""
    return _ShiftTokens.apply(h_RD, tokens)


@exclude_from_graphs
def mix_tokens(h_RD: Tensor, shifted_RD: Tensor, shares_D: Tensor) -> Tensor:
    """Return the mean of both rows, of which ``h`` has the ``shares`` of its channels."""
    return _MixTokens.apply(h_RD, shifted_RD, shares_D)


class _ShiftTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, tokens: int) -> Tensor:
        ctx.tokens = tokens
        return _move(h, tokens, forwards=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _move(gradient, ctx.tokens, forwards=False), None


def _move(rows: Tensor, tokens: int, *, forwards: bool) -> Tensor:
    """Return the rows of each sequence moved by one token, with zeros where none arrives."""
    moved = torch.empty_like(rows)
    there, here = (x.view(-1, tokens, x.shape[1]) for x in (moved, rows))
    if forwards:
        there[:, 1:], there[:, 0] = here[:, :-1], 0
    else:
        there[:, :-1], there[:, -1] = here[:, 1:], 0
    return moved


class _MixTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, shifted: Tensor, shares: Tensor) -> Tensor:
        ctx.save_for_backward(h, shifted, shares)
        return torch.lerp(shifted, h, shares.to(h.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h, shifted, shares = ctx.saved_tensors
        shares_gradient = (h - shifted).mul_(gradient).sum(0).to(shares.dtype)
        h_gradient = gradient * shares
        return h_gradient, gradient - h_gradient, shares_gradient

"""SparseMixer: two experts drawn one after the other, and the gradient of the draw (arXiv:2409.12136; Phi-3.5-MoE).

    candidates   experts whose logit s has (max s − s) / max(|s|, max s) ≤ 2 · jitter;  p = softmax of their logits
    expert       in training drawn from p, else the candidate with the highest logit; the second without the first
    weight       w = p[expert] · h; in training h = 1/3 for three of four draws of another than the likeliest expert
                 (Heun's third-order method), else 1
    backward     ds = dw · p[expert] · (onehot(expert) − p)

Draws depend on a row's key alone, as masks of dropout do (``dropout.py``), so that every layout draws the same experts
and recomputation repeats them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fivefold.trainer.model.dropout import GAMMA, ROUTERS, PlacedNoise, mix

CHOICES = 2  # experts of a token
HEUN = (0.3333, 0.6667)  # h is the first number, plus the second where it is 1, as in transformers
FULL_FACTOR_SHARE = 0.25  # of the draws of another than the likeliest expert
BITS = 24  # random bits of a number, which fp32 holds exactly


class ExpertNoise(PlacedNoise):
    """The random numbers with which the rows of a layer draw their experts."""

    def __init__(self, *, layer: int, experts: int) -> None:
        super().__init__(place=ROUTERS + layer)
        self.columns = CHOICES * (experts + 1)  # for each choice one of every expert, and one for the factor h

    def draw(self, keys_B: Tensor, *, rows: int) -> Tensor:
        """Return uniform numbers in (0, 1) for this rank's ``rows``: [rows, columns]; ``keys_B``: of the sequences."""
        keys = self.make_keys_of_part(keys_B, rows=rows)
        bits = mix(keys[:, None] + torch.arange(self.columns, device=keys.device) * GAMMA)
        return ((bits & (2**BITS - 1)).float() + 0.5) / 2**BITS


def choose_experts(logits: Tensor, uniform: Tensor | None, *, jitter: float) -> tuple[Tensor, Tensor]:
    """Return two experts of each row of ``logits`` [R, E], and their factors h, both [R, 2].

    ``uniform`` [R, 2 (E + 1)]: random numbers in (0, 1); None: choose the experts with the highest logits.
    """
    chosen, factors, remaining = list[Tensor](), list[Tensor](), logits
    parts = (None, None) if uniform is None else uniform.chunk(CHOICES, dim=1)
    for part in parts:
        expert = likeliest = remaining.argmax(-1, keepdim=True)
        factor = torch.ones_like(logits[:, :1])
        if part is not None:
            gumbel = -(-part[:, :-1].log()).log()
            expert = (_exclude_unlikely(remaining, logits, jitter=jitter) + gumbel).argmax(-1, keepdim=True)
            is_full = (expert == likeliest) | (part[:, -1:] < FULL_FACTOR_SHARE)
            factor = HEUN[0] + HEUN[1] * is_full.to(logits.dtype)
        chosen.append(expert)
        factors.append(factor)
        remaining = remaining.scatter(1, expert, float("-inf"))
    return torch.cat(chosen, 1), torch.cat(factors, 1)


def weigh_experts(logits: Tensor, chosen: Tensor, factors: Tensor, *, jitter: float) -> Tensor:
    """Return the routing weights [R, 2] of the ``chosen`` experts; logits and choices are kept for the backward."""
    return _Weigh.apply(logits, chosen, factors, jitter)


class _Weigh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, chosen: Tensor, factors: Tensor, jitter: float) -> Tensor:
        ctx.jitter = jitter
        ctx.save_for_backward(logits, chosen)
        shares = [share.gather(1, expert) for share, expert in _list_shares(logits, chosen, jitter=jitter)]
        return torch.cat(shares, 1).mul_(factors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        logits, chosen = ctx.saved_tensors
        total = torch.zeros_like(logits)
        shares = _list_shares(logits, chosen, jitter=ctx.jitter)
        for (share, expert), weight_gradient in zip(shares, gradient.split(1, dim=1), strict=True):
            scaled = weight_gradient * share.gather(1, expert)
            total.addcmul_(share, scaled, value=-1).scatter_add_(1, expert, scaled)
        return total, None, None, None


def _list_shares(logits: Tensor, chosen: Tensor, *, jitter: float) -> list[tuple[Tensor, Tensor]]:
    """Return for each choice the probabilities p [R, E] of its candidates, and the chosen expert [R, 1]."""
    first, second = chosen.split(1, dim=1)
    remaining = logits.scatter(1, first, float("-inf"))
    return [
        (_exclude_unlikely(left, logits, jitter=jitter).softmax(-1), expert)
        for left, expert in ((logits, first), (remaining, second))
    ]


def _exclude_unlikely(remaining: Tensor, logits: Tensor, *, jitter: float) -> Tensor:
    """Return the logits of the ``remaining`` experts, −∞ for those that are no candidates."""
    highest = remaining.amax(-1, keepdim=True)
    distance = (highest - logits) / logits.abs().maximum(highest)
    return remaining.masked_fill(distance > 2 * jitter, float("-inf"))

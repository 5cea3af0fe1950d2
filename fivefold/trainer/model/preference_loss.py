"""The loss of direct preference optimization (DPO), which overwrites the logits with their own gradient.

    log π(y|x)   Σ over the tokens of a completion y of log p(token), of the policy π and of the reference ρ
    h            (log π(chosen) − log ρ(chosen)) − (log π(rejected) − log ρ(rejected))
    loss         −log σ(β h)                    backward: ∂loss/∂log π(chosen) = −β σ(−β h) = −∂loss/∂log π(rejected)
    rewards      β (log π − log ρ), of chosen and of rejected

The rows of a batch are pairs of sequences: the first of each is chosen, the second rejected. Ranks that hold parts of
the sequences sum β (log π − log ρ) of each before the pairs are compared. Source: arXiv:2305.18290,
equation 7; the mean over pairs as in trl@1.16.0:trl/trainer/dpo_trainer.py, loss_type sigmoid.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.trainer.model.kernels.loss import Nats, Rescale, rescale


class Reference(NamedTuple):
    """The reference of the preference loss: its log-probabilities [B] of a micro-batch's sequences, and β.

    ``sum_over_ranks``: sums a tensor, in place, over the ``ranks`` that hold parts of the sequences; None: one rank
    holds them in full.
    """

    log_probs: Tensor
    beta: float
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None
    ranks: int = 1


def sequence_log_probs(
    logits: Tensor, targets: Tensor, *, loss: Nats, sequences: int, gradient_scale: float | None
) -> Tensor:
    """Return Σ log p(target) [sequences] over the rows of each sequence, fp32.

    ``logits`` [rows, V] are overwritten, as ``loss`` does: with ``gradient_scale`` · the gradient of −log p, if given.
    """
    parts = zip(logits.chunk(sequences), targets.chunk(sequences), strict=True)
    return -torch.stack([loss(part, target, gradient_scale) for part, target in parts])


class _PreferenceLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, reference: Reference, scale: float, loss: Nats, rescale: Rescale
    ) -> Tensor:
        log_probs, beta, sum_over_ranks, ranks = reference
        gradient_scale = 1.0 if ctx.needs_input_grad[0] else None
        policy = sequence_log_probs(logits, targets, loss=loss, sequences=len(log_probs), gradient_scale=gradient_scale)
        rewards = beta * (policy - log_probs)
        if sum_over_ranks is not None:
            rewards = sum_over_ranks(rewards)
        chosen, rejected = rewards.view(-1, 2).t()
        margin = chosen - rejected
        sums = torch.stack([-F.logsigmoid(margin), chosen, rejected, (margin > 0).float()]).sum(1).mul_(scale / ranks)
        by_pair = torch.sigmoid(-margin).mul_(beta * scale)  # of −log π(chosen); its negative of −log π(rejected)
        ctx.rescale, ctx.factors = rescale, torch.stack([by_pair, -by_pair], 1).flatten()
        ctx.save_for_backward(logits)
        return sums

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits = ctx.saved_tensors[0].detach()
        factors = ctx.factors.mul_(gradient[0])
        for part, factor in zip(logits.chunk(len(factors)), factors, strict=True):
            ctx.rescale(part, factor)
        return logits, None, None, None, None, None


def preference_loss(
    logits: Tensor, targets: Tensor, *, reference: Reference, scale: float, loss: Nats, rescale: Rescale = rescale
) -> Tensor:
    """Return ``scale`` · [loss, reward of chosen, reward of rejected, ranked as in the data], each summed over pairs.

    If several ranks hold parts of the sequences, each returns an equal share of these sums. Only the loss has a
    gradient. ``logits`` [rows, V] and ``targets`` [rows] of the sequences of ``reference``; the logits are overwritten
    with their gradient: use them for nothing else, and run backward once.
    """
    return _PreferenceLoss.apply(logits, targets, reference, scale, loss, rescale)

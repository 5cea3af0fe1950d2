"""Cross-entropy that overwrites the logits, in the dtype of the matmuls, with their own gradient (decision 004)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fivefold.job import LOSS_CHUNK_ELEMENTS
from fivefold.trainer.model.logits import PLAIN, LogitTransform

Nats = Callable[[Tensor, Tensor, Tensor | float | None], Tensor]  # signature of ``nats`` and its vocab-parallel form
Rescale = Callable[[Tensor, Tensor], None]


def nats(
    logits: Tensor,
    targets: Tensor,
    gradient_scale: Tensor | float | None,
    *,
    vocab: int | None = None,
    transform: LogitTransform = PLAIN,
    skips_negative_targets: bool = False,
) -> Tensor:
    """Return Σ over rows of −log softmax(transform(logits))[target], in nats and fp32.

    ``logits`` [rows, V], ``targets`` [rows]. ``logits`` are overwritten: transformed, or with ``gradient_scale`` ·
    their gradient. Columns from ``vocab`` on are padding. ``skips_negative_targets``: rows with a negative target have
    no loss and gradient 0.
    """
    total = torch.zeros((), dtype=torch.float32, device=logits.device)
    transform.shape_(logits, padding=slice(logits.shape[1] if vocab is None else vocab, None))
    for rows in list_row_chunks(logits):
        chunk, target = logits[rows], targets[rows, None]
        if skips_negative_targets:
            skipped, target = target < 0, target.clamp(min=0)
        probabilities = chunk.softmax(-1, dtype=torch.float32)
        # log Σ exp from the largest probability, exp(max) / Σ exp, which is at least 1 / V
        lse = chunk.amax(-1, keepdim=True).float() - probabilities.amax(-1, keepdim=True).log_()
        losses = lse - chunk.gather(-1, target)
        total += (losses.masked_fill_(skipped, 0) if skips_negative_targets else losses).sum()
        if gradient_scale is not None:
            probabilities.scatter_add_(-1, target, torch.full_like(lse, -1.0))
            if skips_negative_targets:
                probabilities.masked_fill_(skipped, 0)
            chunk.copy_(transform.gradient_(probabilities, chunk).mul_(gradient_scale))
        del probabilities  # freed before that of the next chunk is allocated
    return total


def skip_rows(targets: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return targets of which none is negative, and for each row [rows, 1] whether it has a loss.

    ``lse`` [rows, 1] becomes ∞ in the other rows, so that ``logits_to_gradient`` makes their gradient 0.
    """
    skipped = targets[:, None] < 0
    lse.masked_fill_(skipped, torch.inf)
    return targets.clamp(min=0), ~skipped


def log_sum_exp(logits: Tensor) -> Tensor:
    """Return log Σ exp of each row of ``logits`` [rows, V] as fp32 [rows, 1].

    It is −∞ for a row of −∞, as on a rank with only padding.
    """
    return torch.cat([_log_sum_exp(logits[rows]) for rows in list_row_chunks(logits)])


def _log_sum_exp(part: Tensor) -> Tensor:
    """Return ``log_sum_exp`` of a chunk; its maximum is clamped, because −∞ − −∞ would be NaN."""
    maximum = part.amax(1, keepdim=True).float().clamp_(min=torch.finfo(torch.float32).min)
    return torch.sub(part, maximum).exp_().sum(1, keepdim=True).log_().add_(maximum)


def logits_to_gradient(
    logits: Tensor,
    lse: Tensor,
    target: Tensor,
    is_local: Tensor,
    gradient_scale: Tensor | float,
    *,
    transform: LogitTransform = PLAIN,
) -> None:
    """Overwrite ``logits`` [rows, V] with their gradient: ``gradient_scale`` · (softmax − one-hot of the target).

    ``logits`` are transformed already; the gradient is that of the logits before ``transform``. ``lse`` [rows, 1]: log
    Σ exp over the full vocabulary, of which V entries are on this rank. ``target`` [rows, 1]: index of the target among
    them, if ``is_local`` [rows, 1].
    """
    for rows in list_row_chunks(logits):
        probabilities = torch.sub(logits[rows], lse[rows]).exp_()  # fp32, as lse is
        probabilities.scatter_add_(1, target[rows], -is_local[rows].float())
        logits[rows] = transform.gradient_(probabilities, logits[rows]).mul_(gradient_scale)
        del probabilities  # freed before that of the next chunk is allocated


def list_row_chunks(logits: Tensor) -> list[slice]:
    """Return slices of at least one row, with at most ``LOSS_CHUNK_ELEMENTS`` logits each (they are cast to fp32)."""
    rows = max(1, LOSS_CHUNK_ELEMENTS // logits.shape[1])
    return [slice(start, start + rows) for start in range(0, logits.shape[0], rows)]


def rescale(x: Tensor, factor: Tensor) -> None:
    """Multiply ``x`` in place by ``factor``, a scalar."""
    x.mul_(factor)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, scale: float, loss: Nats, rescale: Rescale) -> Tensor:
        ctx.rescale = rescale
        total = loss(logits, targets, scale if ctx.needs_input_grad[0] else None)
        ctx.save_for_backward(logits)
        return total * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits = ctx.saved_tensors[0].detach()
        ctx.rescale(logits, grad)
        return logits, None, None, None, None


def cross_entropy(
    logits: Tensor, targets: Tensor, *, scale: float, loss: Nats = nats, rescale: Rescale = rescale
) -> Tensor:
    """Return ``scale`` · Σ over rows of −log softmax(logits)[target], in nats.

    ``logits`` [rows, V], ``targets`` [rows]. Overwrites ``logits`` with their gradient: use them for nothing else, and
    run backward once. ``loss``: ``nats``, or its vocab-parallel form.
    """
    return _CrossEntropy.apply(logits, targets, scale, loss, rescale)

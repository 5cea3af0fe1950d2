"""Cross-entropy in two Triton kernels: the log-sum-exp of each row, then the gradient, which overwrites the logits.

It computes the same as ``kernels/loss.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fivefold.trainer.model.kernels.fused.launch import ELEMENTS, round_up_to_power_of_two
from fivefold.trainer.model.kernels.loss import skip_rows
from fivefold.trainer.model.logits import PLAIN, LogitTransform
from fivefold.units import ceil_div


def nats(
    logits: Tensor,
    targets: Tensor,
    gradient_scale: Tensor | float | None,
    *,
    vocab: int | None = None,
    transform: LogitTransform = PLAIN,
    skips_negative_targets: bool = False,
) -> Tensor:
    """Return the summed cross-entropy as ``nats`` of ``kernels/loss.py`` does, in two kernels.

    PyTorch's kernels transform the logits before.
    """
    if transform != PLAIN or (vocab is not None and vocab < logits.shape[1]):
        transform.shape_(logits, padding=slice(logits.shape[1] if vocab is None else vocab, None))
    lse: Tensor = log_sum_exp(logits)
    counted = None
    if skips_negative_targets:
        targets, counted = skip_rows(targets, lse)
    target = targets[:, None]
    losses = lse - logits.gather(1, target)
    total = (losses if counted is None else losses.masked_fill_(~counted, 0)).sum()
    if gradient_scale is not None:
        logits_to_gradient(logits, lse, target, counted, gradient_scale, transform=transform)
    return total


def logits_to_gradient(
    logits: Tensor,
    lse: Tensor,
    target: Tensor,
    is_local: Tensor | None,
    gradient_scale: Tensor | float,
    *,
    transform: LogitTransform = PLAIN,
) -> None:
    """Compute ``logits_to_gradient`` of ``kernels/loss.py`` in one kernel; ``is_local`` None: all are on this rank."""
    scale, factor = (gradient_scale, 1.0) if isinstance(gradient_scale, Tensor) else (None, float(gradient_scale))
    overwrite(logits, lse, target, is_local, scale, factor * transform.scale, transform.cap or 0.0)


@torch.library.custom_op("fivefold::log_sum_exp", mutates_args=())
def log_sum_exp(logits: Tensor) -> Tensor:
    """Return log Σ exp of each row of ``logits`` [rows, V] → fp32 [rows, 1]; −∞ for a row of −∞."""
    from fivefold.trainer.model.kernels.triton import loss

    lse = torch.empty(logits.shape[0], 1, dtype=torch.float32, device=logits.device)
    if logits.shape[0]:
        block = min(ELEMENTS, round_up_to_power_of_two(logits.shape[1]))
        loss.log_sum_exp[(logits.shape[0],)](logits, lse, logits.stride(0), logits.shape[1], BLOCK=block, num_warps=8)
    return lse


log_sum_exp.register_fake(lambda logits: torch.empty(logits.shape[0], 1, dtype=torch.float32, device=logits.device))


@torch.library.custom_op("fivefold::into_gradient", mutates_args=("logits",))
def overwrite(
    logits: Tensor,
    lse: Tensor,
    target: Tensor,
    is_local: Tensor | None,
    gradient_scale: Tensor | None,
    factor: float,
    cap: float,
) -> None:
    """Run ``logits_to_gradient`` with ``gradient_scale`` times ``factor``; ``cap`` 0: logits have no cap."""
    from fivefold.trainer.model.kernels.triton import loss

    rows, vocab = logits.shape
    block = min(ELEMENTS, round_up_to_power_of_two(vocab))
    if rows:
        loss.logits_to_gradient[(rows, ceil_div(vocab, block))](
            logits,
            lse,
            target.contiguous(),
            lse if is_local is None else is_local.contiguous(),
            lse if gradient_scale is None else gradient_scale,
            factor,
            cap,
            logits.stride(0),
            vocab,
            OWNED=is_local is not None,
            SCALED=gradient_scale is not None,
            CAPPED=cap > 0,
            BLOCK=block,
            num_warps=8,
        )


overwrite.register_fake(lambda *_: None)


@torch.library.custom_op("fivefold::rescale", mutates_args=("x",))
def rescale(x: Tensor, factor: Tensor) -> None:
    """Multiply ``x`` in place by ``factor``, a scalar on the device; if it is 1 nothing is read or written."""
    from fivefold.trainer.model.kernels.triton import loss

    if x.numel():
        loss.scale[(ceil_div(x.numel(), ELEMENTS),)](x, factor, x.numel(), BLOCK=ELEMENTS, num_warps=8)


rescale.register_fake(lambda *_: None)

"""Optimizers with fp32 arithmetic and moments for weights of any dtype, one block of elements at a time.

    w, g (16 bits) → fp32 block → update with fp32 moments → w, rounded to nearest

PyTorch's fused AdamW keeps its moments in the dtype of the weights, and a bf16 second moment stops changing: with
β₂ = 0.95 an increment below 2^-8 of it is rounded away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

CONVERTED_ELEMENTS = 2**22  # elements that are converted to fp32 at a time
Groups = list[dict[str, Any]]


class AdamW(torch.optim.Optimizer):
    """AdamW as in torch.optim, with fp32 moments and arithmetic for weights of any dtype."""

    def __init__(self, groups: Groups, *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        for weight in iterate_weights(self.param_groups):
            moments = {name: torch.zeros_like(weight, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")}
            step = torch.zeros((), dtype=torch.float32, device=weight.device)
            self.state[weight].update(step=step, **moments)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all weights once."""
        for weight, state, group in count_step(self):
            for w, g, m, v in iterate_blocks(weight, state["exp_avg"], state["exp_avg_sq"]):
                apply_adamw(w, g, m, v, step=state["step"], group=group)
                del w, g  # before the next block is converted


def apply_adamw(w: Tensor, g: Tensor, m: Tensor, v: Tensor, *, step: Tensor, group: dict[str, Any]) -> None:
    """Apply one AdamW update in place to w, with gradient g and moments m and v, all fp32; ``step`` counts from 1."""
    beta1, beta2 = group["betas"]
    torch._fused_adamw_(
        [w],
        [g],
        [m],
        [v],
        [],
        [step],
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )


def count_step(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, dict[str, Tensor], dict[str, Any]]]:
    """Increment the step of every weight; yield each weight with its state and its parameter group."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            state = optimizer.state[weight]
            state["step"] += 1
            yield weight, state, group


def iterate_weights(groups: Groups) -> Iterator[Tensor]:
    """Yield every weight of the parameter ``groups``."""
    for group in groups:
        yield from group["params"]


def iterate_blocks(weight: Tensor, *moments: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield weight, gradient and moments in fp32, block by block, and copy an updated block back to the weight."""
    assert weight.grad is not None
    tensors = (weight, weight.grad, *moments)
    size = weight.numel() if weight.dtype == torch.float32 else CONVERTED_ELEMENTS
    for w, g, *block_moments in zip(*(tensor.view(-1).split(size) for tensor in tensors), strict=True):
        w_fp32 = w.float()  # w itself if it is fp32
        yield w_fp32, g.float(), *block_moments
        if w_fp32 is not w:
            w.copy_(w_fp32)
        del w_fp32

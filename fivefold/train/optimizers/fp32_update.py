"""Updates in fp32 of weights of any width, a block of elements at a time: the widened copy is never large.

    w, g (16 bits) → fp32 block → update with fp32 moments → w, rounded to nearest

torch's fused AdamW keeps its moments in the dtype of the weights, and bf16 cannot hold a second moment: with
β₂ = 0.95 it stands still once a gradient adds less than 2^-8 of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

BLOCK = 2**22  # elements that are fp32 at once
Groups = list[dict[str, Any]]


class AdamW(torch.optim.Optimizer):
    """torch.optim.AdamW with fp32 moments and arithmetic, whatever the weights are."""

    def __init__(self, groups: Groups, *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        for weight in all_weights(self.param_groups):
            moments = {name: torch.zeros_like(weight, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")}
            step = torch.zeros((), dtype=torch.float32, device=weight.device)
            self.state[weight].update(step=step, **moments)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of all weights."""
        for weight, state, group in count_step(self):
            for w, g, m, v in blocks(weight, state["exp_avg"], state["exp_avg_sq"]):
                adamw(w, g, m, v, step=state["step"], group=group)


class Sgd(torch.optim.Optimizer):
    """torch.optim.SGD in fp32:  m ← μ m + g + λ w,  w ← w − lr m. The decay goes through the momentum."""

    def __init__(self, groups: Groups, *, lr: float, momentum: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum})
        if momentum:
            for weight in all_weights(self.param_groups):
                self.state[weight]["momentum"] = torch.zeros_like(weight, dtype=torch.float32)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of all weights."""
        for group in self.param_groups:
            for weight in group["params"]:
                for w, g, *kept in blocks(weight, *self.state[weight].values()):
                    if kept:
                        change = kept[0].mul_(group["momentum"]).add_(g).add_(w, alpha=group["weight_decay"])
                    else:
                        change = g.add(w, alpha=group["weight_decay"])
                    w.add_(change, alpha=-group["lr"])


def adamw(w: Tensor, g: Tensor, m: Tensor, v: Tensor, *, step: Tensor, group: dict[str, Any]) -> None:
    """One update in place, all in fp32."""
    beta1, beta2 = group["betas"]
    torch._fused_adamw_(
        [w], [g], [m], [v], [], [step], lr=group["lr"], beta1=beta1, beta2=beta2,
        weight_decay=group["weight_decay"], eps=group["eps"], amsgrad=False, maximize=False,
    )  # fmt: skip


def count_step(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, dict[str, Tensor], dict[str, Any]]]:
    """All weights with their state, of which this is one more step, and their group."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            state = optimizer.state[weight]
            state["step"] += 1
            yield weight, state, group


def all_weights(groups: Groups) -> Iterator[Tensor]:
    """All weights of ``groups``."""
    for group in groups:
        yield from group["params"]


def blocks(weight: Tensor, *moments: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Weight, gradient and moments in fp32, in pieces; what was done to a piece of the weight is put back."""
    assert weight.grad is not None
    whole = (weight, weight.grad, *moments)
    size = weight.numel() if weight.dtype == torch.float32 else BLOCK
    for w, g, *kept in zip(*(tensor.view(-1).split(size) for tensor in whole), strict=True):
        wide = w.float()  # itself, where it is wide
        yield wide, g.float(), *kept
        if wide is not w:
            w.copy_(wide)

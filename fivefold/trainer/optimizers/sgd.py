"""SGD with optional momentum, in fp32 arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fivefold.trainer.optimizers.fp32_update import Groups, iterate_blocks, iterate_weights
from fivefold.trainer.optimizers.optimized_weights import OptimizedWeights


def build(weights: OptimizedWeights) -> Sgd:
    """Build SGD over this rank's shards."""
    job = weights.job
    return Sgd(weights.make_groups(weights.shards), lr=job.learning_rate.peak, momentum=job.optimizer.momentum)


class Sgd(torch.optim.Optimizer):
    """SGD as in torch.optim, in fp32:  m ← μ m + g + λ w,  w ← w − lr m. Weight decay is part of the momentum."""

    def __init__(self, groups: Groups, *, lr: float, momentum: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum})
        if momentum:
            for weight in iterate_weights(self.param_groups):
                self.state[weight]["momentum"] = torch.zeros_like(weight, dtype=torch.float32)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all weights once."""
        for group in self.param_groups:
            for weight in group["params"]:
                for w, g, *momenta in iterate_blocks(weight, *self.state[weight].values()):
                    if momenta:
                        change = momenta[0].mul_(group["momentum"]).add_(g).add_(w, alpha=group["weight_decay"])
                    else:
                        w.mul_(1 - group["lr"] * group["weight_decay"])
                        change = g
                    w.add_(change, alpha=-group["lr"])
                    del w, g, change  # before the next block is converted

"""Lion with fp32 arithmetic."""

import torch

from fivefold.trainer.optimizers.fp32_update import iterate_blocks, iterate_weights


def build(weights):
    job = weights.job
    return Lion(weights.make_groups(weights.shards), lr=job.learning_rate.peak, betas=job.optimizer.betas)


class Lion(torch.optim.Optimizer):
    def __init__(self, groups, *, lr, betas):
        super().__init__(groups, {"lr": lr, "betas": betas})
        for weight in iterate_weights(self.param_groups):
            self.state[weight]["momentum"] = torch.zeros_like(weight, dtype=torch.float32)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for weight in group["params"]:
                for w, g, m in iterate_blocks(weight, self.state[weight]["momentum"]):
                    w.mul_(1 - group["lr"] * group["weight_decay"])
                    w.add_(torch.lerp(g, m, first).sign_(), alpha=-group["lr"])
                    m.lerp_(g, 1 - second)

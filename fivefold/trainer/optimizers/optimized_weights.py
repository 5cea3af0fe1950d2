"""The weights that an optimizer updates on one rank, with their rates: what every ``build`` of this folder is given."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fivefold.job import Job
from fivefold.trainer.optimizers.gather_matrices import ShardedWeight
from fivefold.trainer.parallel.shard import Shard
from fivefold.update import Rates


class OptimizedWeights(NamedTuple):
    """Weights as this rank holds them; ``rates``: name to weight decay and factor of the learning rate."""

    sharded: list[ShardedWeight]
    rates: dict[str, Rates]
    job: Job
    device: torch.device

    @property
    def shards(self) -> list[Shard]:
        """Return this rank's pieces."""
        return [cut.shard for cut in self.sharded]

    def make_groups(self, shards: list[Shard]) -> list[dict[str, Any]]:
        """Return torch's parameter groups, one per learning rate and decay; ``times``: factor of the rate."""
        found: dict[Rates, list[Tensor]] = {}
        for shard in shards:
            if shard.rows:
                found.setdefault(self.rates[shard.name], []).append(shard.weight)
        return [
            {
                "params": params,
                "weight_decay": each.weight_decay,
                "times": each.rate,
                "lr": each.rate * self.job.learning_rate.peak,
            }
            for each, params in found.items()
        ]


def ensure_moments(optimizer: torch.optim.Optimizer, shards: list[Shard]) -> None:
    """Allocate torch AdamW's state before its first step, so that it can be loaded; other optimizers have theirs."""
    for shard in shards:
        if isinstance(optimizer, torch.optim.AdamW) and shard.rows and not optimizer.state[shard.weight]:
            first, second = (torch.zeros_like(shard.weight) for _ in range(2))
            step = torch.zeros((), dtype=torch.float32, device=shard.weight.device)
            optimizer.state[shard.weight].update(step=step, exp_avg=first, exp_avg_sq=second)

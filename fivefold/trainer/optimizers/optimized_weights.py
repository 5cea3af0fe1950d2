"""The weights that an optimizer updates on one rank, with their rates: the argument of every ``build`` here."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fivefold.job import Job
from fivefold.trainer.optimizers.gather_matrices import ShardAxes
from fivefold.trainer.parallel.shard import WeightShard
from fivefold.update import Rates


class OptimizedWeights(NamedTuple):
    """The weights of this rank; ``rates`` maps a weight's name to weight decay and learning-rate factor."""

    sharded: list[ShardAxes]
    rates: dict[str, Rates]
    job: Job
    device: torch.device

    @property
    def shards(self) -> list[WeightShard]:
        """Return this rank's shards."""
        return [cut.shard for cut in self.sharded]

    def make_groups(self, shards: list[WeightShard]) -> list[dict[str, Any]]:
        """Return torch's parameter groups, one per learning rate and weight decay; ``times`` is the rate's factor."""
        weights_by_rates: dict[Rates, list[Tensor]] = {}
        for shard in shards:
            if shard.rows:
                weights_by_rates.setdefault(self.rates[shard.name], []).append(shard.weight)
        return [
            {
                "params": params,
                "weight_decay": rates.weight_decay,
                "times": rates.rate,
                "lr": rates.rate * self.job.learning_rate.peak,
            }
            for rates, params in weights_by_rates.items()
        ]


def ensure_moments(optimizer: torch.optim.Optimizer, shards: list[WeightShard]) -> None:
    """Allocate the state of torch's AdamW before its first step, so that it can be loaded.

    Other optimizers allocate their state themselves.
    """
    for shard in shards:
        if isinstance(optimizer, torch.optim.AdamW) and shard.rows and not optimizer.state[shard.weight]:
            first, second = (torch.zeros_like(shard.weight) for _ in range(2))
            step = torch.zeros((), dtype=torch.float32, device=shard.weight.device)
            optimizer.state[shard.weight].update(step=step, exp_avg=first, exp_avg_sq=second)

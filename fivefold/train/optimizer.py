"""The update of the shards: AdamW, clipping by their global gradient norm, the learning rate as a function.

Loshchilov & Hutter, arXiv:1711.05101. Vectors (norms, biases) are not decayed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fivefold.job import Job, LearningRate
from fivefold.model.weights import Weight
from fivefold.record import Mistake
from fivefold.train.parallel.collectives import all_reduce
from fivefold.train.parallel.mesh import Ranks
from fivefold.train.parallel.shard import Shard
from fivefold.train.parallel.zero import ZeroUnit


def make(units: list[ZeroUnit], job: Job) -> torch.optim.AdamW:
    """The optimizer over this rank's shards."""
    settings = job.optimizer
    if settings.kind != "adamw":
        raise Mistake(f"optimizer {settings.kind!r} cannot be trained yet; use adamw")
    shards = [shard for unit in units for shard in unit.shards if shard.rows]
    vectors = [shard.weight for shard in shards if _is_vector(shard.held.weight)]
    matrices = [shard.weight for shard in shards if not _is_vector(shard.held.weight)]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=job.learning_rate.peak, betas=settings.betas, eps=settings.epsilon, fused=True,
    )  # fmt: skip


def learning_rate(schedule: LearningRate, *, step: int, steps: int) -> float:
    """The rate of step ``step`` (from 0) of ``steps``."""
    warmup = schedule.warmup_steps
    if step < warmup:
        return schedule.peak * (step + 1) / warmup
    if schedule.kind == "constant":
        return schedule.peak
    start = warmup
    if schedule.kind == "wsd":
        start = max(warmup, steps - (schedule.decay_steps or max(1, steps // 5)))
    done = min(1.0, max(0.0, (step - start) / max(1, steps - 1 - start)))
    left = 0.5 * (1 + math.cos(math.pi * done)) if schedule.kind == "cosine" else 1 - done
    return schedule.peak * (schedule.floor + (1 - schedule.floor) * left)


def clip(shards: list[Shard], norm: Tensor, *, largest: float) -> None:
    """Scale all gradients so that their global ``norm`` is at most ``largest``; 0 leaves them alone."""
    grads = [shard.weight.grad for shard in shards if shard.weight.grad is not None]
    if largest and grads:
        torch._foreach_mul_(grads, (largest / (norm + 1e-6)).clamp(max=1.0))


def sum_over_ranks(shards: list[Shard], *numbers: float | Tensor, ranks: Ranks) -> tuple[Tensor, list[Tensor]]:
    """The global gradient norm and the sums of ``numbers`` over all ranks, by one all_reduce, in fp32.

    The square of a gradient that several ranks hold is divided by their number.
    """
    square = torch.zeros((), dtype=torch.float32, device=ranks.device)
    for holders in sorted({shard.held.holders for shard in shards}):
        here = [s.weight.grad for s in shards if s.held.holders == holders and s.weight.grad is not None]
        if here:
            square += torch.stack(torch._foreach_norm(here, dtype=torch.float32)).square().sum() / holders
    packed = torch.stack([square, *(torch.as_tensor(n, dtype=torch.float32, device=ranks.device) for n in numbers)])
    all_reduce(packed, ranks["world"]).wait()
    return packed[0].sqrt(), list(packed[1:])


def _is_vector(weight: Weight) -> bool:
    return weight.kind in ("norm", "bias", "vector") or weight.name.endswith("bias")

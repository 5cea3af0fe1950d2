"""The update of the shards: which optimizer, clipping by their global gradient norm, the learning rate as a function.

AdamW: Loshchilov & Hutter, arXiv:1711.05101; the others are in ``optimizers/``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.weights import Weight
from fivefold.train.optimizers import fp32_update
from fivefold.train.optimizers.adafactor import Adafactor
from fivefold.train.optimizers.eight_bit import AdamW8bit
from fivefold.train.optimizers.gather_matrices import sharded_weights
from fivefold.train.optimizers.muon import Muon
from fivefold.train.parallel.collectives import all_reduce
from fivefold.train.parallel.mesh import Ranks
from fivefold.train.parallel.shard import Shard
from fivefold.train.parallel.zero import ZeroUnit
from fivefold.update import LearningRate, Part, Rates


def make(units: list[ZeroUnit], job: Job, ranks: Ranks) -> torch.optim.Optimizer:
    """The optimizer over this rank's shards; every rank calls it."""
    settings, rate = job.optimizer, job.learning_rate.peak
    found = list(sharded_weights(units, ranks))
    shards = [cut.shard for cut in found]
    rates = {shard.name: settings.rates(weight_group(shard.local_weight.weight)) for shard in shards}
    if settings.kind == "adamw8bit":
        groups = _groups(shards, rates, rate)
        return AdamW8bit(groups, found, lr=rate, betas=settings.betas, eps=settings.epsilon)
    if settings.kind == "sgd":
        return fp32_update.Sgd(_groups(shards, rates, rate), lr=rate, momentum=settings.momentum)
    if settings.kind == "adafactor":
        return Adafactor(found, lr=rate, rates=rates)
    if settings.kind == "muon":
        rest = [cut.shard for cut in found if not cut.hidden and cut.shard.rows]
        adamw = _adamw(rest, rates, job) if rest else None
        if adamw is not None:
            ensure_moments(adamw, rest)
        hidden = [cut for cut in found if cut.hidden]
        return Muon(hidden, adamw, lr=rate, momentum=settings.momentum, rates=rates)
    return _adamw(shards, rates, job)


def _adamw(shards: list[Shard], rates: dict[str, Rates], job: Job) -> torch.optim.Optimizer:
    settings, rate = job.optimizer, job.learning_rate.peak
    groups = _groups(shards, rates, rate)
    if job.precision.updated_bytes != job.precision.moments_bytes[0]:
        return fp32_update.AdamW(groups, lr=rate, betas=settings.betas, eps=settings.epsilon)
    return torch.optim.AdamW(groups, lr=rate, betas=settings.betas, eps=settings.epsilon, fused=True)


def _groups(shards: list[Shard], rates: dict[str, Rates], rate: float) -> list[dict[str, Any]]:
    """Weights of one rate and decay together; ``set_rate`` knows ``times``."""
    found: dict[Rates, list[Tensor]] = {}
    for shard in shards:
        if shard.rows:
            found.setdefault(rates[shard.name], []).append(shard.weight)
    return [
        {"params": params, "weight_decay": each.weight_decay, "times": each.rate, "lr": each.rate * rate}
        for each, params in found.items()
    ]


def weight_group(weight: Weight) -> Part | None:
    """Which group of ``job.optimizer.groups`` a weight belongs to, if there is one."""
    if weight.is_vector:
        return "vectors"
    return "experts" if weight.kind.startswith("expert") else PARTS.get(weight.kind)


PARTS: dict[str, Part] = {"embedding": "embeddings", "head": "head", "router": "router"}


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("times", 1.0)


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


def clip(shards: list[Shard], norm: Tensor, *, largest: float, scale: float = 1.0) -> None:
    """Scale all gradients so that their global ``norm`` is at most ``largest``; 0 leaves them alone.

    ``scale``: by which the loss was multiplied; the gradients still are, the norm is not.
    """
    grads = [shard.weight.grad for shard in shards if shard.weight.grad is not None]
    if grads and (largest or scale != 1):
        factor = (largest / (norm + 1e-6)).clamp(max=1.0) if largest else torch.ones_like(norm)
        torch._foreach_mul_(grads, factor if scale == 1 else factor / scale)


def sum_over_ranks(shards: list[Shard], *numbers: float | Tensor, ranks: Ranks) -> tuple[Tensor, list[Tensor]]:
    """The global gradient norm and the sums of ``numbers`` over all ranks, by one all_reduce, in fp32.

    The square of a gradient that several ranks hold is divided by their number.
    """
    square = torch.zeros((), dtype=torch.float32, device=ranks.device)
    for holders in sorted({shard.local_weight.holders for shard in shards}):
        here = [s.weight.grad for s in shards if s.local_weight.holders == holders and s.weight.grad is not None]
        if here:
            square += torch.stack(torch._foreach_norm(here, dtype=torch.float32)).square().sum() / holders
    packed = torch.stack([square, *(torch.as_tensor(n, dtype=torch.float32, device=ranks.device) for n in numbers)])
    all_reduce(packed, ranks["world"]).wait()
    return packed[0].sqrt(), list(packed[1:])


def check_reshardable(optimizer: torch.optim.Optimizer, then: Layout) -> None:
    """A ``Mistake`` where moments of a layout cannot be taken up under this one: codes of 8 bits in other blocks."""
    if isinstance(optimizer, AdamW8bit):
        optimizer.check_reshardable(then)


def moments(optimizer: torch.optim.Optimizer, shard: Shard) -> Iterator[tuple[str, Shard | None, Tensor]]:
    """What is kept of a weight by name, and of which tensor it is this rank's part; None: a number all ranks share."""
    parts = optimizer.parts.get(shard.weight, {}) if isinstance(optimizer, Adafactor | AdamW8bit) else {}
    for name, tensor in optimizer.state[shard.weight].items() if shard.rows else ():
        yield name, parts.get(name, shard) if tensor.ndim else None, tensor


def ensure_moments(optimizer: torch.optim.Optimizer, shards: list[Shard]) -> None:
    """Give torch's AdamW the state that it would make in its first step; all others have theirs."""
    for shard in shards:
        if isinstance(optimizer, torch.optim.AdamW) and shard.rows and not optimizer.state[shard.weight]:
            first, second = (torch.zeros_like(shard.weight) for _ in range(2))
            step = torch.zeros((), dtype=torch.float32, device=shard.weight.device)
            optimizer.state[shard.weight].update(step=step, exp_avg=first, exp_avg_sq=second)

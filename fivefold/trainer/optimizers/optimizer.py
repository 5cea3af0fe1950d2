"""The update of the shards: which optimizer, clipping by global gradient norm, learning-rate schedules.

AdamW: Loshchilov & Hutter, arXiv:1711.05101; torch's, or one of this folder.
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
from fivefold.trainer.optimizers import fp32_update
from fivefold.trainer.optimizers.adafactor import Adafactor
from fivefold.trainer.optimizers.eight_bit import Codes
from fivefold.trainer.optimizers.gather_matrices import sharded_weights
from fivefold.trainer.optimizers.low_precision_moments import Format, NarrowAdamW, Scaled, Unscaled
from fivefold.trainer.optimizers.muon import Muon
from fivefold.trainer.parallel.collectives import all_reduce
from fivefold.trainer.parallel.mesh import Ranks
from fivefold.trainer.parallel.shard import Shard
from fivefold.trainer.parallel.zero import ZeroUnit
from fivefold.update import LearningRate, Part, Rates


def make(units: list[ZeroUnit], job: Job, ranks: Ranks) -> torch.optim.Optimizer:
    """Make the job's optimizer over this rank's shards; every rank calls it."""
    settings, rate = job.optimizer, job.learning_rate.peak
    found = list(sharded_weights(units, ranks))
    shards = [cut.shard for cut in found]
    rates = {shard.name: settings.rates(weight_group(shard.local_weight.weight)) for shard in shards}
    if (formats := _formats(job, ranks)) is not None:
        name = "adamw8bit" if settings.kind == "adamw8bit" else f"precision {job.precision.name!r}"
        return NarrowAdamW(
            _groups(shards, rates, rate), found, lr=rate, betas=settings.betas, eps=settings.epsilon, formats=formats,
            name=name,
        )  # fmt: skip
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


def _formats(job: Job, ranks: Ranks) -> tuple[Format, Format] | None:
    """The formats of AdamW's moments if they are narrower than fp32: 8-bit codes, or what the recipe says."""
    if job.optimizer.kind == "adamw8bit":
        return Codes.of(signed=True, device=ranks.device), Codes.of(signed=False, device=ranks.device)
    sizes, half = job.precision.moments_bytes, job.precision.half
    if job.optimizer.kind != "adamw" or sizes == (4, 4):
        return None
    found: list[Format] = []
    for size, eight, signed in zip(sizes, (torch.float8_e4m3fn, torch.float8_e5m2), (True, False), strict=True):
        if size == 1:
            found.append(Scaled(eight, signed))
        else:
            found.append(Scaled(torch.float16, signed) if half == "fp16" else Unscaled(torch.bfloat16))
    return found[0], found[1]


def _adamw(shards: list[Shard], rates: dict[str, Rates], job: Job) -> torch.optim.Optimizer:
    """torch's fused AdamW if its moments may have the weights' dtype, else ours with fp32 moments."""
    settings, rate = job.optimizer, job.learning_rate.peak
    groups = _groups(shards, rates, rate)
    if job.precision.updated_bytes != job.precision.moments_bytes[0]:
        return fp32_update.AdamW(groups, lr=rate, betas=settings.betas, eps=settings.epsilon)
    return torch.optim.AdamW(groups, lr=rate, betas=settings.betas, eps=settings.epsilon, fused=True)


def _groups(shards: list[Shard], rates: dict[str, Rates], rate: float) -> list[dict[str, Any]]:
    """torch's parameter groups, one per learning rate and decay; ``times``: factor of the rate, for ``set_rate``."""
    found: dict[Rates, list[Tensor]] = {}
    for shard in shards:
        if shard.rows:
            found.setdefault(rates[shard.name], []).append(shard.weight)
    return [
        {"params": params, "weight_decay": each.weight_decay, "times": each.rate, "lr": each.rate * rate}
        for each, params in found.items()
    ]


def weight_group(weight: Weight) -> Part | None:
    """The group of ``job.optimizer.groups`` that ``weight`` belongs to; None: none of them."""
    if weight.is_vector:
        return "vectors"
    return "experts" if weight.kind.startswith("expert") else PARTS.get(weight.kind)


PARTS: dict[str, Part] = {"embedding": "embeddings", "head": "head", "router": "router"}


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of the next step, times each group's own factor."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("times", 1.0)


def learning_rate(schedule: LearningRate, *, step: int, steps: int) -> float:
    """The learning rate of step ``step`` (from 0) of ``steps``: linear warm-up, then ``schedule.kind``."""
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

    ``scale``: factor of the loss, which is still in the gradients and is divided out here; ``norm`` is without it.
    """
    grads = [shard.weight.grad for shard in shards if shard.weight.grad is not None]
    if grads and (largest or scale != 1):
        factor = (largest / (norm + 1e-6)).clamp(max=1.0) if largest else torch.ones_like(norm)
        torch._foreach_mul_(grads, factor if scale == 1 else factor / scale)


def sum_over_ranks(shards: list[Shard], *numbers: float | Tensor, ranks: Ranks) -> tuple[Tensor, list[Tensor]]:
    """Global gradient norm, and sums of ``numbers`` over all ranks, by one all_reduce over the world in fp32.

    Squares of a gradient that several ranks hold are divided by the number of holders.
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
    """Raise a ``Mistake`` if moments of layout ``then`` cannot be loaded here: their 8-bit blocks do not align."""
    if isinstance(optimizer, NarrowAdamW):
        optimizer.check_reshardable(then)


def moments(optimizer: torch.optim.Optimizer, shard: Shard) -> Iterator[tuple[str, Shard | None, Tensor]]:
    """Yield the optimizer state of a weight: name, sharding (None: a scalar, equal on all ranks), local tensor."""
    parts = optimizer.parts.get(shard.weight, {}) if isinstance(optimizer, Adafactor | NarrowAdamW) else {}
    for name, tensor in optimizer.state[shard.weight].items() if shard.rows else ():
        yield name, parts.get(name, shard) if tensor.ndim else None, tensor


def ensure_moments(optimizer: torch.optim.Optimizer, shards: list[Shard]) -> None:
    """Allocate torch AdamW's state before its first step, so that it can be loaded; other optimizers have theirs."""
    for shard in shards:
        if isinstance(optimizer, torch.optim.AdamW) and shard.rows and not optimizer.state[shard.weight]:
            first, second = (torch.zeros_like(shard.weight) for _ in range(2))
            step = torch.zeros((), dtype=torch.float32, device=shard.weight.device)
            optimizer.state[shard.weight].update(step=step, exp_avg=first, exp_avg_sq=second)

"""The update of the shards: the job's optimizer, clipping by the global gradient norm, learning-rate schedules.

The module with an optimizer's name builds it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.weights import Weight
from fivefold.trainer.optimizers.gather_matrices import list_sharded_weights
from fivefold.trainer.optimizers.low_precision_moments import NarrowAdamW
from fivefold.trainer.optimizers.optimized_weights import OptimizedWeights
from fivefold.trainer.parallel.collectives import all_reduce
from fivefold.trainer.parallel.host_memory import HOST, copy_to_host, use_host_memory
from fivefold.trainer.parallel.mesh import Ranks
from fivefold.trainer.parallel.shard import WeightShard
from fivefold.trainer.parallel.zero import ZeroUnit
from fivefold.update import LearningRate, Optimizer, Part, Rates


def build_optimizer(units: list[ZeroUnit], job: Job, ranks: Ranks) -> torch.optim.Optimizer:
    """Make the job's optimizer over this rank's shards; every rank calls it."""
    kind, name = job.optimizer.kind, f"{__package__}.{job.optimizer.kind}"
    if find_spec(name) is None:
        raise UserError(
            f"optimizer {kind}: predict and search support it, train and dryrun do not yet; use another optimizer"
        )
    sharded = list(list_sharded_weights(units, ranks))
    if not sharded:  # of a pipeline stage, every weight of which is frozen
        return torch.optim.SGD([{"params": []}])
    settings = job.optimizer
    rates = {cut.shard.name: _find_rates(cut.shard.local_weight.weight, settings) for cut in sharded}
    is_offloaded = any(cut.shard.is_offloaded for cut in sharded)
    weights = OptimizedWeights(sharded, rates, job, HOST if is_offloaded else ranks.device)
    with use_host_memory() if is_offloaded else nullcontext():
        optimizer: torch.optim.Optimizer = import_module(name).build(weights)
    return optimizer


def _find_rates(weight: Weight, settings: Optimizer) -> Rates:
    """Return learning-rate factor and weight decay of ``weight``; one without a gradient does not decay either."""
    rates = settings.rates(find_weight_group(weight))
    return rates if weight.has_gradient else rates._replace(weight_decay=0.0)


def find_weight_group(weight: Weight) -> Part | None:
    """Return the group of ``job.optimizer.groups`` that ``weight`` belongs to, or None."""
    if weight.is_vector:
        return "vectors"
    return "experts" if weight.kind.startswith("expert") else PART_OPTIONS.get(weight.kind)


PART_OPTIONS: dict[str, Part] = {"embedding": "embeddings", "head": "head", "router": "router"}


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of the next step, times each parameter group's own factor."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("times", 1.0)


def compute_learning_rate(schedule: LearningRate, *, step: int, steps: int) -> float:
    """Return the learning rate of step ``step`` (from 0) of ``steps``: linear warm-up, then ``schedule.kind``."""
    warmup = schedule.warmup_steps
    if step < warmup:
        return schedule.peak * (step + 1) / warmup
    if schedule.kind == "constant":
        return schedule.peak
    decay_start = warmup
    if schedule.kind == "wsd":
        decay_start = max(warmup, steps - (schedule.decay_steps or max(1, steps // 5)))
    decay_progress = min(1.0, max(0.0, (step - decay_start) / max(1, steps - 1 - decay_start)))
    remaining = 0.5 * (1 + math.cos(math.pi * decay_progress)) if schedule.kind == "cosine" else 1 - decay_progress
    return schedule.peak * (schedule.floor + (1 - schedule.floor) * remaining)


def update(optimizer: torch.optim.Optimizer, shards: list[WeightShard]) -> None:
    """Update the shards once. Those in host memory are updated there, with copies of their gradients."""
    gradients = {shard: shard.gradient for shard in shards if shard.is_offloaded and shard.gradient is not None}
    if not gradients:
        optimizer.step()
        return
    for shard, gradient in zip(gradients, copy_to_host([*gradients.values()]), strict=True):
        shard.weight.grad = gradient
    with use_host_memory():
        optimizer.step()
    for shard in gradients:
        shard.weight.grad = None


def clip(shards: list[WeightShard], norm: Tensor, *, largest: float, scale: float = 1.0) -> None:
    """Scale all gradients so that their global ``norm`` is at most ``largest``; 0 disables clipping.

    ``scale`` is the loss scale that the gradients still contain; it is divided out here. ``norm`` does not contain it.
    """
    grads = [shard.gradient for shard in shards if shard.gradient is not None]
    if grads and (largest or scale != 1):
        factor = (largest / (norm + 1e-6)).clamp(max=1.0) if largest else torch.ones_like(norm)
        torch._foreach_mul_(grads, factor if scale == 1 else factor / scale)


def sum_over_ranks(shards: list[WeightShard], *numbers: float | Tensor, ranks: Ranks) -> tuple[Tensor, list[Tensor]]:
    """Return the global gradient norm and the sums of ``numbers`` over all ranks.

    It is one fp32 all-reduce over the world. Squares of a gradient that several ranks hold are divided by the number of
    holders.
    """
    square = torch.zeros((), dtype=torch.float32, device=ranks.device)
    for holders in sorted({shard.local_weight.holders for shard in shards}):
        gradients = [s.gradient for s in shards if s.local_weight.holders == holders and s.gradient is not None]
        if gradients:
            square += torch.stack(torch._foreach_norm(gradients, dtype=torch.float32)).square().sum() / holders
    packed = torch.stack([square, *(torch.as_tensor(n, dtype=torch.float32, device=ranks.device) for n in numbers)])
    all_reduce(packed, ranks["world"]).wait()
    return packed[0].sqrt(), list(packed[1:])


def check_reshardable(optimizer: torch.optim.Optimizer, then: Layout) -> None:
    """Raise a user error if moments saved under layout ``then`` cannot be loaded: their 8-bit blocks do not align."""
    if isinstance(optimizer, NarrowAdamW):
        optimizer.check_reshardable(then)


def list_moments(
    optimizer: torch.optim.Optimizer, shard: WeightShard
) -> Iterator[tuple[str, WeightShard | None, Tensor]]:
    """Yield the optimizer state of a weight: name, sharding (None: a scalar, equal on all ranks), local tensor."""
    # ``parts``: the sharding of states that are not sharded like their weight
    parts: dict[str, WeightShard] = getattr(optimizer, "parts", {}).get(shard.weight, {})
    for name, tensor in optimizer.state[shard.weight].items() if shard.rows else ():
        yield name, parts.get(name, shard) if tensor.ndim else None, tensor

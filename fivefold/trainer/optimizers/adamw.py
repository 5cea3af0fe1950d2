"""AdamW (Loshchilov & Hutter, arXiv:1711.05101): PyTorch's or one of this package, by the formats of the moments."""

from __future__ import annotations

import torch

from fivefold.job import Job
from fivefold.trainer.optimizers import fp32_update
from fivefold.trainer.optimizers.low_precision_moments import MomentFormat, NarrowAdamW, ScaledFormat, UnscaledFormat
from fivefold.trainer.optimizers.optimized_weights import OptimizedWeights
from fivefold.trainer.parallel.shard import WeightShard


def build(weights: OptimizedWeights) -> torch.optim.Optimizer:
    """Build AdamW over this rank's shards, with moments in the formats of the precision recipe."""
    formats = find_formats(weights.job)
    if formats is None:
        return build_fp32(weights, weights.shards)
    return build_narrow(weights, formats, name=f"precision {weights.job.precision.name!r}")


def build_narrow(weights: OptimizedWeights, formats: tuple[MomentFormat, MomentFormat], *, name: str) -> NarrowAdamW:
    """Build AdamW with moments in ``formats``; ``name`` is the optimizer's name in error messages."""
    settings = weights.job.optimizer
    return NarrowAdamW(
        weights.make_groups(weights.shards),
        weights.sharded,
        lr=weights.job.learning_rate.peak,
        betas=settings.betas,
        eps=settings.epsilon,
        formats=formats,
        name=name,
    )


def find_formats(job: Job) -> tuple[MomentFormat, MomentFormat] | None:
    """Return the moment formats of the recipe if they are narrower than fp32, else None."""
    sizes, half = job.precision.moments_bytes, job.precision.half
    if sizes == (4, 4):
        return None
    formats: list[MomentFormat] = []
    for size, byte_dtype, signed in zip(sizes, (torch.float8_e4m3fn, torch.float8_e5m2), (True, False), strict=True):
        if size == 1:
            formats.append(ScaledFormat(byte_dtype, signed))
        else:
            formats.append(ScaledFormat(torch.float16, signed) if half == "fp16" else UnscaledFormat(torch.bfloat16))
    return formats[0], formats[1]


def build_fp32(weights: OptimizedWeights, shards: list[WeightShard]) -> torch.optim.Optimizer:
    """Build PyTorch's fused AdamW if its moments may have the weights' dtype, else ``fp32_update.AdamW``."""
    job = weights.job
    settings = job.optimizer
    rate = job.learning_rate.peak
    groups = weights.make_groups(shards)
    if job.precision.updated_bytes != job.precision.moments_bytes[0]:
        return fp32_update.AdamW(groups, lr=rate, betas=settings.betas, eps=settings.epsilon)
    return torch.optim.AdamW(groups, lr=rate, betas=settings.betas, eps=settings.epsilon, fused=True)

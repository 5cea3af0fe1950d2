"""Which products are made in eight bits: those of all linear layers and experts in blocks.

Not the embedding, the head, routers, norms and the core of attention, as in torchao's converted models and in
DeepSeek-V3 (arXiv:2412.19437 §3.3.1).
"""

from __future__ import annotations

from torch import nn

from fivefold.job import Job
from fivefold.train.model.experts import Experts
from fivefold.train.model.float8.grouped import Float8GroupedGemms
from fivefold.train.model.float8.matmul import Float8Gemms
from fivefold.train.model.linear import Linear


def attach(blocks: nn.Module, job: Job) -> None:
    """Set the seams ``gemms`` of ``blocks``, if the recipe is narrow."""
    if not job.precision.narrow:
        return
    dense, grouped = Float8Gemms(job.precision, kernel=not job.emulate), Float8GroupedGemms(job.precision)
    for part in blocks.modules():
        if isinstance(part, Linear):
            part.gemms = dense
        elif isinstance(part, Experts):
            part.gemms = grouped

"""The layers whose GEMMs run in fp8: all linear layers and experts of an MLP inside blocks.

Embedding, head, routers, norms and the core of attention stay in bf16 or fp32, as in torchao's converted models and
in DeepSeek-V3 (arXiv:2412.19437 §3.3.1); experts of attention, per-layer inputs and the branch next to attention of
Gemma 3n too.
"""

from __future__ import annotations

from torch import nn

from fivefold.job import Job
from fivefold.trainer.model.experts import Experts
from fivefold.trainer.model.float8.grouped import Float8GroupedGemms
from fivefold.trainer.model.float8.matmul import Float8Gemms
from fivefold.trainer.model.linear import Linear


def attach(blocks: nn.Module, job: Job) -> None:
    """Set fp8 GEMMs on every ``Linear`` and ``Experts`` in ``blocks``, if the job's recipe has fp8."""
    if not job.precision.is_low_precision:
        return
    fused = job.stack.kernels == "triton"
    dense = Float8Gemms(job.precision, kernel=not job.emulate, fused=fused)
    grouped = Float8GroupedGemms(job.precision, kernel=not job.emulate, fused=fused)
    for module in blocks.modules():
        if isinstance(module, Linear) and module.is_low_precision:
            module.gemms = dense
        elif isinstance(module, Experts):
            module.gemms = grouped

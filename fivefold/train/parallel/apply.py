"""All parallelisms, applied in their only legal order. So far: ZeRO over data ranks, then compilation."""

from __future__ import annotations

import torch
from torch import nn

from fivefold.job import Job
from fivefold.layout.sharding import policy, units
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.record import Mistake
from fivefold.train.parallel.mesh import Ranks
from fivefold.train.parallel.zero import ZeroUnit, attach
from fivefold.train.precision import Dtypes


def apply(module: nn.Module, *, model: Model, layout: Layout, job: Job, ranks: Ranks) -> list[ZeroUnit]:
    """Spread ``module`` (on the meta device) over ``ranks``; its parameters become real, still uninitialised."""
    _supported(layout)
    dtypes = Dtypes(job.precision)
    sharded: list[ZeroUnit] = []
    for unit in units(model):
        names = [weight.name for weight in unit.weights]
        zero = ZeroUnit(module, names, ranks=ranks, policy=policy(layout), dtypes=dtypes)
        first, last = unit.name == "embed", unit.name == "head"
        attach(
            module.get_submodule(unit.name),
            zero,
            keep=last or (first and model.tied_embeddings),
            backward=not first,
        )
        sharded.append(zero)
    if job.compile:
        for block in module.get_submodule("blocks").children():
            block.forward = torch.compile(block.forward)
    return sharded


def _supported(layout: Layout) -> None:
    allowed = Layout(dp=layout.dp, zero=layout.zero, shard_group=layout.shard_group, mbs=layout.mbs)
    if layout != allowed:
        raise Mistake(f"layout {str(layout)!r}: the trainer runs dp, zero and mbs so far; try {str(allowed)!r}")

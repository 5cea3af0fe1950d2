"""Model + layout + job → ready-to-run modules and optimizer. Training and the dry run both start here."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from fivefold.job import Job
from fivefold.layout.spec import Layout, refuse
from fivefold.model.spec import Model
from fivefold.model.weights import Weight, weights
from fivefold.train import optimizer
from fivefold.train.parallel.apply import apply
from fivefold.train.parallel.mesh import Ranks
from fivefold.train.parallel.mesh import ranks as make_ranks
from fivefold.train.parallel.zero import Shard, ZeroUnit
from fivefold.train.supported import check_supported
from fivefold.train.transformer import Transformer


@dataclass(frozen=True)
class Built:
    """What one rank trains with."""

    module: Transformer
    units: list[ZeroUnit]
    optimizer: torch.optim.AdamW
    ranks: Ranks

    @property
    def shards(self) -> list[Shard]:
        """This rank's part of every weight, in module order."""
        return [shard for unit in self.units for shard in unit.shards]


def build(*, model: Model, layout: Layout, job: Job, device: torch.device) -> Built:
    """Every rank calls it; weights are drawn from ``job.seed`` by name, so that no layout changes them."""
    refuse(layout, model=model, job=job)
    check_supported(layout, job)
    ranks = make_ranks(layout, device=device)
    with torch.device("meta"):
        module = Transformer(model)
    units = apply(module, model=model, layout=layout, job=job, ranks=ranks)
    drawn = {weight.name: weight for weight in weights(model)}
    with torch.no_grad():
        for unit in units:
            for shard in unit.shards:
                whole = initial(drawn[shard.name], model=model, seed=job.seed)
                shard.weight.copy_(whole[shard.first_row : shard.first_row + shard.rows])
    return Built(module=module, units=units, optimizer=optimizer.make(units, job), ranks=ranks)


def initial(weight: Weight, *, model: Model, seed: int) -> Tensor:
    """The whole initial weight in fp32: normal(0, 0.02), smaller into the residual stream (GPT-2)."""
    if weight.kind == "norm":
        return torch.zeros(weight.shape) if weight.name.endswith("bias") else torch.ones(weight.shape)
    if weight.kind in ("bias", "vector"):
        return torch.zeros(weight.shape)
    spread = 0.02 / math.sqrt(2 * model.layers) if weight.kind in ("row", "expert_row") else 0.02
    generator = torch.Generator().manual_seed((seed << 32) + zlib.crc32(weight.name.encode()))
    return torch.empty(weight.shape).normal_(0.0, spread, generator=generator)

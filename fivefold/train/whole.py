"""The trained weights, whole and in one process: every rank's shards laid together on the first rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.model.spec import Model
from fivefold.model.weights import weights
from fivefold.train.build import Built
from fivefold.train.transformer import Transformer


def whole_weights(built: Built, *, model: Model) -> dict[str, Tensor]:
    """Name → whole weight on CPU, in the optimizer's precision; every rank calls it, and the first gets them."""
    return lay_together(built, [shard.weight for shard in built.shards], model=model)


def lay_together(built: Built, rows: list[Tensor], *, model: Model) -> dict[str, Tensor]:
    """``rows`` of each shard, its weights or their gradients, as whole tensors on the first rank; elsewhere nothing."""
    mine = [
        (shard.name, box.offsets, own.detach()[box.rows].cpu().view(box.sizes))
        for shard, own in zip(built.shards, rows, strict=True)
        for box in shard.boxes()
    ]
    everyone: list[Any] | None = [None] * built.ranks.world if built.ranks.rank == 0 else None
    dist.gather_object(mine, everyone)
    if everyone is None:
        return {}
    found = {weight.name: torch.zeros(weight.shape) for weight in weights(model)}
    for name, offsets, part in (box for boxes in everyone for box in boxes):
        place = tuple(slice(start, start + size) for start, size in zip(offsets, part.shape, strict=True))
        found[name][place] = part
    return found


def whole_module(built: Built, *, model: Model) -> Transformer | None:
    """A plain decoder with the trained weights on the first rank; every rank calls it."""
    trained = whole_weights(built, model=model)
    if not trained:
        return None
    with torch.device("meta"):
        module = Transformer(model)
    module.load_state_dict(trained, assign=True, strict=False)
    return module.requires_grad_(False)

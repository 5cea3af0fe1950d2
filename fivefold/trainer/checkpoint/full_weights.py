"""Full (unsharded) weights of a run: gathers every rank's shards into whole tensors on rank 0, over CPU memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.model.spec import Model
from fivefold.model.weights import block_name, weights
from fivefold.trainer.build import Built
from fivefold.trainer.model.moe import Moe
from fivefold.trainer.model.transformer import Transformer


def full_weights(built: Built, *, model: Model) -> dict[str, Tensor]:
    """Full weights by name: fp32 on CPU, cast from the optimizer's copy, with the routing biases of experts.

    Every rank calls it (gather_object to rank 0); other ranks get an empty dictionary.
    """
    found = gather_full(built, [shard.weight for shard in built.shards], model=model)
    mine = {f"{block_name(model, layer)}.moe.bias": moe.bias.cpu() for layer, moe in built.routed.items()}
    everyone: list[Any] | None = [mine] * built.ranks.world if built.ranks.rank == 0 else None
    if built.ranks.world > 1:  # to oneself, gather_object would pickle every weight and read it back
        dist.gather_object(mine, everyone)
    return found | {name: bias for biases in everyone or () for name, bias in biases.items()}


def gather_full(built: Built, rows: list[Tensor], *, model: Model) -> dict[str, Tensor]:
    """Gather ``rows``, one tensor per shard (weights or gradients), into full fp32 tensors on rank 0; elsewhere {}."""
    mine = [
        (shard.name, box.offsets, own.detach()[box.rows].cpu().view(box.sizes))
        for shard, own in zip(built.shards, rows, strict=True)
        for box in shard.boxes()
    ]
    everyone: list[Any] | None = [mine] * built.ranks.world if built.ranks.rank == 0 else None
    if built.ranks.world > 1:  # to oneself, gather_object would pickle every weight and read it back
        dist.gather_object(mine, everyone)
    if everyone is None:
        return {}
    found = {weight.name: torch.zeros(weight.shape) for weight in weights(model)}
    for name, offsets, part in (box for boxes in everyone for box in boxes):
        place = tuple(slice(start, start + size) for start, size in zip(offsets, part.shape, strict=True))
        found[name][place] = part
    return found


def full_module(built: Built, *, model: Model) -> Transformer | None:
    """A single-process ``Transformer`` with the full weights, on rank 0; None elsewhere. Every rank calls it."""
    trained = full_weights(built, model=model)
    return decoder(trained, model=model) if trained else None


def decoder(trained: dict[str, Tensor], *, model: Model) -> Transformer:
    """A single-process ``Transformer`` on CPU with ``trained`` weights by name, without gradients."""
    with torch.device("meta"):
        module = Transformer(model)
    for moe in (part for part in module.modules() if isinstance(part, Moe)):
        moe.load = torch.zeros_like(moe.load, device="cpu")
    module.load_state_dict(trained, assign=True)
    return module.requires_grad_(False)

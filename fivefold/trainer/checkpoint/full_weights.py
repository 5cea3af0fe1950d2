"""Full (unsharded) weights of a run: gathers every rank's shards into full tensors on rank 0, over CPU memory."""

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
    """Gather the full weights by name: fp32 on CPU, cast from the optimizer's copy, with the routing biases of experts.

    Every rank calls it (gather_object to rank 0); other ranks get an empty dictionary.
    """
    tensors = gather_full(built, [shard.weight for shard in built.shards], model=model)
    local_biases = {f"{block_name(model, layer)}.moe.bias": moe.bias.cpu() for layer, moe in built.routed.items()}
    biases_of_ranks: list[Any] | None = [local_biases] * built.ranks.world if built.ranks.rank == 0 else None
    if built.ranks.world > 1:  # on a single rank, gather_object would pickle and unpickle every weight
        dist.gather_object(local_biases, biases_of_ranks)
    return tensors | {name: bias for biases in biases_of_ranks or () for name, bias in biases.items()}


def gather_full(built: Built, rows: list[Tensor], *, model: Model) -> dict[str, Tensor]:
    """Gather ``rows``, one tensor per shard (weights or gradients), into full fp32 tensors on rank 0; elsewhere {}."""
    local_boxes = [
        (shard.name, box.offsets, local_rows.detach()[box.rows].cpu().view(box.sizes))
        for shard, local_rows in zip(built.shards, rows, strict=True)
        for box in shard.boxes()
    ]
    boxes_of_ranks: list[Any] | None = [local_boxes] * built.ranks.world if built.ranks.rank == 0 else None
    if built.ranks.world > 1:  # on a single rank, gather_object would pickle and unpickle every weight
        dist.gather_object(local_boxes, boxes_of_ranks)
    if boxes_of_ranks is None:
        return {}
    tensors = {weight.name: torch.zeros(weight.shape) for weight in weights(model)}
    for name, offsets, part in (box for boxes in boxes_of_ranks for box in boxes):
        slices = tuple(slice(start, start + size) for start, size in zip(offsets, part.shape, strict=True))
        tensors[name][slices] = part
    return tensors


def full_module(built: Built, *, model: Model) -> Transformer | None:
    """Build a single-process ``Transformer`` with the full weights, on rank 0; None elsewhere. Every rank calls it."""
    trained = full_weights(built, model=model)
    return decoder(trained, model=model) if trained else None


def decoder(trained: dict[str, Tensor], *, model: Model) -> Transformer:
    """Build a single-process ``Transformer`` on CPU with ``trained`` weights by name, without gradients."""
    with torch.device("meta"):
        module = Transformer(model)
    for moe in (part for part in module.modules() if isinstance(part, Moe)):
        moe.load = torch.zeros_like(moe.load, device="cpu")
    module.load_state_dict(trained, assign=True)
    return module.requires_grad_(False)

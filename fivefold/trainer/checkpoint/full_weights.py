"""Full (unsharded) weights of a run: gathers every rank's shards into full tensors on rank 0, over CPU memory."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.model.adapted import name_leader
from fivefold.model.spec import Model
from fivefold.model.weight import EXPERT_FACTORS, MAGNITUDE
from fivefold.trainer.build import Built
from fivefold.trainer.model.experts import Experts
from fivefold.trainer.model.linear import Linear
from fivefold.trainer.model.lora import merge_adapter
from fivefold.trainer.model.router import ExpertRouting
from fivefold.trainer.model.transformer import Transformer
from fivefold.trainer.parallel.mesh import Ranks
from fivefold.trainer.parallel.shard import WeightShard


def gather_full_weights(built: Built, *, model: Model) -> dict[str, Tensor]:
    """Gather the full weights by name: fp32 on CPU, cast from the optimizer's copy, with the tensors of routers.

    Adapters are merged into the weights that they change.
    Every rank calls it (gather_object to rank 0); other ranks get an empty dictionary.
    """
    shards = [shard for unit in built.units for shard in (*unit.shards, *unit.frozen)]
    tensors = _gather(shards, [shard.values() for shard in shards], ranks=built.ranks)
    for name in [name for name in tensors if name.endswith(".lora_b")]:
        linear = name.removesuffix(".lora_b")
        scale = cast(Linear, built.module.get_submodule(linear)).lora_scale
        tensors[f"{linear}.weight"] = merge_adapter(
            tensors[f"{linear}.weight"],
            factor_a=tensors[f"{name_leader(model, linear)}.lora_a"],
            factor_b=tensors.pop(name),
            scale=scale,
            magnitude=tensors.pop(f"{linear}{MAGNITUDE}", None),
            is_embedding=linear == "embed.tokens",
        )
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(".lora_a")}
    for name in [name for name in tensors if name.endswith(EXPERT_FACTORS[0])]:
        path, _, factor = name.rpartition(".")
        shared = factor.removesuffix("_lora_a")
        factor_a = tensors.pop(name)
        scale = cast(Experts, built.module.get_submodule(path)).lora_scales[shared]
        for part in ("gate", "up") if shared == "gate_up" else (shared,):
            tensors[f"{path}.{part}"] = merge_adapter(
                tensors[f"{path}.{part}"],
                factor_a=factor_a,
                factor_b=tensors.pop(f"{path}.{part}_lora_b"),
                scale=scale,
                magnitude=None,
            )
    local_tensors = {name: tensor.cpu() for name, tensor in built.router_tensors.items()}
    tensors_of_ranks: list[Any] | None = [local_tensors] * built.ranks.world if built.ranks.rank == 0 else None
    if built.ranks.world > 1:  # on a single rank, gather_object would pickle and unpickle every weight
        dist.gather_object(local_tensors, tensors_of_ranks)
    return tensors | {name: tensor for local in tensors_of_ranks or () for name, tensor in local.items()}


def gather_full(built: Built, rows: list[Tensor]) -> dict[str, Tensor]:
    """Gather ``rows``, one tensor per shard (weights or gradients), into full fp32 tensors on rank 0; elsewhere {}."""
    return _gather(built.shards, rows, ranks=built.ranks)


def _gather(shards: list[WeightShard], rows: list[Tensor], *, ranks: Ranks) -> dict[str, Tensor]:
    """Gather ``rows``, one tensor per shard, into full fp32 tensors by name on rank 0; elsewhere {}."""
    local_boxes = [
        (shard.name, shard.local_weight.weight.shape, box.offsets, local_rows.detach()[box.rows].cpu().view(box.sizes))
        for shard, local_rows in zip(shards, rows, strict=True)
        for box in shard.boxes()
    ]
    boxes_of_ranks: list[Any] = [local_boxes] * ranks.world if ranks.rank == 0 else []
    if ranks.world > 1:  # on a single rank, gather_object would pickle and unpickle every weight
        dist.gather_object(local_boxes, boxes_of_ranks or None)
    tensors: dict[str, Tensor] = {}
    for name, shape, offsets, part in (box for boxes in boxes_of_ranks for box in boxes):
        slices = tuple(slice(start, start + size) for start, size in zip(offsets, part.shape, strict=True))
        tensors.setdefault(name, torch.zeros(shape))[slices] = part
    return tensors


def build_full_module(built: Built, *, model: Model) -> Transformer | None:
    """Build a single-process ``Transformer`` with the full weights, on rank 0; None elsewhere. Every rank calls it."""
    trained = gather_full_weights(built, model=model)
    return build_decoder(trained, model=model) if trained else None


def build_decoder(trained: dict[str, Tensor], *, model: Model) -> Transformer:
    """Build a single-process ``Transformer`` on CPU with ``trained`` weights by name, without gradients."""
    with torch.device("meta"):
        module = Transformer(model)
    for part in (part for part in module.modules() if isinstance(part, ExpertRouting)):
        part.load = torch.zeros_like(part.load, device="cpu")
    module.load_state_dict(trained, assign=True)
    return module.requires_grad_(False)

"""Checks that a rank's modules hold the weights that the model's table lists. Training and the dry run both call it.

    before sharding   the parameters of the module tree are exactly the weights of ``model/weights.py``
    after sharding    every tensor of this rank's stages is on its device, sharded as ``layout/sharding.py`` says

A failure is an error of this package, not of the user: the module tree and the table disagree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

import torch
from torch import nn

from fivefold.adapter import Adapter, count_nf4_bytes
from fivefold.job import Job
from fivefold.layout.local_weight import pad_vocab
from fivefold.layout.sharding import shard_weight
from fivefold.layout.spec import Layout
from fivefold.layout.stages import list_stage_layers
from fivefold.model.spec import Model
from fivefold.model.weights import list_weights
from fivefold.trainer.model.transformer import Transformer
from fivefold.trainer.parallel.zero import ZeroUnit


def check_parameter_table(module: Transformer, *, model: Model, adapter: Adapter | None = None) -> None:
    """Raise ``RuntimeError`` unless ``module`` has exactly the weights of ``model`` and ``adapter``."""
    built = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    listed = {weight.name: weight.shape for weight in list_weights(model, adapter)}
    for name in sorted(built.keys() | listed.keys()):
        ours, table = built.get(name, "missing"), listed.get(name, "missing")
        if ours != table:
            where = f"{ours} in the modules and {table} in model/weights.py"
            raise RuntimeError(f"{name} of model {model.name!r} is {where}")


def check_placement(
    module: Transformer,
    units: Iterable[ZeroUnit],
    *,
    model: Model,
    layout: Layout,
    job: Job,
    stages: Iterable[int],
    device: torch.device,
) -> None:
    """Raise ``RuntimeError`` unless every tensor of this rank's ``stages`` is on ``device``, sharded as listed."""
    vocab = pad_vocab(model, job, tp=layout.tp)
    local_shapes = {
        weight.name: shard_weight(weight, model=model, layout=layout, vocab=vocab).shape
        for weight in list_weights(model, job.adapter)
    }
    shards = {shard.name: shard.weight for unit in units for shard in (*unit.shards, *unit.frozen)}
    tensors = {name: module.get_parameter(name) for name in shards} | dict(_list_stage_tensors(module, layout, stages))
    for name, tensor in (*tensors.items(), *shards.items()):
        if tensor.device.type != device.type:
            where = f"on device {tensor.device} after the build, not {device}"
            raise RuntimeError(f"{name} of model {model.name!r} is {where}")
    for name, tensor in tensors.items():
        if not isinstance(tensor, nn.Parameter):
            continue
        shape = local_shapes[name] if tensor.dtype != torch.uint8 else (count_nf4_bytes(prod(local_shapes[name])),)
        if tuple(tensor.shape) != shape:
            raise RuntimeError(
                f"{name} of model {model.name!r} is {tuple(tensor.shape)} on this rank, and {shape} in "
                "layout/sharding.py"
            )


def _list_stage_tensors(
    module: Transformer, layout: Layout, stages: Iterable[int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor of each parameter and buffer of the embedding, blocks and head in ``stages``."""
    layers = list_stage_layers(len(module.blocks), layout)
    for stage in stages:
        parts = [(f"blocks.{layer}", module.blocks[layer]) for layer in layers[stage]]
        parts += [("embed", module.embed)] * (stage == 0) + [("head", module.head)] * (stage == len(layers) - 1)
        for name, part in parts:
            yield from part.named_parameters(name)
            yield from part.named_buffers(name)

"""Builds modules and optimizer of one rank from model, layout and job. Training and the dry run both start here.

The built modules are checked against the table of weights, and again once they are sharded; a difference is an error of
this package, not of the user.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor, nn

from fivefold.adapter import Adapter
from fivefold.job import Job
from fivefold.layout.local_weight import pad_vocab
from fivefold.layout.schedule import schedule
from fivefold.layout.schedule.table import Table
from fivefold.layout.sharding import shard_weight
from fivefold.layout.spec import Layout
from fivefold.layout.stages import find_first_backward_stage, list_stage_layers
from fivefold.layout.validity import refuse
from fivefold.model.spec import Model
from fivefold.model.weight import MAGNITUDE
from fivefold.model.weights import Weight, get_layer, list_weights, name_block
from fivefold.trainer.model import expert_lora, lora, routing
from fivefold.trainer.model.experts import Experts
from fivefold.trainer.model.kernels.choice import resolve_kernels
from fivefold.trainer.model.linear import WgradStore
from fivefold.trainer.model.moe import Moe
from fivefold.trainer.model.router import ExpertRouting
from fivefold.trainer.model.transformer import Transformer
from fivefold.trainer.optimizers import optimizer
from fivefold.trainer.optimizers.loss_scaling import LossScaler
from fivefold.trainer.parallel.apply import apply
from fivefold.trainer.parallel.gradients import InFlightReduction
from fivefold.trainer.parallel.mesh import ProcessGroups, Ranks, create_ranks
from fivefold.trainer.parallel.shard import WeightShard
from fivefold.trainer.parallel.zero import ZeroUnit
from fivefold.trainer.supported import check_supported


@dataclass(frozen=True)
class Built:
    """The modules, ZeRO units, optimizer, process groups and pipeline schedule that one rank trains with."""

    module: Transformer
    units: list[ZeroUnit]
    wgrad_store: WgradStore
    optimizer: torch.optim.Optimizer
    ranks: Ranks
    table: Table  # pipeline schedule; without a pipeline forward and backward of each micro-batch in turn
    in_flight_reduction: InFlightReduction  # the reduction of gradients that is in flight
    scaler: LossScaler | None = None  # dynamic loss scaling, for fp16

    @property
    def shards(self) -> list[WeightShard]:
        """Return this rank's shard of every trained weight of its stages, in module order."""
        return [shard for unit in self.units for shard in unit.shards]

    @property
    def base_shards(self) -> list[WeightShard]:
        """Return this rank's shard of every weight of the model, trained or frozen, without those of adapters."""
        every = (shard for unit in self.units for shard in (*unit.shards, *unit.frozen))
        return [shard for shard in every if not shard.local_weight.weight.is_adapter]

    @property
    def parameters(self) -> float:
        """Return this rank's share of the model's parameters: one that n ranks hold counts 1/n on each."""
        return sum(
            math.prod(box.sizes) / shard.local_weight.holders for shard in self.base_shards for box in shard.boxes()
        )

    def weights(self) -> list[Tensor]:
        """Return the tensors that hold the weights from step to step."""
        return [tensor for unit in self.units for tensor in unit.live_tensors()]

    def host_tensors(self) -> list[Tensor]:
        """Return the tensors that stay in host memory: what an offloaded optimizer updates, and its state."""
        updated = [unit.host_rows for unit in self.units if unit.host_rows is not None]
        return [*updated, *self.moments()] if updated else []

    def gather_scales(self) -> list[Tensor]:
        """Return the tensors that fp8 gathers keep across steps: block indices of rows, and scales of fp8 weights."""
        payloads = [unit.payload for unit in self.units if unit.payload is not None]
        indices = [index for payload in payloads for index in payload.scales.block_rows]
        weight_scales = [getattr(weight, "scale", None) for unit in self.units for weight in unit.parameters]
        return indices + [scale for scale in weight_scales if scale is not None]

    def moments(self) -> list[Tensor]:
        """Return the tensors of the optimizer's state; torch's AdamW has none before its first step."""
        return [tensor for state in self.optimizer.state.values() for tensor in state.values()]

    def buffers(self) -> list[Tensor]:
        """Return the buffers of modules on this rank; those of other stages may be on the meta device."""
        return [buffer for buffer in self.module.buffers() if not buffer.is_meta]

    @property
    def moe_layers(self) -> dict[int, Moe]:
        """Return layer → MoE layer, for this rank's stages; modules of multi-token prediction have the last numbers."""
        model = self.module.model
        layers = {get_layer(model, shard.name) for shard in self.base_shards if ".moe.experts." in shard.name}
        modules = {layer: self.module.get_submodule(f"{name_block(model, layer)}.moe") for layer in sorted(layers)}
        return {layer: moe for layer, moe in modules.items() if isinstance(moe, Moe)}

    @property
    def routings(self) -> list[ExpertRouting]:
        """Return what chooses experts in this rank's stages: of an MLP, and of attention."""
        model = self.module.model
        layers = {get_layer(model, shard.name) for shard in self.base_shards if ".experts." in shard.name}
        blocks = (self.module.get_submodule(name_block(model, layer)) for layer in sorted(layers))
        return [part for block in blocks for part in block.modules() if isinstance(part, ExpertRouting)]

    @property
    def router_tensors(self) -> dict[str, Tensor]:
        """Return what the routers of this rank's layers hold and no step trains, by name."""
        model = self.module.model
        return {
            f"{name_block(model, layer)}.moe.{name}": tensor
            for layer, moe in self.moe_layers.items()
            for name, tensor in moe.router_tensors.items()
        }


def build(
    *,
    model: Model,
    layout: Layout,
    job: Job,
    device: torch.device,
    table: Table | None = None,
    streams: bool | None = None,
    module: Transformer | None = None,
    draw_weights: bool = True,
    groups: ProcessGroups | None = None,
) -> Built:
    """Build this rank's part; every rank calls it. Weights depend on ``job.seed`` and their name, not on the layout.

    ``table``: a custom pipeline schedule instead of the layout's. ``streams``: whether collectives run concurrently
    with compute; ``None``: if ``device`` has streams for them. ``module``: the module that ``build_module`` returned.
    ``draw_weights``: draw the initial weights; a dry run's tensors have no values. ``groups``: as in ``create_ranks``.
    Raises ``UserError`` for a job that the trainer cannot run.
    """
    refuse(layout, model=model, job=job)
    check_supported(layout, job, model=model)
    job = resolve_kernels(job, gpu=device.type == "cuda")
    if table is None:
        table = schedule(layout.schedule, pp=layout.pp, v=layout.v, micro_batches=layout.micro_batches(job))
    table = replace(table, first_backward=find_first_backward_stage(model, layout, job))
    has_experts = model.moe is not None
    ranks = create_ranks(
        layout,
        kv_heads=model.kv_heads,
        device=device,
        experts=has_experts,
        pairs=job.stack.pairs,
        streams=streams,
        groups=groups,
    )
    module = module or build_module(model, job)
    units, wgrad_store, in_flight_reduction = apply(
        module, model=model, layout=layout, job=job, ranks=ranks, table=table
    )
    stages = table.rank_stages[ranks["pp"].rank]
    _place_expert_tables(module, job=job, layout=layout, stages=stages, device=device, draws=draw_weights)
    check_placement(module, units, model=model, layout=layout, job=job, stages=stages, device=device)
    if draw_weights:
        shards = [shard for unit in units for shard in (*unit.shards, *unit.frozen)]
        _draw_weights(shards, model=model, job=job)
    scaler = LossScaler() if job.precision.loss_scaling else None
    return Built(
        module,
        units,
        wgrad_store,
        optimizer.build_optimizer(units, job, ranks),
        ranks,
        table,
        in_flight_reduction,
        scaler,
    )


def build_module(model: Model, job: Job, *, layers: Container[int] | None = None) -> Transformer:
    """Build the model on the meta device, with the adapters of ``job``; ``build`` gives storage to this rank's part.

    ``layers``: as for ``Transformer``.
    """
    with torch.device("meta"):
        module = Transformer(model, layers=layers)
        if job.adapter is not None:
            lora.attach(
                module.blocks, head=module.head.out, table=module.embed.tokens, model=model, adapter=job.adapter
            )
            for part in module.blocks.modules():
                if isinstance(part, Experts):
                    expert_lora.attach_to_experts(part, job.adapter)
    check_parameter_table(module, model=model, adapter=job.adapter, layers=layers)
    return module


def _place_expert_tables(
    module: Transformer, *, job: Job, layout: Layout, stages: Iterable[int], device: torch.device, draws: bool
) -> None:
    """Give the tables of token ids that name experts storage on this rank's ``stages``; ``draws``: draw them."""
    model = module.model
    layers = list_stage_layers(model, layout)
    for layer in [layer for stage in stages for layer in layers[stage] if model.hashes_experts(layer)]:
        moe = module.get_submodule(f"{name_block(model, layer)}.moe")
        assert isinstance(moe, Moe)
        assert moe.table is not None
        if draws:
            generator = _make_seeded_generator(f"{job.seed} {name_block(model, layer)}.moe.table")
            moe.table = routing.draw_expert_table(model.vocab, moe=moe.moe, generator=generator).to(device)
        else:
            moe.table = torch.empty_like(moe.table, device=device)


def _draw_weights(shards: Sequence[WeightShard], *, model: Model, job: Job) -> None:
    """Set ``shards``, which are of all weights of this rank, to their initial values."""
    weights_by_name = {weight.name: weight for weight in list_weights(model, job.adapter)}

    def draw(name: str) -> Tensor:
        return draw_initial_weight(weights_by_name[name], model=model, seed=job.seed)

    with torch.no_grad():
        for shard in shards:
            if not shard.name.endswith(MAGNITUDE):
                shard.load(draw(shard.name))
        start_magnitudes(shards, read=draw)


def start_magnitudes(shards: Sequence[WeightShard], *, read: Callable[[str], Tensor]) -> None:
    """Set DoRA's magnitudes to the norms of the rows of the frozen weights, as they are stored.

    ``shards``: the shards of all weights of this rank; ``read``: returns a full weight by its name.
    """
    shards_by_name = {shard.name: shard for shard in shards}
    for shard in shards:
        if shard.name.endswith(MAGNITUDE):
            name = f"{shard.name.removesuffix(MAGNITUDE)}.weight"
            shard.load(shards_by_name[name].round(read(name)).norm(dim=1))


def draw_initial_weight(weight: Weight, *, model: Model, seed: int) -> Tensor:
    """Draw the full initial weight in fp32 on CPU: normal(0, 0.02), output projections times 1/√(2 layers) (GPT-2).

    Of an adapter B is 0, and A uniform in ± 1/√in, as peft draws it (kaiming_uniform_ with a = √5). Of the embedding's
    A is 0 and B normal(0, 1).
    """
    if weight.name == "embed.tokens.lora_a":
        return torch.zeros(weight.shape)
    if weight.name == "embed.tokens.lora_b":
        return torch.empty(weight.shape).normal_(generator=_make_generator(weight, seed=seed))
    if weight.is_adapter:
        if weight.name.endswith("lora_b"):
            return torch.zeros(weight.shape)
        limit = 1 / math.sqrt(weight.shape[-1])
        return torch.empty(weight.shape).uniform_(-limit, limit, generator=_make_generator(weight, seed=seed))
    if weight.initial == "ones":
        return torch.ones(weight.shape)
    if weight.initial == "log rates":
        return torch.linspace(1, 16, *weight.shape).log_()
    if weight.initial == "log numbers":
        return torch.arange(1.0, weight.shape[-1] + 1).log_().expand(weight.shape)
    if weight.initial == "steps":
        logs = math.log(0.001), math.log(0.1)
        steps = torch.empty(weight.shape).uniform_(*logs, generator=_make_generator(weight, seed=seed)).exp_()
        return steps + torch.log(-torch.expm1(-steps))
    if weight.initial == "decays":
        squares = torch.empty(weight.shape).uniform_(0.9**2, 0.999**2, generator=_make_generator(weight, seed=seed))
        return squares.rsqrt_().sub_(1).log_()
    if weight.initial.startswith("softplus"):
        return torch.full(weight.shape, math.log(math.expm1(float(weight.initial.split()[1]))))
    if weight.kind == "norm":
        zero = weight.name.endswith("bias") or model.norm_plus_one
        return torch.zeros(weight.shape) if zero else torch.ones(weight.shape)
    if weight.kind in ("bias", "vector") or weight.name.endswith("bias"):
        return torch.zeros(weight.shape)
    std = 0.02 / math.sqrt(2 * model.layers) if weight.kind in ("row", "expert_row") else 0.02
    return torch.empty(weight.shape).normal_(0.0, std, generator=_make_generator(weight, seed=seed))


def _make_generator(weight: Weight, *, seed: int) -> torch.Generator:
    """Return the random generator of a weight's initial values."""
    return _make_seeded_generator(f"{seed} {weight.name}")


def _make_seeded_generator(text: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(text.encode()))  # seeds have 32 bits


def check_parameter_table(
    module: Transformer, *, model: Model, adapter: Adapter | None = None, layers: Container[int] | None = None
) -> None:
    """Raise ``RuntimeError`` unless ``module`` has exactly the weights of ``model`` and ``adapter``.

    ``layers``: as for ``Transformer``.
    """
    built = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    listed = {
        weight.name: weight.shape
        for weight in list_weights(model, adapter)
        if layers is None or not weight.name.startswith("blocks.") or get_layer(model, weight.name) in layers
    }
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
    shards = {shard.name: shard for unit in units for shard in (*unit.shards, *unit.frozen)}
    tensors = {name: module.get_parameter(name) for name in shards} | dict(_list_stage_tensors(module, layout, stages))
    vocab = pad_vocab(model, job, tp=layout.tp)
    local_shapes = {
        weight.name: shard_weight(weight, model=model, layout=layout, vocab=vocab).shape
        for weight in list_weights(model, job.adapter)
        if weight.name in tensors
    }
    rows = {name: shard.weight for name, shard in shards.items() if not shard.is_offloaded}
    for name, tensor in (*tensors.items(), *rows.items()):
        if tensor.device.type != device.type:
            where = f"on device {tensor.device} after the build, not {device}"
            raise RuntimeError(f"{name} of model {model.name!r} is {where}")
    for name, tensor in tensors.items():
        if not isinstance(tensor, nn.Parameter):
            continue
        shape = local_shapes[name]
        if tensor.dtype == torch.uint8 and job.base_format is not None:  # a frozen weight in few bits
            shape = (job.base_format.count_element_bytes(prod(shape)),)
        if tuple(tensor.shape) != shape:
            raise RuntimeError(
                f"{name} of model {model.name!r} is {tuple(tensor.shape)} on this rank, and {shape} in "
                "layout/sharding.py"
            )


def _list_stage_tensors(
    module: Transformer, layout: Layout, stages: Iterable[int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor of each parameter and buffer of the embedding, blocks and head in ``stages``."""
    layers = list_stage_layers(module.model, layout)
    for stage in stages:
        parts = [(f"blocks.{layer}", module.blocks[layer]) for layer in layers[stage]]
        parts += [("embed", module.embed)] * (stage == 0) + [("head", module.head)] * (stage == len(layers) - 1)
        for name, part in parts:
            yield from part.named_parameters(name)
            yield from part.named_buffers(name)

"""Application of all parallelisms to one rank's module, in the only valid order.

First the communication inside a block, then recomputation and torch.compile, last the sharding of weights.

    tensor → context → expert → recompute (and compile) → zero       (pipeline.py then runs the stages)
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from fivefold.job import Job
from fivefold.layout.schedule.table import Table
from fivefold.layout.spec import Layout
from fivefold.layout.stages import list_recomputed_layers, list_recomputed_stages
from fivefold.model.spec import Model
from fivefold.trainer.model.dropout import PlacedNoise
from fivefold.trainer.model.float8.attach import attach as attach_float8
from fivefold.trainer.model.float8.cast import TILES_OF_POWERS
from fivefold.trainer.model.kernels.fused.kernels import attach as attach_triton
from fivefold.trainer.model.linear import WgradStore
from fivefold.trainer.model.mixers import chunks, fused_scans
from fivefold.trainer.model.tf32 import attach as attach_tf32
from fivefold.trainer.model.transformer import Transformer
from fivefold.trainer.model.unfused_attention import Unfused
from fivefold.trainer.parallel import context, expert, recompute, tensor
from fivefold.trainer.parallel.gradients import InFlightReduction
from fivefold.trainer.parallel.mesh import Ranks
from fivefold.trainer.parallel.placement import ShardPlacement
from fivefold.trainer.parallel.zero import ZeroUnit

MAX_COMPILED_BLOCKS = 64  # graphs of one function: a block of each kind, with gradients and without


class Applied(NamedTuple):
    """The ZeRO units of this rank, the store of deferred weight gradients, and the gradient reduction in flight.

    The units' parameters are allocated but not initialized.
    """

    units: list[ZeroUnit]
    wgrad_store: WgradStore
    in_flight_reduction: InFlightReduction


def apply(module: Transformer, *, model: Model, layout: Layout, job: Job, ranks: Ranks, table: Table) -> Applied:
    """Distribute ``module`` (on the meta device) over ``ranks``, for the stages that ``table`` gives this rank."""
    wgrad_store = WgradStore()
    for submodule in module.modules():
        if isinstance(getattr(submodule, "wgrad_store", None), WgradStore):
            submodule.wgrad_store = wgrad_store  # type: ignore[assignment]
    module.head.chunked = job.stack.loss_facts.chunked
    module.head.skips_negative_targets = job.has_targets
    module.head.ranks_pairs = job.objective == "dpo"
    fused = job.stack.kernels == "triton"
    if fused:
        attach_triton(module)
    if job.stack.fused_scans:
        fused_scans.attach(module)
    if job.stack.scan_temporary_bytes:
        chunks.limit_temporaries(module, job.stack.scan_temporary_bytes)
    if job.stack.attention_facts.materializes_scores:
        for attention in (submodule for submodule in module.modules() if hasattr(submodule, "core")):
            attention.core = Unfused(attention.rule)  # type: ignore[assignment, arg-type]
    if layout.tp > 1:
        tensor.attach(module, ranks["tp"], sp=layout.sp)
    if layout.cp > 1:
        context.attach(module, ranks["cp"], exchanges_heads=layout.context_parallelism.exchanges_heads)
        module.length = job.sequence
        module.positions = context.list_positions(layout, rank=ranks["cp"].rank, sequence=job.sequence).to(ranks.device)
        for noise in (submodule for submodule in module.modules() if isinstance(submodule, PlacedNoise)):
            noise.positions = module.positions
    if model.moe:
        stream_sharded = layout.sp and layout.tp > 1
        expert.attach(
            module,
            ranks,
            sp=stream_sharded,
            sequence=job.sequence,
            zigzag=layout.context_parallelism.parts_per_rank == 2,
            fp8_cast=partial(TILES_OF_POWERS, fused=fused) if job.precision.dispatches == "fp8" else None,
        )
    attach_float8(module.blocks, job)
    attach_tf32(module, job, device=ranks.device)
    compiled = _make_compiler(table) if job.stack.is_compiled else None
    attach = partial(recompute.attach, groups=layout.recomputed_operations, compiled=compiled)
    is_recomputed = list_recomputed_layers(model, layout)
    attach((module.blocks[layer], is_recomputed[layer]) for layer in module.layers)
    for mtp_module in module.head.mtp:
        attach_float8(mtp_module, job)
        attach([(mtp_module.get_submodule("block"), list_recomputed_stages(layout)[-1])])
    in_flight_reduction = InFlightReduction()
    placement = ShardPlacement(
        module,
        model=model,
        layout=layout,
        job=job,
        ranks=ranks,
        table=table,
        wgrad_store=wgrad_store,
        in_flight_reduction=in_flight_reduction,
    )
    return Applied(placement.units(), wgrad_store, in_flight_reduction)


def _make_compiler(table: Table) -> recompute.Compile:
    """Return torch.compile with the options that ``table`` needs.

    If the table defers W, the compiler must not overwrite buffers that the weight gradient is computed from. Each kind
    of block is compiled with gradients and without: a hybrid has more of them than PyTorch's limit of 8 lets compile.
    """
    defers_wgrad = any(str(action).startswith("W") for row in table.rows for action in row)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_COMPILED_BLOCKS)
    return partial(
        torch.compile, options={"allow_buffer_reuse": False, "inplace_buffers": False} if defers_wgrad else None
    )

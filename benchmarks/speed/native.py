"""PyTorch's own parallelisms of the plain decoder, as its documentation has them: forward, backward, gradients summed.

tensor     parallelize_module with DTensor weights: column, row, sequence parallel, parallel loss
pipeline   torch.distributed.pipelining: the schedules of the same name
context    DistributedDataParallel around ring attention: ``context_parallel`` itself knows no kernel of the CPU, so
           its (private) ring runs on the CPU's, with its own head-and-tail balance
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from contenders import Step
from decoder import Attention, Decoder, cross_entropy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.layout.stages import list_stage_layers
from fivefold.model.spec import Model

aten = torch.ops.aten
SCHEDULES: dict[str, type[Any]] = {  # ours → PyTorch's; it has no zb1p of one stage per rank, so its takes two
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zb1p": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
    "dualpipev": schedules.ScheduleDualPipeV,
}


def build_native_step(model: Model, job: Job, *, layout: Layout) -> Step:
    """Build PyTorch's native engine for the one parallel dimension of ``layout``."""
    make = tensor if layout.tp > 1 else context if layout.cp > 1 else pipeline
    return make(model, job, layout=layout)


def tensor(model: Model, job: Job, *, layout: Layout) -> Step:
    """Build DTensor's tensor parallelism, sharded as Megatron's, with sequence parallelism."""
    decoder = Decoder(model, seed=job.seed)
    mesh = init_device_mesh("cpu", (layout.tp,))
    column = ColwiseParallel
    row = partial(RowwiseParallel, output_layouts=Shard(1))

    def gather_inputs(*others: None) -> PrepareModuleInput:
        return PrepareModuleInput(
            input_layouts=(Shard(1), *others), desired_input_layouts=(Replicate(), *others), use_local_output=False
        )

    plan = {
        "embed.tokens": row(input_layouts=Replicate()),
        "blocks.*.norm1": SequenceParallel(),
        "blocks.*.norm2": SequenceParallel(),
        "blocks.*.attention": gather_inputs(None, None),
        "blocks.*.mlp": gather_inputs(),
        **{f"blocks.*.attention.{x}": column() for x in "qkv"},
        "blocks.*.attention.out": row(),
        "blocks.*.mlp.gate": column(),
        "blocks.*.mlp.up": column(),
        "blocks.*.mlp.down": row(),
        "head.norm": SequenceParallel(),
        "head.out": column(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(decoder, mesh, plan)

    def step(tokens: Tensor) -> float:
        decoder.zero_grad()
        with loss_parallel():
            loss = cross_entropy(decoder(tokens[:, :-1]), tokens[:, 1:])
            loss.backward()
        return loss.item() / layout.tp

    return step


def pipeline(model: Model, job: Job, *, layout: Layout) -> Step:
    """Return a module per stage, cut as ours."""
    rank = dist.get_rank()
    device = torch.device("cpu")
    count = layout.micro_batches(job)
    kind = SCHEDULES[layout.schedule]
    several = layout.v > 1 or layout.schedule == "zb1p"
    sharded_weights = layout if layout.schedule != "zb1p" else Layout(pp=layout.pp, v=2, schedule="interleaved")
    layers = list_stage_layers(model, sharded_weights)
    held = sharded_weights.pipeline.stages_of_rank(rank, pp=layout.pp, v=sharded_weights.v)
    modules = nn.ModuleList(Decoder(model, seed=job.seed, layers=layers[at]) for at in held)
    stages = [PipelineStage(module, at, len(layers), device) for module, at in zip(modules, held, strict=True)]
    schedule = kind(
        stages if several else stages[0],
        count,
        scale_grads=False,
        loss_fn=lambda logits, targets: cross_entropy(logits, targets) / count,
    )

    def step(tokens: Tensor) -> float:
        modules.zero_grad()
        losses: list[Tensor] = []
        inputs = (tokens[:, :-1],) if 0 in held else ()
        ends = {"target": tokens[:, 1:], "losses": losses} if len(layers) - 1 in held else {}
        schedule.step(*inputs, **ends)
        return sum(loss.item() for loss in losses)

    return step


def context(model: Model, job: Job, *, layout: Layout) -> Step:
    """Build PyTorch's context parallelism.

    Each rank has the first and last of its chunks of all tokens, as ``context_parallel`` balances them.
    """
    decoder = Decoder(model, seed=job.seed)
    chunks = torch.arange(job.sequence).chunk(2 * layout.cp)
    local_chunks = torch.cat((chunks[dist.get_rank()], chunks[-1 - dist.get_rank()]))
    decoder.positions = local_chunks
    for block in decoder.modules():
        if isinstance(block, Attention):
            block.core = _NativeRing.apply
    averaged = DistributedDataParallel(decoder, gradient_as_bucket_view=True)

    def step(tokens: Tensor) -> float:
        averaged.zero_grad()
        loss = cross_entropy(averaged(tokens[:, :-1][:, local_chunks]), tokens[:, 1:][:, local_chunks])
        loss.backward()
        return loss.item() / layout.cp

    return step


def _forward(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> tuple[Tensor, Tensor]:
    outputs: tuple[Tensor, Tensor] = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal)
    return outputs


def _backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, *, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, query, key, value, out, logsumexp, 0.0, is_causal
    )
    return gradients


class _NativeRing(torch.autograd.Function):
    """Ring attention of PyTorch (``torch.distributed.tensor``) as an autograd function."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        world: Any = dist.group.WORLD
        op: Callable[..., Any] = _forward
        out, lse = ring._templated_ring_attention(world, 2, op, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        world: Any = dist.group.WORLD
        op: Callable[..., Any] = _backward
        q, k, v, out, lse = ctx.saved_tensors
        return ring._templated_ring_attention_backward(
            world, 2, op, gradient, "grad_out", q, k, v, out, lse, is_causal=True
        )

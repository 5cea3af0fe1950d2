"""A Llama in plain PyTorch, and the loops by which people train it: DDP, FSDP2, DTensor, torch's pipelines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional

from fivefold.model.spec import Model

SHAPE = Model(name="small", layers=4, width=128, heads=4, kv_heads=2, head_dim=32, ffn=352, vocab=1024)
SEQUENCE = 128
Batch = tuple[Tensor, Tensor]


class Norm(nn.Module):
    """Written out, as transformers' LlamaRMSNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width, inner = SHAPE.width, SHAPE.heads * SHAPE.head_dim
        few = SHAPE.kv_heads * SHAPE.head_dim
        self.q, self.k, self.v = (nn.Linear(width, out, bias=False) for out in (inner, few, few))
        self.out = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, SHAPE.head_dim)).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(
            rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        return self.out(y.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(SHAPE.width, SHAPE.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(SHAPE.ffn, SHAPE.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = Norm(SHAPE.width), Attention(), Norm(SHAPE.width), Mlp()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """Layers ``first`` to ``last``; embedding and head where they belong, so that a stage of a pipeline is one, too."""

    def __init__(self, first: int = 0, last: int = SHAPE.layers) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(SHAPE.vocab, SHAPE.width) if first == 0 else None
        self.blocks = nn.ModuleDict({str(number): Block() for number in range(first, last)})
        self.norm = Norm(SHAPE.width) if last == SHAPE.layers else None
        self.head = nn.Linear(SHAPE.width, SHAPE.vocab, bias=False) if last == SHAPE.layers else None
        angles = torch.outer(
            torch.arange(SEQUENCE).float(), 1e4 ** (-torch.arange(0, SHAPE.head_dim, 2) / SHAPE.head_dim)
        )
        self.register_buffer("cos", torch.cat((angles, angles), -1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat((angles, angles), -1).sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) if self.embed is not None else x
        for block in self.blocks.values():
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x)) if self.norm is not None and self.head is not None else x


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches(sequences: int, count: int) -> list[Batch]:
    """``count`` micro-batches of as many sequences, as ids and targets of one tensor."""
    torch.manual_seed(1)
    tokens = torch.randint(SHAPE.vocab, (count, sequences, SEQUENCE + 1))
    return [(each[:, :-1], each[:, 1:]) for each in tokens]


def adamw(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True)


Loop = tuple[nn.Module, torch.optim.Optimizer, Callable[[list[Batch]], None], DeviceMesh | None, int]


def ddp(*, zero: int = 0, view: bool = False) -> Loop:
    """DistributedDataParallel, with ZeroRedundancyOptimizer for ZeRO-1; micro-batches but the last under no_sync."""
    model = nn.parallel.DistributedDataParallel(Llama(), gradient_as_bucket_view=view, broadcast_buffers=False)
    if zero:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, fused=True)
    else:
        optimizer = adamw(model.parameters())

    def step(micro: list[Batch]) -> None:
        for place, (ids, targets) in enumerate(micro):
            with nullcontext() if place == len(micro) - 1 else model.no_sync():
                logits = model(ids)
                (loss(logits, targets) / len(micro)).backward()  # type: ignore[no-untyped-call]
                del logits
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step, None, 0


def fsdp2(*, reshard: bool) -> Loop:
    """As torchtitan's apply_fsdp: embedding, each block, norm with head, root; reduced after every micro-batch."""
    from torch.distributed.fsdp import fully_shard

    mesh, model = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), Llama()
    fully_shard(model.embed, mesh=mesh, reshard_after_forward=reshard)
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard([model.norm, model.head], mesh=mesh, reshard_after_forward=False)  # type: ignore[list-item]
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model.parameters())

    def step(micro: list[Batch]) -> None:
        for ids, targets in micro:
            logits = model(ids)
            (loss(logits, targets) / len(micro)).backward()  # type: ignore[no-untyped-call]
            del logits
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step, mesh, 0


def tensor_parallel() -> Loop:
    """DTensor with sequence parallelism and loss_parallel, as torchtitan's apply_tp; nobody holds the logits."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        loss_parallel,
        parallelize_module,
    )

    mesh, model = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), Llama()
    whole = PrepareModuleInput(input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None))
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    parallelize_module(model, mesh, {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(), "head": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        "blocks.*.norm1": SequenceParallel(), "blocks.*.norm2": SequenceParallel(),
        "blocks.*.attention": whole, "blocks.*.mlp": gathered,
        **{f"blocks.*.attention.{part}": ColwiseParallel() for part in "qkv"},
        "blocks.*.attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.mlp.gate": ColwiseParallel(), "blocks.*.mlp.up": ColwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    })  # fmt: skip
    optimizer = adamw(model.parameters())

    def step(micro: list[Batch]) -> None:
        for ids, targets in micro:
            with loss_parallel():
                (loss(model(ids), targets) / len(micro)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step, mesh, 0


def pipeline(*, schedule: str, micro_batches: int) -> Loop:
    """Two stages on torch's pipelining runtime."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    rank = dist.get_rank()
    half = SHAPE.layers // 2
    model = Llama(first=rank * half, last=(rank + 1) * half)
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    runtime: Any = get_schedule_class(schedule)(stage, n_microbatches=micro_batches, loss_fn=loss)
    optimizer = adamw(model.parameters())

    def step(micro: list[Batch]) -> None:
        ids, targets = (torch.cat([pair[place] for pair in micro]) for place in (0, 1))
        if rank == 0:
            runtime.step(ids, return_outputs=False)
        else:
            runtime.step(target=targets, losses=[], return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step, None, rank


def deepspeed(*, zero: int, bucket: int = 300_000) -> Loop:
    """DeepSpeed's engine on the CPU, with buckets of ``bucket`` elements: its default of 5e8 would be 2 GB here."""
    import os

    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ |= {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank()), "WORLD_SIZE": "2"}
    import deepspeed as package

    package.init_distributed(dist_backend="gloo")
    model = Llama()
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False, "zero_optimization": {"stage": zero, "reduce_bucket_size": bucket},
    }  # fmt: skip
    engine, wrapped, *_ = package.initialize(model=model, optimizer=adamw(model.parameters()), config=config)
    optimizer = getattr(wrapped, "optimizer", wrapped)

    def step(micro: list[Batch]) -> None:
        for ids, targets in micro:
            logits = engine(ids)
            engine.backward(loss(logits, targets))
            del logits
            engine.step()

    return engine, optimizer, step, None, 0

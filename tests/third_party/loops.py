"""A Llama in plain PyTorch, and the loops by which people train it: DDP, FSDP2, DTensor, torch's pipelines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
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
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        return self.out(y.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(SHAPE.width, SHAPE.ffn, bias=False) for _ in range(2))
        self.down, self.act = nn.Linear(SHAPE.ffn, SHAPE.width, bias=False), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Rotary(nn.Module):
    """Cosines and sines of the angles of every position."""

    def __init__(self) -> None:
        super().__init__()
        frequencies = 1e4 ** (-torch.arange(0, SHAPE.head_dim, 2) / SHAPE.head_dim)
        angles = torch.outer(torch.arange(SEQUENCE).float(), frequencies)
        self.register_buffer("cos", torch.cat((angles, angles), -1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat((angles, angles), -1).sin(), persistent=False)

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.cos, self.sin


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
        self.rotary = Rotary()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) if self.embed is not None else x
        cos, sin = self.rotary()
        for block in self.blocks.values():
            x = block(x, cos, sin)
        x = self.norm(x) if self.norm is not None else x
        return self.head(x) if self.head is not None else x


class CausalLM(nn.Module):
    """The modules of transformers' LlamaForCausalLM, which DeepSpeed hooks one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Llama()
        self.lm_head, self.model.head = self.model.head, None

    def forward(self, x: Tensor) -> Tensor:
        assert self.lm_head is not None
        return self.lm_head(self.model(x))  # type: ignore[no-any-return]


class Pretrained(CausalLM):
    """With what accelerate asks transformers' models for, to shard embedding and head apart from the rest."""

    base_model_prefix = "model"

    def get_input_embeddings(self) -> nn.Module | None:
        return self.model.embed

    def get_output_embeddings(self) -> nn.Module | None:
        return self.lm_head


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches(sequences: int, count: int) -> list[Batch]:
    """``count`` micro-batches of as many sequences, as ids and targets of one tensor."""
    torch.manual_seed(1)
    tokens = torch.randint(SHAPE.vocab, (count, sequences, SEQUENCE + 1))
    return [(token[:, :-1], token[:, 1:]) for token in tokens]


def adamw(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True)


Loop = tuple[nn.Module, torch.optim.Optimizer, Callable[[list[Batch]], None], DeviceMesh | None, int]


def freeze(llama: Llama, parts: Sequence[str], *, half: bool) -> None:
    """Freeze the weights whose names begin with one of ``parts``; ``half``: they are in bf16, the trained ones in fp32.

    So does LLaMA-Factory's ``finetuning_type: freeze``. transformers has angles in the dtype of the embedding's output.
    """
    for name, weight in llama.named_parameters():
        if f"{name}.".startswith(tuple(f"{part}." for part in parts)):
            weight.requires_grad_(False)
            weight.data = weight.data.to(torch.bfloat16 if half else torch.float32)
    if half and "embed" in parts:
        llama.rotary.to(torch.bfloat16)


def ddp(
    *, zero: int = 0, view: bool = False, half: bool = False, recompute: bool = False, frozen: Sequence[str] = ()
) -> Loop:
    """DistributedDataParallel, with ZeroRedundancyOptimizer for ZeRO-1; micro-batches but the last under no_sync.
    ``half``: the forward under autocast to bf16; ``recompute``: every block; ``frozen``: as ``freeze`` takes parts.
    """
    llama = Llama()
    freeze(llama, frozen, half=half)
    if recompute:
        apply_ac(llama, every=1)
    model = nn.parallel.DistributedDataParallel(llama, gradient_as_bucket_view=view, broadcast_buffers=False)
    if zero:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, fused=True)
    else:
        optimizer = adamw(weight for weight in model.parameters() if weight.requires_grad)

    def step(micro: list[Batch]) -> None:
        for place, (ids, targets) in enumerate(micro):
            with nullcontext() if place == len(micro) - 1 else model.no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=half):
                    logits = model(ids)
                    mean = loss(logits, targets) / len(micro)
                mean.backward()  # type: ignore[no-untyped-call]
                del logits, mean
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step, None, 0


def fsdp2(
    *,
    reshard: bool = True,
    half: bool = False,
    reduced: str = "float32",
    recompute: int = 0,
    by_operation: bool = False,
) -> Loop:
    """As torchtitan's apply_fsdp: embedding, each block, norm with head, root; reduced after every micro-batch.

    ``half``: bf16 weights, reduced as ``reduced``. ``recompute``: every how many blocks one is recomputed; 0: none is;
    ``by_operation``: of it all but every second product and attention.
    """
    mesh, model = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), Llama()
    if recompute:
        apply_ac(model, every=recompute, by_operation=by_operation)
    fully_sharded(model, mesh, reshard=reshard, half=half, reduced=reduced)
    optimizer = adamw(model.parameters())
    return model, optimizer, plain_step(model, optimizer), mesh, 0


def apply_ac(model: Llama, *, every: int, by_operation: bool = False) -> None:
    """As torchtitan's apply_ac: blocks under checkpoint_wrapper, without reentrance."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    more = {"context_fn": _make_selective_policy, "early_stop": False} if by_operation else {}
    for name in [name for name in model.blocks if int(name) % every == 0]:
        model.blocks[name] = checkpoint_wrapper(model.blocks[name], preserve_rng_state=False, **more)  # type: ignore[no-untyped-call]


def _make_selective_policy() -> Any:
    """torchtitan's SelectiveAC: attention and every second product are kept."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    counts, aten = {False: 0, True: 0}, torch.ops.aten
    kept = (aten._scaled_dot_product_flash_attention_for_cpu.default,)

    def policy(context: Any, func: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        again = bool(context.is_recompute)
        counts[again] += func == aten.mm.default
        keeps = func in kept or (func == aten.mm.default and counts[again] % 2 == 1)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def fully_sharded(
    model: Llama, mesh: DeviceMesh, *, reshard: bool = True, half: bool = False, reduced: str = "float32"
) -> None:
    """Shard as torchtitan's apply_fsdp does, a full model or a stage of it."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(torch.bfloat16, getattr(torch, reduced)) if half else MixedPrecisionPolicy()
    if model.embed is not None:
        fully_shard(model.embed, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    if model.norm is not None and model.head is not None:
        fully_shard([model.norm, model.head], mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[list[Batch]], None]:
    """A step that holds the logits until the next micro-batch, as a plain loop does."""

    def step(micro: list[Batch]) -> None:
        for ids, targets in micro:
            logits = model(ids)
            (loss(logits, targets) / len(micro)).backward()  # type: ignore[no-untyped-call]
            del logits
        optimizer.step()
        optimizer.zero_grad()

    return step


def tensor_parallel(*, dp: int = 1, half: bool = False) -> Loop:
    """DTensor with sequence parallelism and loss_parallel, as torchtitan's apply_tp; the logits are not kept. With
    ``dp``, FSDP2 around it; ``half``: the forward under autocast to bf16.
    """
    from torch.distributed.tensor.parallel import loss_parallel

    mesh, model = init_device_mesh("cpu", (dp, 2), mesh_dim_names=("dp", "tp")), Llama()
    cut(model, mesh["tp"])
    if dp > 1:
        fully_sharded(model, mesh["dp"])
    optimizer = adamw(model.parameters())

    def step(micro: list[Batch]) -> None:
        for ids, targets in micro:
            with loss_parallel():
                with torch.autocast("cpu", torch.bfloat16, enabled=half):
                    mean = loss(model(ids), targets) / len(micro)
                mean.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step, mesh, 0


def cut(model: Llama, mesh: DeviceMesh) -> None:
    """torchtitan's plan of Llama."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    whole = PrepareModuleInput(input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None))
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    parallelize_module(
        model,
        mesh,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
            "blocks.*.norm1": SequenceParallel(),
            "blocks.*.norm2": SequenceParallel(),
            "blocks.*.attention": whole,
            "blocks.*.mlp": gathered,
            **{f"blocks.*.attention.{part}": ColwiseParallel() for part in "qkv"},
            "blocks.*.attention.out": RowwiseParallel(output_layouts=Shard(1)),
            "blocks.*.mlp.gate": ColwiseParallel(),
            "blocks.*.mlp.up": ColwiseParallel(),
            "blocks.*.mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        },
    )


def pipeline(*, schedule: str, micro_batches: int, v: int = 1, dp: int = 1) -> Loop:
    """Two ranks on torch's pipelining runtime, each with ``v`` stages, and with ``dp`` under FSDP2."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    mesh = init_device_mesh("cpu", (2, dp), mesh_dim_names=("pp", "dp"))
    rank, item = mesh["pp"].get_local_rank(), SHAPE.layers // (2 * v)
    held = (rank, 3 - rank)[:v] if schedule.startswith("ZBV") else (rank, rank + 2)[:v]
    parts = nn.ModuleList(Llama(first=stage * item, last=(stage + 1) * item) for stage in held)
    if dp > 1:
        for part in parts:
            fully_sharded(part, mesh["dp"], reshard=False)  # type: ignore[arg-type]
    stages = [
        PipelineStage(part, stage, 2 * v, torch.device("cpu"), group=mesh.get_group("pp"))
        for part, stage in zip(parts, held, strict=True)
    ]
    runtime: Any = get_schedule_class(schedule)(
        stages if v > 1 else stages[0],  # type: ignore[arg-type]
        n_microbatches=micro_batches,
        loss_fn=loss,
    )
    optimizer = adamw(parts.parameters())

    def step(micro: list[Batch]) -> None:
        ids, targets = (torch.cat([pair[place] for pair in micro]) for place in (0, 1))
        given: dict[str, Any] = {"target": targets, "losses": []} if 2 * v - 1 in held else {}
        runtime.step(*((ids,) if 0 in held else ()), **given, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()

    return parts, optimizer, step, mesh, rank

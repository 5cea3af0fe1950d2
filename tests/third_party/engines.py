"""The loops of packages that are installed by ``make interop`` alone: accelerate, DeepSpeed."""

from __future__ import annotations

import os
import tempfile
from contextlib import nullcontext
from typing import Any

import torch.distributed as dist
from torch import nn

from tests.third_party import adapters
from tests.third_party.loops import SEQUENCE, SHAPE, Batch, CausalLM, Loop, Pretrained, adamw, loss, plain_step


def _set_launcher_variables(**more: str) -> None:
    """The environment that accelerate's launcher makes."""
    rank = str(dist.get_rank())
    os.environ |= {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
        "ACCELERATE_USE_CPU": "true",
        **more,
    }


def accelerate(*, pretrained: bool) -> Loop:
    """accelerate's FSDP2 with its wrapping by the blocks' class: of models ``pretrained`` embedding, and norm with head
    are units too, of others what is left is one. It takes FSDP on accelerators alone, and on CPUs
    DistributedDataParallel in its place, unless its state is set afterwards.
    """
    _set_launcher_variables(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        reshard_after_forward=True,
    )
    model: nn.Module = Pretrained() if pretrained else CausalLM()
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    accelerator.state.fsdp_plugin = plugin
    accelerator.state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    model, optimizer = accelerator.prepare(model, adamw(model.parameters()))
    inner = optimizer.optimizer  # type: ignore[attr-defined]
    return model, inner, plain_step(model, inner), None, 0


def trainer(*, half: bool = False) -> Loop:
    """transformers' own Llama in its Trainer: accelerate wraps it by DistributedDataParallel. ``half``: bf16=True."""
    _set_launcher_variables()
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    config = LlamaConfig(
        hidden_size=SHAPE.width,
        num_hidden_layers=SHAPE.layers,
        num_attention_heads=SHAPE.heads,
        num_key_value_heads=SHAPE.kv_heads,
        head_dim=SHAPE.head_dim,
        intermediate_size=SHAPE.ffn,
        vocab_size=SHAPE.vocab,
        max_position_embeddings=SEQUENCE,
        tie_word_embeddings=False,
        use_cache=False,
    )
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=half, report_to="none", ddp_broadcast_buffers=False
    )
    result = Trainer(model=LlamaForCausalLM(config), args=arguments)
    model: Any
    model, optimizer = result.accelerator.prepare(result.model, adamw(result.model.parameters()))
    result.optimizer, inner, result.current_gradient_accumulation_steps = optimizer, optimizer.optimizer, 1

    def step(micro: list[Batch]) -> None:
        for place, (ids, _) in enumerate(micro):
            with nullcontext() if place == len(micro) - 1 else result.accelerator.no_sync(model):
                result.training_step(model, {"input_ids": ids, "labels": ids})
        inner.step()
        inner.zero_grad()

    return model, inner, step, None, 0


BUCKET = 300_000  # elements: DeepSpeed's default of 5e8 would be 2 GB here


def deepspeed(
    *,
    zero: int,
    micro_batches: int = 1,
    adapts: bool = False,
    quantized: bool = False,
    recompute: bool = False,
    targets: tuple[str, ...] = (),
    **keys: int,
) -> Loop:
    """DeepSpeed's engine on the CPU; ``adapts``: with PEFT's adapters, ``quantized``: over bitsandbytes' base in nf4.

    ``targets``: layers with an adapter, if not all.

    ``keys``: of its ``zero_optimization``.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ |= {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank()), "WORLD_SIZE": "2"}
    import deepspeed as package

    package.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # all messages by gloo, without compiling an extension
    package.init_distributed(dist_backend="gloo")
    model = CausalLM()
    if quantized:
        adapters.quantize(model.model)
    if adapts:
        model = adapters.adapt(model, target_modules=[adapters.NAMES[name] for name in targets or adapters.NAMES])
    if recompute:
        adapters.recompute_blocks(model.model)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro_batches,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": zero, "reduce_bucket_size": BUCKET, **keys},
    }
    trained = (weight for weight in model.parameters() if weight.requires_grad)
    engine, wrapped, *_ = package.initialize(model=model, optimizer=adamw(trained), config=config)
    optimizer = getattr(wrapped, "optimizer", wrapped)

    def step(micro: list[Batch]) -> None:
        for ids, targets in micro:
            logits = engine(ids)
            engine.backward(loss(logits, targets))
            del logits
            engine.step()

    return engine, optimizer, step, None, 0

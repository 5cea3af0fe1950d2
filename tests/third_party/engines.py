"""The loops of packages that are installed by ``make interop`` alone: accelerate, DeepSpeed."""

from __future__ import annotations

import os
import tempfile
from contextlib import nullcontext
from typing import Any

import torch
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
        "WORLD_SIZE": str(dist.get_world_size()),
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


OFFLOAD = {"optimizer": "offload_optimizer", "parameters": "offload_param"}


def list_host_tensors(engine: Any) -> list[torch.Tensor]:
    """The tensors that ZeRO's engine keeps in host memory, without the optimizer's moments."""
    zero = engine.optimizer
    if engine.zero_optimization_stage() < 3:
        masters = zero.single_partition_of_fp32_groups
        return [
            *masters,
            *(master.grad for master in masters),
            *zero.param_buffer_of_bit16_for_cpu_offload_groups,
            zero.temp_grad_buffer_for_cpu_offload,
            *zero.accumulated_grads_in_cpu.values(),
        ]
    tensors: list[torch.Tensor] = []
    if zero.offload_param:
        frozen = [weight.ds_tensor for weight in engine.module.parameters() if not weight.requires_grad]
        tensors += [*zero.param_groups_fp16_flat_cpu_memory, *frozen]
    if zero.offload_optimizer:
        masters = zero.fp32_partitioned_groups_flat
        tensors += [*masters, *(master.grad for master in masters), zero.grad_partitions_flat_buffer]
    return tensors


def count_host_bytes(engine: Any) -> int:
    """Their bytes, with the optimizer's states if they are there."""
    zero = engine.optimizer
    states = [state for states in zero.optimizer.state.values() for state in states.values()]
    is_there = zero.offload_optimizer if engine.zero_optimization_stage() == 3 else zero.cpu_offload
    return sum(tensor.nbytes for tensor in (*list_host_tensors(engine), *states * is_there))


def _list_unseen_tensors(engine: Any) -> list[torch.Tensor]:
    """The tensors that watch would not see, as they are neither parameters nor moments, and there before the steps."""
    zero = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        return [*zero.fp32_partitioned_groups_flat]
    if engine.zero_optimization_stage() and zero.cpu_offload:
        return [*list_host_tensors(engine), zero.temp_grad_buffer_for_gpu_offload]
    return [*zero.single_partition_of_fp32_groups] if engine.zero_optimization_stage() else []


def _separate_host_memory(engine: Any) -> None:
    """Let what is in host memory be copied to the device, which on CPUs is the same memory."""
    from deepspeed.accelerator import get_accelerator

    hosts = {tensor.untyped_storage().data_ptr() for tensor in list_host_tensors(engine)}
    to = torch.Tensor.to

    def copy(tensor: torch.Tensor, *where: Any, **options: Any) -> torch.Tensor:
        result = to(tensor, *where, **options)
        is_sent = (where and isinstance(where[0], str | torch.device)) or "device" in options
        is_same = result.untyped_storage().data_ptr() in hosts
        return result.clone() if is_sent and is_same else result

    torch.Tensor.to = copy  # type: ignore[method-assign,assignment]
    get_accelerator().on_accelerator = lambda tensor: tensor.untyped_storage().data_ptr() not in hosts


class _WholeStep(torch.optim.Optimizer):
    """The engine's step, as one: it calls the optimizer once for each sub-group."""

    def __init__(self, engine: Any, optimizer: torch.optim.Optimizer) -> None:
        super().__init__([torch.zeros(0)], {})
        self.engine, self.state = engine, optimizer.state

    def step(self, closure: Any = None) -> None:
        self.engine.step()


BUCKET = 300_000  # elements: DeepSpeed's default of 5e8 would be 2 GB here


def deepspeed(
    *,
    zero: int,
    micro_batches: int = 1,
    adapts: bool = False,
    quantized: bool = False,
    recompute: bool = False,
    targets: tuple[str, ...] = (),
    half: bool = False,
    offload: tuple[str, ...] = (),
    **keys: int,
) -> Loop:
    """DeepSpeed's engine on the CPU; ``adapts``: with PEFT's adapters, ``quantized``: over bitsandbytes' base in nf4.

    ``targets``: layers with an adapter, if not all. ``half``: in bf16. ``offload``: as ``Job.offload``.

    ``keys``: of its ``zero_optimization``.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    _set_launcher_variables()
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
    if half:  # transformers has angles in the dtype of the embedding's output
        model.model.rotary.to(torch.bfloat16)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro_batches,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": half},
        "zero_optimization": {"stage": zero, "reduce_bucket_size": BUCKET, **keys}
        | {OFFLOAD[name]: {"device": "cpu", "pin_memory": False} for name in offload},
    }
    trained = (weight for weight in model.parameters() if weight.requires_grad)
    engine, wrapped, *_ = package.initialize(model=model, optimizer=adamw(trained), config=config)
    optimizer = getattr(wrapped, "optimizer", wrapped)
    if offload:
        _separate_host_memory(engine)
    for place, tensor in enumerate(_list_unseen_tensors(engine)):
        engine.register_buffer(f"unseen{place}", tensor.detach(), persistent=False)

    if "sub_group_size" in keys:
        optimizer = _WholeStep(engine, optimizer)

    def step(micro: list[Batch]) -> None:
        for place, (ids, targets) in enumerate(micro):
            logits = engine(ids)
            engine.backward(loss(logits, targets))
            del logits
            is_whole = place == len(micro) - 1 and isinstance(optimizer, _WholeStep)
            (optimizer if is_whole else engine).step()

    return engine, optimizer, step, None, 0

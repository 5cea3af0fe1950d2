"""Loops over PEFT adapters around a Llama in plain PyTorch."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.third_party import loops
from tests.third_party.loops import Batch, Loop

M = TypeVar("M", bound=nn.Module)
RANK = 4
NAMES = {
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "o_proj": "out",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}
ENDS = {"embed_tokens": "embed", "lm_head": "head"}
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
MIXTURE = loops.SHAPE.replace(moe={"experts": 8, "topk": 2, "ffn": 96, "balance": "none"})


def loop(
    *,
    autocast: bool = False,
    recompute: bool = False,
    dropout: float = 0.0,
    targets: tuple[str, ...] = tuple(NAMES),
    half: bool = False,
    dora: bool = False,
    modules_to_save: tuple[str, ...] = (),
    quantized: bool = False,
    experts: tuple[str, ...] = (),
) -> Loop:
    """A loop over all blocks' linear layers with adapters, under DistributedDataParallel.

    ``experts``: of those of ``MIXTURE``'s experts which have adapters too (peft's ``target_parameters``).

    ``modules_to_save``: modules that are trained in full, of which peft trains a copy.

    ``quantized``: the linear layers of blocks are bitsandbytes' in nf4 (QLoRA).

    ``autocast``: bf16 weights and fp32 adapters, as Trainer(bf16=True); ``half``: both in bf16.
    """
    llama = loops.Llama()
    if experts:
        mix_experts(llama)
    llama.to(torch.bfloat16 if half or autocast else torch.float32)
    if quantized:
        quantize(llama)
    how: dict[str, object] = {"target_modules": [(NAMES | ENDS)[name] for name in targets], "lora_dropout": dropout}
    how |= {"target_parameters": [f"mlp.{name}" for name in experts]} if experts else {"use_dora": dora}
    model = adapt(llama, modules_to_save=modules_to_save, **how)
    drop_as_on_gpus(model)
    if autocast:
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.float()
    if recompute:
        recompute_blocks(llama)
    ddp = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = torch.optim.AdamW([item for item in model.parameters() if item.requires_grad], fused=True)

    def step(micro: list[Batch]) -> None:
        for place, (ids, targets) in enumerate(micro):
            with nullcontext() if place == len(micro) - 1 else ddp.no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    logits = ddp(ids)
                    mean = loops.loss(logits, targets) / len(micro)
                mean.backward()
                del logits, mean
        optimizer.step()
        optimizer.zero_grad()

    return ddp, optimizer, step, None, 0


def build_sharded_loop(
    *,
    reshard: bool = True,
    recompute: bool = False,
    modules_to_save: tuple[str, ...] = (),
    quantized: bool = False,
    targets: tuple[str, ...] = tuple(NAMES),
) -> Loop:
    """The same under FSDP2, in fp32."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    llama = loops.Llama()
    if quantized:
        quantize(llama)
    names = [(NAMES | ENDS)[name] for name in targets]
    llama = adapt(llama, modules_to_save=modules_to_save, target_modules=names)
    if recompute:
        recompute_blocks(llama)
    loops.fully_sharded(llama, mesh, reshard=reshard)
    optimizer = torch.optim.AdamW([item for item in llama.parameters() if item.requires_grad], fused=True)
    return llama, optimizer, loops.plain_step(llama, optimizer), mesh, 0


def drop_as_on_gpus(model: nn.Module) -> None:
    """Let dropouts keep masks of one byte per element, as on GPUs; on CPUs they keep them in the dtype of the input.

    Source: pytorch/pytorch@v2.13.0:aten/src/ATen/native/Dropout.cpp, is_fused_kernel_acceptable.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.forward = partial(torch.native_dropout, p=module.p, train=True)  # type: ignore[assignment]
            module.register_forward_hook(lambda module, inputs, outputs: outputs[0])


def recompute_blocks(llama: loops.Llama) -> None:
    """Recompute every block, whose input gets a gradient by peft's ``enable_input_require_grads``."""
    assert llama.embed is not None
    llama.embed.register_forward_hook(lambda module, ids, x: x.requires_grad_())
    loops.apply_ac(llama, every=1)


def mix_experts(llama: loops.Llama) -> None:
    """Replace the MLPs by transformers' mixtures with the shape of ``MIXTURE``."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    moe = MIXTURE.moe
    assert moe is not None
    config = Qwen3MoeConfig(
        hidden_size=MIXTURE.width, moe_intermediate_size=moe.ffn, num_experts=moe.experts, num_experts_per_tok=moe.topk,
        norm_topk_prob=True, experts_implementation="grouped_mm",
    )  # fmt: skip
    for block in llama.blocks.values():
        mixture = Qwen3MoeSparseMoeBlock(config)
        for weight in mixture.parameters():
            nn.init.normal_(weight, std=0.02)
        block.mlp = mixture


def quantize(llama: loops.Llama) -> None:
    """Store the linear layers of blocks in nf4 with double quantization, in elements of the dtype of the weights."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for block in llama.blocks.values():
        for name, linear in [*block.named_modules()]:
            if not isinstance(linear, nn.Linear):
                continue
            dtype = linear.weight.dtype
            quantized = Linear4bit(
                linear.in_features,
                linear.out_features,
                bias=False,
                compute_dtype=dtype,
                quant_type="nf4",
                quant_storage=dtype,
                device="meta",
            )
            weight = Params4bit(
                linear.weight.data, requires_grad=False, quant_type="nf4", quant_storage=dtype, module=quantized
            )
            quantized.weight = weight.to("cpu")
            block.set_submodule(name, quantized)


def adapt(model: M, *, modules_to_save: tuple[str, ...] = (), **how: object) -> M:
    """Return a model whose linear layers have adapters; ``how``: as ``LoraConfig`` takes it."""
    from peft import LoraConfig, inject_adapter_in_model
    from peft.utils.other import ModulesToSaveWrapper

    config = LoraConfig(r=RANK, lora_alpha=8, **{"target_modules": list(NAMES.values())} | how)
    adapted: M = inject_adapter_in_model(config, model)
    for name in modules_to_save:
        module = ENDS[name]
        wrapper = ModulesToSaveWrapper(getattr(adapted, module), "default")
        wrapper.modules_to_save.requires_grad_(True)  # as PeftModel does
        setattr(adapted, module, wrapper)
    return adapted

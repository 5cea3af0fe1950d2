"""Loops over PEFT adapters around a Llama in plain PyTorch."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import nn

from tests.third_party import loops
from tests.third_party.loops import Batch, Loop

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


def loop(
    *,
    autocast: bool = False,
    recompute: bool = False,
    dropout: float = 0.0,
    targets: tuple[str, ...] = tuple(NAMES),
    half: bool = False,
    dora: bool = False,
) -> Loop:
    """A loop over all blocks' linear layers with adapters, under DistributedDataParallel.

    ``autocast``: bf16 weights and fp32 adapters, as Trainer(bf16=True); ``half``: both in bf16.
    """
    from peft import LoraConfig, inject_adapter_in_model

    llama = loops.Llama().to(torch.bfloat16 if half or autocast else torch.float32)
    names = [NAMES[name] for name in targets]
    config = LoraConfig(r=RANK, lora_alpha=8, lora_dropout=dropout, target_modules=names, use_dora=dora)
    model: nn.Module = inject_adapter_in_model(config, llama)
    if autocast:
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.float()
    if recompute:
        llama.embed.register_forward_hook(lambda module, ids, x: x.requires_grad_())
        loops.apply_ac(llama, every=1)
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

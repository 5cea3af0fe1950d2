"""What a block keeps under autocast: as counted, and as transformers' blocks save it, in every storage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from fivefold.job import Job
from fivefold.layout.legal import refuse
from fivefold.layout.spec import Layout
from fivefold.model import catalog as models
from fivefold.model.huggingface.families import from_config
from fivefold.plan.count.counts import Counts
from fivefold.plan.count.memory.liveness import kept_bytes
from fivefold.plan.count.operations.layer import kind_of
from fivefold.plan.count.operations.part import part_of
from fivefold.record import Mistake
from fivefold.train.model.precision import check_trainable

TOKENS = 64
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256,
}  # fmt: skip
FAMILIES: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**SIZES, num_key_value_heads=2),
    "qwen2": transformers.Qwen2Config(**SIZES, num_key_value_heads=2),  # biases
    "qwen3": transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16),  # norms of 16-bit heads
    "starcoder2": transformers.Starcoder2Config(
        **SIZES, num_key_value_heads=2, residual_dropout=0.0, embedding_dropout=0.0, attention_dropout=0.0
    ),  # LayerNorm and a plain MLP
}


def saved_bytes(model: nn.Module, block: nn.Module) -> int:
    """Bytes of the storages that autograd saves in ``block``, but parameters and the rotary table."""
    mine = {each.untyped_storage().data_ptr() for each in model.parameters()}
    table = 4 * TOKENS * 16  # cosines, or sines, of one sequence
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.shape[0] != 1 or tensor.untyped_storage().nbytes() != table:
            found.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    block.register_forward_pre_hook(lambda *_: hooks.__enter__())
    block.register_forward_hook(lambda *_: hooks.__exit__())
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randint(256, (2, TOKENS)))
    return sum(each.untyped_storage().nbytes() for key, each in found.items() if key not in mine)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_block_keeps_what_autograd_saves(name: str) -> None:
    config = FAMILIES[name]
    config._attn_implementation = "sdpa"
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    ours = from_config({**config.to_dict(), "architectures": [type(theirs).__name__]}, name=name)
    job = Job(stack="ddp", sequence=TOKENS, global_batch=4, precision="bf16-autocast")
    counts, part = Counts(ours, job), part_of(Layout.parse("dp2 mbs2"))
    kept = sum(kept_bytes(counts.unit(part, kind_of(ours, 1)), sizes={"x": counts.local(part).entry_bytes}))
    assert kept == saved_bytes(theirs, theirs.model.layers[1])


def test_our_engine_has_no_autocast() -> None:
    job = Job(precision="bf16-autocast")
    with pytest.raises(Mistake, match=r"bf16-autocast.*cannot be trained"):
        check_trainable(job.precision)
    with pytest.raises(Mistake, match=r"PyTorch's autocast, which fivefold does not use; take bf16, or a stack"):
        refuse(Layout.parse("dp1"), model=models.named("llama3.2-1b"), job=job)

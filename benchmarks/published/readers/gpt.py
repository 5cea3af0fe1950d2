"""GPT as Megatron-LM trained it: layer norms, biases, learned positions, a plain GELU MLP, a tied head, dropout 0.1."""

from __future__ import annotations

from functools import lru_cache

from benchmarks.published.cells import Row, read_required_integer
from fivefold.errors import UserError
from fivefold.job import get_recipe
from fivefold.model.spec import Model

# Megatron-LM's fp16 with gradients summed in fp32 (Korthikanti et al. 2022 count 18 bytes of states per parameter).
FP16_FP32_GRADIENTS = get_recipe("bf16").replace(name="fp16, fp32 gradients", compute="fp16", loss_scaling=True)


@lru_cache(maxsize=256)
def gpt(*, layers: int, width: int, heads: int, vocab: int, positions: int) -> Model:
    """Return a GPT of Megatron-LM's shape."""
    if width % heads:
        raise UserError(f"hidden {width} is not divisible by heads {heads}")
    return Model(
        name=f"gpt-{layers}x{width}",
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        ffn=4 * width,
        vocab=vocab,
        positions=positions,
        norm="layernorm",
        mlp="plain",
        activation="gelu",
        mlp_bias=True,
        position="learned",
        qkv_bias=True,
        out_bias=True,
        tied_embeddings=True,
        dropout=0.1,
    )


def gpt_of(row: Row, *, vocab: int) -> Model:
    """Return the GPT whose layers, width, heads and sequence a row prints."""
    return gpt(
        layers=read_required_integer(row, "layers"),
        width=read_required_integer(row, "hidden"),
        heads=read_required_integer(row, "heads"),
        vocab=vocab,
        positions=read_required_integer(row, "seq"),
    )

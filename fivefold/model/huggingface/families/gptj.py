"""GPT-J and CodeGen: attention and MLP in parallel, on one norm; a part of the head rotates; the head has a bias."""

from __future__ import annotations

from typing import Any

from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import (
    GPT_KEYS,
    GPT_PLACES,
    FusedTensor,
    drop_keys,
    expand_names,
    map_same_names,
)
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.mapping import build_model, read_head_dim
from fivefold.model.spec import Model

KEYS = GPT_KEYS | map_same_names("rotary_dim")
DEFAULTS: dict[str, Any] = {
    **expand_names(vocab=50_400, width=4096, layers=28, heads=16, positions=2048),
    "intermediate_size": None,
    "hidden_act": "gelu_new",
    "norm_epsilon": 1e-5,
    "tie_word_embeddings": False,
    "rotary_dim": 64,
}
PLACES = drop_keys(GPT_PLACES, "embed.positions", "norm2") | {
    "attention.out": "attn.out_proj",
    "mlp.up": "mlp.fc_in",
    "mlp.down": "mlp.fc_out",
}
CODEGEN_QKV = ("attention.q", "attention.v", "attention.k")
CODEGEN_GROUPS = 4  # query_key_value holds that many groups of heads, each with its queries, values and keys


def _build_gptj(config: Config) -> Model:
    """Build GPT-J or CodeGen: attention and MLP in parallel after one norm, and rotary positions in part of a head."""
    head_dim = read_head_dim(config)
    if config.rotary_dim is None or config.rotary_dim > head_dim:
        raise config.mistake(f"rotary_dim={config.rotary_dim} must be at most the head dim, {head_dim}; lower it")
    return build_model(
        config,
        norm="layernorm",
        mlp="plain",
        mlp_bias=True,
        ffn=config.intermediate_size or 4 * config.hidden_size,
        block="parallel_shared",
        head_bias=True,
        rope_fraction=config.rotary_dim / head_dim,
    )


def _build_codegen(config: Config) -> Model:
    if config.num_attention_heads % CODEGEN_GROUPS:
        raise config.mistake(
            f"n_head={config.num_attention_heads} is not divisible by {CODEGEN_GROUPS} groups of heads"
        )
    return _build_gptj(config)


GPTJ = Family(
    model_type="gptj",
    architecture="GPTJForCausalLM",
    keys=KEYS,
    defaults=DEFAULTS,
    to_model=_build_gptj,
    tensors=PLACES | {f"attention.{part}": f"attn.{part}_proj" for part in "qkv"},
    interleaved_rotary=True,
    base_prefix="transformer.",
)
CODEGEN = Family(
    model_type="codegen",
    architecture="CodeGenForCausalLM",
    keys=KEYS,
    defaults=DEFAULTS,
    to_model=_build_codegen,
    tensors=PLACES | dict.fromkeys(CODEGEN_QKV, FusedTensor("attn.qkv_proj", CODEGEN_QKV, groups=CODEGEN_GROUPS)),
    interleaved_rotary=True,
    base_prefix="transformer.",
)

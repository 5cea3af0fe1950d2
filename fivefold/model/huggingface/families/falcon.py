"""Falcon 7B, 40B and 180B."""

from __future__ import annotations

from typing import Any

from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import (
    PLAIN_MLP,
    QKV,
    ROTARY,
    SIZES,
    UNREAD_ROTARY_FACTOR,
    FusedTensor,
    drop_keys,
    expand_names,
    map_same_names,
)
from fivefold.model.huggingface.family import Family, Supported
from fivefold.model.huggingface.mapping import build_model
from fivefold.model.spec import Model


def _build_falcon(config: Config) -> Model:
    """Build Falcon: one key head, or groups (40B); attention and MLP in parallel, or one after another."""
    if config.hidden_size % config.num_attention_heads:
        raise config.mistake(
            f"hidden_size={config.hidden_size} is not divisible by num_attention_heads={config.num_attention_heads}; "
            "change one"
        )
    heads, grouped, norms = config.num_attention_heads, config.new_decoder_architecture, config.num_ln_in_parallel_attn
    norms = (2 if grouped else 1) if norms is None else norms
    if (grouped and not config.parallel_attn) or (norms == 2 and not grouped and config.parallel_attn):
        raise config.mistake(
            f"new_decoder_architecture={grouped}, parallel_attn={config.parallel_attn} and "
            f"num_ln_in_parallel_attn={norms} do not go together in the family's code; leave the last two out"
        )
    block = "pre" if not config.parallel_attn else "parallel" if norms == 2 else "parallel_shared"
    kv_heads = (config.num_key_value_heads or heads) if grouped else 1 if config.multi_query else heads
    fields: dict[str, Any] = {
        "norm": "layernorm",
        "mlp": "plain",
        "mlp_bias": config.attention_bias,
        "block": block,
        "kv_heads": kv_heads,
        "ffn": config.intermediate_size or 4 * config.hidden_size,
        "head_dim": config.hidden_size // heads,
    }
    return build_model(config, **fields)


def _write_falcon(model: Model) -> dict[str, Any]:
    single, parallel = model.kv_heads == 1, model.block != "pre"
    grouped = parallel and not single
    return {
        "new_decoder_architecture": grouped,
        "multi_query": single,
        "parallel_attn": parallel,
        **({"num_ln_in_parallel_attn": 2 if model.block == "parallel" else 1} if grouped else {}),
    }


FALCON = Family(
    model_type="falcon",
    architecture="FalconForCausalLM",
    keys={"n_embed": "hidden_size"}
    | drop_keys(SIZES | ROTARY | UNREAD_ROTARY_FACTOR, "intermediate_size", "attention_dropout")
    | map_same_names("new_decoder_architecture multi_query parallel_attn num_ln_in_parallel_attn")
    | {
        "ffn_hidden_size": "intermediate_size",
        "num_kv_heads": "num_key_value_heads",
        "activation": "hidden_act",
        "bias": "attention_bias",
        "layer_norm_epsilon": "norm_epsilon",
    },
    defaults={
        **expand_names(vocab=65_024, width=4544, heads=71),
        "intermediate_size": None,
        "hidden_act": "gelu",
        "norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
    supported={
        "alibi": Supported((False, None), "scores with a bias by distance (ALiBi)"),
        "attention_dropout": Supported((0, None), "dropout only of what attention adds"),
        "hidden_dropout": Supported((0, None), "one mask of dropout over what attention and MLP add"),
    },
    to_model=_build_falcon,
    write=_write_falcon,
    tensors={
        "blocks": "transformer.h.{}",
        "embed.tokens": "transformer.word_embeddings",
        "head.norm": "transformer.ln_f",
        "head.out": "lm_head",
        "norm1": "input_layernorm",
        "norm2": "post_attention_layernorm",
        **dict.fromkeys(QKV, FusedTensor("self_attention.query_key_value", QKV, groups="kv_heads")),
        "attention.out": "self_attention.dense",
        **PLAIN_MLP,
    },
    block_tensors={"parallel": {"norm1": "ln_attn", "norm2": "ln_mlp"}},
)

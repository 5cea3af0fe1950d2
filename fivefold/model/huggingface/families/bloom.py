"""BLOOM and MPT: a bias on scores by distance (ALiBi) instead of positions, LayerNorms, plain MLPs."""

from __future__ import annotations

from typing import Any

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import QKV, FusedTensor, expand_names, map_same_names
from fivefold.model.huggingface.family import Family, Supported
from fivefold.model.huggingface.mapping import build_model
from fivefold.model.spec import Model

FIELDS: dict[str, Any] = {"position": "alibi", "norm": "layernorm", "mlp": "plain", "activation": "gelu"}


def _build_bloom(config: Config) -> Model:
    """Build BLOOM: a norm after the embedding, biases everywhere, a feed-forward four times as wide."""
    config = config.replace(intermediate_size=4 * config.hidden_size)
    return build_model(config, **FIELDS | decoder.GPT_FIELDS | {"activation": "gelu_tanh"}, embedding_norm="weighted")


def _build_mpt(config: Config) -> Model:
    """Build MPT: neither biases nor weights of norms besides their factors, and one rate of dropout."""
    config = config.replace(intermediate_size=4 * config.hidden_size, hidden_dropout=config.attention_dropout)
    scale, usual = config.attention_multiplier, (config.hidden_size // config.num_attention_heads) ** -0.5
    return build_model(
        config, **FIELDS, norm_bias=False, qkv_clip=config.qkv_clip, attention_scale=None if scale == usual else scale
    )


def _write_mpt(model: Model) -> dict[str, Any]:
    """Return the rate of dropout, which transformers accepts only as an integer."""
    return {"attn_config.attn_pdrop": model.dropout or 0}


BLOOM = Family(
    model_type="bloom",
    architecture="BloomForCausalLM",
    keys=map_same_names(
        "vocab_size hidden_size num_hidden_layers num_attention_heads tie_word_embeddings hidden_dropout "
        "attention_dropout"
    )
    | {
        "n_embed": "hidden_size",
        "hidden_size": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "layer_norm_epsilon": "norm_epsilon",
    },
    defaults={
        **expand_names(vocab=250_880, width=64, layers=2, heads=8),
        "intermediate_size": None,
        "norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
    supported={"apply_residual_connection_post_layernorm": Supported((False,), "norms within the residual stream")},
    to_model=_build_bloom,
    tensors={
        "blocks": "transformer.h.{}",
        "embed.tokens": "transformer.word_embeddings",
        "embed.norm": "transformer.word_embeddings_layernorm",
        "head.norm": "transformer.ln_f",
        "head.out": "lm_head",
        "norm1": "input_layernorm",
        "norm2": "post_attention_layernorm",
        **dict.fromkeys(QKV, FusedTensor("self_attention.query_key_value", QKV, groups="heads")),
        "attention.out": "self_attention.dense",
        **decoder.PLAIN_MLP,
    },
    base_prefix="transformer.",
)
MPT = Family(
    model_type="mpt",
    architecture="MptForCausalLM",
    keys=map_same_names("vocab_size hidden_size num_hidden_layers num_attention_heads tie_word_embeddings")
    | {
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "max_seq_len": "max_position_embeddings",
        "layer_norm_epsilon": "norm_epsilon",
        "attn_config.attn_pdrop": "attention_dropout",
        "attn_config.clip_qkv": "qkv_clip",
        "attn_config.softmax_scale": "attention_multiplier",
    },
    tables=("attn_config",),
    defaults={
        **expand_names(vocab=50_368, width=2048, layers=24, heads=16),
        "intermediate_size": None,
        "norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
    # transformers ignores most of these keys, MosaicML's code reads them
    supported={
        "attn_config.alibi": Supported((True,), "learned positions"),
        "attn_config.alibi_bias_max": Supported((8,), "another bias by distance"),
        "attn_config.attn_type": Supported(("multihead_attention",), "one key head for all queries"),
        "attn_config.prefix_lm": Supported((False,), "attention that is not causal"),
        "attn_config.qk_ln": Supported((False,), "norms of queries and keys"),
        "expansion_ratio": Supported((4,), "a feed-forward that is not four times as wide"),
        "logit_scale": Supported((None,), "a factor on logits"),
        "no_bias": Supported((True,), "biases"),
    },
    to_model=_build_mpt,
    write=_write_mpt,
    tensors={
        "blocks": "transformer.blocks.{}",
        "embed.tokens": "transformer.wte",
        "head.norm": "transformer.norm_f",
        "head.out": "lm_head",
        "norm1": "norm_1",
        "norm2": "norm_2",
        **dict.fromkeys(QKV, FusedTensor("attn.Wqkv", QKV)),
        "attention.out": "attn.out_proj",
        "mlp.up": "ffn.up_proj",
        "mlp.down": "ffn.down_proj",
    },
    base_prefix="transformer.",
)

"""Persimmon."""

from __future__ import annotations

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import PLAIN_MLP, QKV, FusedTensor, drop_keys, expand_names, map_same_names
from fivefold.model.huggingface.family import Family, Supported
from fivefold.model.huggingface.mapping import build_model
from fivefold.model.huggingface.rope import read_rope
from fivefold.model.spec import Model


def _build_persimmon(config: Config) -> Model:
    """Build Persimmon: LayerNorms of queries and keys per head, half of which rotates; biases in all layers."""
    return build_model(
        config,
        **read_rope(config, has_partial_rotary=True),
        **decoder.GPT_FIELDS,
        qk_norm="head" if config.use_qk_norm else "none",
    )


PERSIMMON = Family(
    model_type="persimmon",
    architecture="PersimmonForCausalLM",
    keys=drop_keys(decoder.LAYER_NORM_KEYS, "num_key_value_heads", "head_dim")
    | {"layer_norm_eps": "norm_epsilon", "qk_layernorm": "use_qk_norm"}
    | map_same_names("partial_rotary_factor"),
    defaults={
        **expand_names(vocab=262_144, ffn=16_384, layers=36, heads=64, positions=16_384),
        "hidden_act": "relu2",
        "norm_epsilon": 1e-5,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": True,
    },
    supported={"hidden_dropout": Supported((0,), "dropout only of what the MLP adds")},
    to_model=_build_persimmon,
    write=lambda model: {"qk_layernorm": model.qk_norm == "head"},
    tensors=decoder.TENSORS
    | {
        "head.norm": "model.final_layernorm",
        **dict.fromkeys(QKV, FusedTensor("self_attn.query_key_value", QKV, groups="kv_heads")),
        "attention.q_norm": "self_attn.q_layernorm",
        "attention.k_norm": "self_attn.k_layernorm",
        "attention.out": "self_attn.dense",
        **PLAIN_MLP,
    },
)

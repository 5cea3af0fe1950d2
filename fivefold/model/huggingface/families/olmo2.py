"""OLMo 1 to 3, OLMoE and FlexOlmo."""

from __future__ import annotations

from typing import Any

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import drop_keys, expand_names, map_same_names
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.mapping import (
    build_model,
    list_sliding_layers,
    read_experts,
    read_head_dim,
    read_windows,
)
from fivefold.model.huggingface.rope import read_gemma3_rope
from fivefold.model.spec import Model

POST_NORMS = {"norm1": "post_attention_layernorm", "norm2": "post_feedforward_layernorm"}
TENSORS = decoder.TENSORS | POST_NORMS
EXPERT_KEYS = decoder.EXPERT_KEYS | {"num_local_experts": "num_experts", "num_experts": "num_experts"}
CLIP = {"clip_qkv": "qkv_clip"}
DEFAULTS = {"vocab_size": 50_304, "intermediate_size": 11_008, "norm_epsilon": 1e-5}


def _build_olmo(config: Config, **of_family: Any) -> Model:
    return build_model(config, **of_family, block="post", qk_norm="full")


def _build_olmo3(config: Config) -> Model:
    """Build OLMo 3: OLMo 2 with a sliding window in three of four layers, whose positions are not scaled."""
    windows = read_windows(config, default=list_sliding_layers(config.num_hidden_layers, period=4))
    return _build_olmo(config, **read_gemma3_rope(config), **windows)


def _build_flex_olmo(config: Config) -> Model:
    """Build FlexOlmo: OLMo 2 with experts in every layer."""
    return _build_olmo(config, moe=read_experts(config))


def _build_olmoe(config: Config) -> Model:
    """Build OLMoE: norms before attention and experts, and over all queries and all keys at once."""
    heads, head_dim = config.num_attention_heads, read_head_dim(config)
    if heads * head_dim != config.hidden_size:
        raise config.mistake(
            f"num_attention_heads={heads} x head_dim={head_dim} is not hidden_size={config.hidden_size}, with which "
            "transformers' code fails; change one"
        )
    return _build_flex_olmo(config).replace(block="pre", qkv_clip=config.qkv_clip)


# OLMo 1: Llama with LayerNorms without weights, of a fixed epsilon, and queries, keys, values clipped.
OLMO1 = Family(
    model_type="olmo",
    architecture="OlmoForCausalLM",
    keys=drop_keys(decoder.KEYS, "rms_norm_eps") | CLIP | map_same_names("attention_bias"),
    defaults=DEFAULTS,
    to_model=lambda config: build_model(
        config, norm="layernorm", norm_weight=False, norm_epsilon=1e-5, qkv_clip=config.qkv_clip
    ),
)
# OLMo 2: norms after attention and MLP, and over all queries and all keys at once.
OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    keys=decoder.KEYS | map_same_names("attention_bias"),
    defaults=DEFAULTS,
    to_model=_build_olmo,
    tensors=TENSORS,
)
OLMO3 = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    keys=decoder.KEYS | map_same_names("attention_bias sliding_window layer_types"),
    defaults={**DEFAULTS, "sliding_window": 4096, "rope_theta": 500_000.0, "rope_local_base_freq": 500_000.0},
    to_model=_build_olmo3,
    write=decoder.write_layer_types,
    tensors=TENSORS,
)

FLEX_OLMO = Family(
    model_type="flex_olmo",
    architecture="FlexOlmoForCausalLM",
    keys=decoder.KEYS | EXPERT_KEYS | map_same_names("attention_bias norm_topk_prob"),
    defaults={
        **DEFAULTS,
        "vocab_size": 100_352,
        "max_position_embeddings": 4096,
        "norm_epsilon": 1e-6,
        "rope_theta": 500_000.0,
        **expand_names(experts=7, topk=5),
        "router_aux_loss_coef": 0.01,
        "norm_topk_prob": False,
    },
    to_model=_build_flex_olmo,
    tensors=decoder.EXPERT_TENSORS | POST_NORMS,
    stacked_tensors=decoder.name_stacked_experts(),
)
OLMOE = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    keys=decoder.KEYS | EXPERT_KEYS | CLIP | map_same_names("attention_bias norm_topk_prob"),
    defaults={
        **DEFAULTS,
        **expand_names(width=2048, ffn=2048, layers=16, heads=16, positions=4096),
        **expand_names(experts=64, topk=8),
        "router_aux_loss_coef": 0.01,
        "norm_topk_prob": False,
    },
    to_model=_build_olmoe,
    tensors=decoder.EXPERT_TENSORS,
    stacked_tensors=decoder.name_stacked_experts(),
)

"""Hunyuan 1, dense and with experts, the text model of Hunyuan-OCR, and Hunyuan (Hy) 3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import drop_keys, expand_names, map_same_names
from fivefold.model.huggingface.family import Family, Wrapper
from fivefold.model.huggingface.mapping import (
    build_model,
    read_biased_experts,
    read_experts,
    read_head_dim,
    read_mlp_layer_types,
)
from fivefold.model.huggingface.rope import read_table
from fivefold.model.spec import Model

V1_KEYS = drop_keys(decoder.KEYS, "original_max_position_embeddings") | map_same_names("attention_bias")
V1_DEFAULTS = {"vocab_size": 290_943, "intermediate_size": 11_008, "norm_epsilon": 1e-5}
V1_NORMS = {"attention.q_norm": "self_attn.query_layernorm", "attention.k_norm": "self_attn.key_layernorm"}
SHARED_TENSORS = {f"moe.shared.{part}": f"mlp.shared_mlp.{part}_proj" for part in ("gate", "up", "down")}


def _build_v1(config: Config, **of_family: Any) -> Model:
    """Build Hunyuan 1: Llama with norms of queries and keys after their rotation.

    A scaling "dynamic" with ``alpha`` is a larger base: θ · alpha^(dim / (dim − 2)), whatever the length.
    """
    rotary, dim = read_table(config), read_head_dim(config)
    if rotary.kind == "dynamic" and rotary.alpha:
        if config.head_dim is None or dim <= 2:
            raise config.mistake(f"head_dim={config.head_dim} must be more than 2 with rope_scaling.alpha; give it")
        theta = (rotary.rope_theta or config.rope_theta) * rotary.alpha ** (dim / (dim - 2))
        of_family["rope_theta"] = theta
    return build_model(config, qk_norm="head", qk_norm_after_rope=True, **of_family)


def _build_v1_moe(config: Config) -> Model:
    """Build Hunyuan 1 with experts in every layer, and a shared one of the same width.

    Published files give ``moe_topk`` for each layer.
    """
    layers, given = config.num_hidden_layers, config.topk_of_layers
    topks = (given or 1,) * layers if isinstance(given, int | None) else given
    if len(topks) < layers or len(set(topks[:layers])) > 1:
        raise config.mistake(
            f"moe_topk={list(topks)!r} has {len(topks)} entries for {layers} layers, which may not differ: give one "
            "number"
        )
    moe = read_experts(config, topk=topks[0], shared_experts=1, balance="none")
    return _build_v1(config, moe=moe)


def _build_hy_v3(config: Config) -> Model:
    """Build Hy 3: experts chosen by sigmoids and a bias after the first layer, norms of queries and keys per head."""
    moe = read_biased_experts(config) | read_mlp_layer_types(config, dense=1)
    if not moe["shared_experts"]:  # transformers then builds a shared MLP as large as that of a dense layer
        moe |= {"shared_experts": 1, "shared_ffn": config.intermediate_size}
    return build_model(config, qk_norm="head", moe=moe)


HUNYUAN_DENSE = Family(
    model_type="hunyuan_v1_dense",
    architecture="HunYuanDenseV1ForCausalLM",
    keys=V1_KEYS,
    defaults=V1_DEFAULTS,
    to_model=_build_v1,
    tensors=decoder.TENSORS | V1_NORMS,
)
HUNYUAN_MOE = Family(
    model_type="hunyuan_v1_moe",
    architecture="HunYuanMoEV1ForCausalLM",
    keys=V1_KEYS
    | {
        "num_experts_per_tok": "topk_of_layers",
        "moe_topk": "topk_of_layers",
        "num_local_experts": "num_experts",
        "num_experts": "num_experts",
    },
    defaults={**V1_DEFAULTS, "num_experts": 1, "topk_of_layers": 1},
    to_model=_build_v1_moe,
    write=lambda model: {"moe_topk": model.moe.topk if model.moe else 1},
    tensors=decoder.EXPERT_TENSORS | V1_NORMS | SHARED_TENSORS | {"moe.router": "mlp.gate.wg"},
    stacked_tensors=decoder.name_stacked_experts(router="gate.wg"),
)
HY_V3 = Family(
    model_type="hy_v3",
    architecture="HYV3ForCausalLM",
    keys=decoder.KEYS
    | {
        "num_local_experts": "num_experts",
        "num_experts": "num_experts",
        "num_shared_experts": "n_shared_experts",
        "router_scaling_factor": "routed_scaling_factor",
    }
    | map_same_names("attention_bias mlp_bias num_experts_per_tok moe_intermediate_size mlp_layer_types"),
    defaults={
        **expand_names(vocab=120_832, ffn=13_312, layers=80, heads=64, kv_heads=8, head_dim=128, positions=131_072),
        **expand_names(expert_ffn=1536, experts=192, topk=8, shared_experts=1),
        "norm_epsilon": 1e-5,
        "rope_theta": 11_158_840.0,
        "routed_scaling_factor": 2.826,
    },
    to_model=_build_hy_v3,
    tensors=decoder.EXPERT_TENSORS | SHARED_TENSORS | {"moe.router": "mlp.router.gate", "moe.bias": "mlp.expert_bias"},
    stacked_tensors=decoder.name_stacked_experts()
    | decoder.SHARED_EXPERT_TENSORS
    | {"moe.bias": "mlp.e_score_correction_bias"},
)

HUNYUAN_VL_TEXT = replace(
    HUNYUAN_DENSE,
    model_type="hunyuan_vl_text",
    architecture="HunYuanVLTextModel",
    defaults={**V1_DEFAULTS, "tie_word_embeddings": True},
    has_mrope=True,
)
WRAPPERS = (
    Wrapper("hunyuan_vl", "HunYuanVLForConditionalGeneration", text="hunyuan_vl_text", tied=True, inner_ties=True),
)

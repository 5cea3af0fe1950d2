"""Beam: gated attention, sums of the residual stream scaled by their depth, experts chosen by sigmoids."""

from __future__ import annotations

from typing import Any

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import drop_keys, expand_names, map_same_names
from fivefold.model.huggingface.families.cohere import write_rope_of_layers
from fivefold.model.huggingface.family import Family, Supported
from fivefold.model.huggingface.mapping import (
    build_model,
    list_sliding_layers,
    read_biased_experts,
    read_mlp_layer_types,
    read_windows,
)
from fivefold.model.huggingface.rope import read_rope_per_layer_type
from fivefold.model.spec import Model


def _build_beam(config: Config) -> Model:
    """Build Beam, whose last layer and every sixth see all tokens, with a factor on queries instead of a rotation."""
    layers = config.num_hidden_layers
    windows = read_windows(config, default=(*list_sliding_layers(layers, period=6)[:-1], False))
    fields: dict[str, Any] = {
        "block": "sandwich",
        "residual_by_depth": True,
        "qk_norm": "head",
        "output_gate": True,
        "gate_bias": True,
        "logit_softcap": config.final_logit_softcapping,
        "moe": read_biased_experts(config) | read_mlp_layer_types(config, dense=3),
    }
    rope = read_rope_per_layer_type(config, slides=windows.get("window_pattern", (False,)) or (True,))
    if rope.get("position") == "none" or rope.get("rope_pattern"):
        fields["temperature"] = {"form": "power", "scale": 0.1, "floor": 2048}
    return build_model(config, **windows, **rope, **fields)


BEAM = Family(
    model_type="beam",
    architecture="BeamForCausalLM",
    keys=drop_keys(decoder.KEYS, "rope_theta", "rope_scaling", "original_max_position_embeddings")
    | map_same_names(
        "num_experts num_experts_per_tok moe_intermediate_size routed_scaling_factor n_group topk_group norm_topk_prob "
        "sliding_window layer_types mlp_layer_types final_logit_softcapping"
    ),
    defaults={
        **expand_names(vocab=151_936, width=5120, ffn=20_480, layers=52, heads=48, kv_heads=8, positions=8192),
        **expand_names(expert_ffn=2560, experts=256, topk=8),
        "head_dim": 128,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "sliding_window": 512,
        "final_logit_softcapping": 30.0,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": None,
        },
    },
    supported={"attention_bias": Supported((False,), "biases of queries, keys and values without one of their gate")},
    to_model=_build_beam,
    write=write_rope_of_layers,
    tensors=decoder.BIASED_EXPERT_TENSORS
    | {
        "norm1_post": "post_attention_layernorm",
        "norm2": "pre_feedforward_layernorm",
        "norm2_post": "post_feedforward_layernorm",
        "attention.gate": "self_attn.gate_proj",
        "attention.gate_bias": "self_attn.gate_bias",
    },
    stacked_tensors=decoder.name_stacked_experts(),
)

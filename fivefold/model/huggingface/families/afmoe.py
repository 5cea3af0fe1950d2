"""AFMoE (Arcee's Trinity): gated attention with rotary positions only in sliding layers; experts chosen by sigmoids."""

from __future__ import annotations

from typing import Any

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import expand_names, map_same_names
from fivefold.model.huggingface.family import Family, Supported
from fivefold.model.huggingface.mapping import (
    build_model,
    list_sliding_layers,
    read_biased_experts,
    read_windows_of_rotating_layers,
)
from fivefold.model.spec import Model


def _build_afmoe(config: Config) -> Model:
    """Build AFMoE: norms before and after attention and experts, and over the queries and keys of each head."""
    layers = config.num_hidden_layers
    default = list_sliding_layers(layers, period=config.sliding_window_pattern)
    moe = read_biased_experts(config) | {"dense_layers": min(config.first_k_dense_replace, layers)}
    fields: dict[str, Any] = {"block": "sandwich", "qk_norm": "head", "output_gate": True}
    if config.mup_enabled:
        fields["embedding_scale"] = config.hidden_size**0.5
    windows = read_windows_of_rotating_layers(config, default=default)
    return build_model(config, **windows, **fields, moe=moe)


def _write_afmoe(model: Model) -> dict[str, Any]:
    return decoder.write_layer_types(model) | {"mup_enabled": model.embedding_scale != 1}


AFMOE = Family(
    model_type="afmoe",
    architecture="AfmoeForCausalLM",
    keys=decoder.KEYS
    | {
        "num_dense_layers": "first_k_dense_replace",
        "num_shared_experts": "n_shared_experts",
        "route_scale": "routed_scaling_factor",
        "global_attn_every_n_layers": "sliding_window_pattern",
    }
    | map_same_names("num_experts num_experts_per_tok moe_intermediate_size sliding_window layer_types mup_enabled"),
    defaults={
        **expand_names(vocab=200_192, width=2048, ffn=6144, heads=16, head_dim=128, positions=16_384),
        **expand_names(expert_ffn=1408, experts=64, topk=6, shared_experts=2),
        "norm_epsilon": 1e-5,
        "first_k_dense_replace": 1,
        "sliding_window": 1024,
        "sliding_window_pattern": 4,
    },
    supported={"attention_bias": Supported((False,), "biases of queries, keys and values without one of their gate")},
    to_model=_build_afmoe,
    write=_write_afmoe,
    tensors=decoder.EXPERT_TENSORS
    | decoder.SHARED_EXPERT_TENSORS
    | {
        "norm1_post": "post_attention_layernorm",
        "norm2": "pre_mlp_layernorm",
        "norm2_post": "post_mlp_layernorm",
        "attention.gate": "self_attn.gate_proj",
        "moe.router": "mlp.router.gate",
        "moe.bias": "mlp.expert_bias",
    },
    stacked_tensors=decoder.name_stacked_experts(router="router.gate"),
)

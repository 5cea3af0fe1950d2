"""Kolibri 1: experts next to a shared one, chosen by logits and a bias; rotary positions only in sliding layers."""

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
    read_shared_expert,
    read_windows,
    read_windows_of_rotating_layers,
)
from fivefold.model.spec import Model


def _build_kolibri1(config: Config) -> Model:
    """Build Kolibri 1: norms around attention and experts; the last of five layers is full and does not rotate."""
    read = read_windows if config.sliding_window is None else read_windows_of_rotating_layers
    windows = read(config, default=list_sliding_layers(config.num_hidden_layers, period=5))
    moe = read_experts(
        config, score="sigmoid", balance="free", biased="logits", aux_coefficient=0.0, **read_shared_expert(config)
    )
    fields: dict[str, Any] = {"ffn": config.moe_intermediate_size, "block": "sandwich", "qk_norm": "head"}
    return build_model(config, **windows, **fields, moe=moe)


KOLIBRI1 = Family(
    model_type="kolibri1",
    architecture="Kolibri1ForCausalLM",
    keys=drop_keys(decoder.KEYS, "intermediate_size")
    | {"num_experts": "num_experts", "num_local_experts": "num_experts"}
    | map_same_names(
        "num_experts_per_tok moe_intermediate_size norm_topk_prob shared_expert_intermediate_size sliding_window "
        "layer_types"
    ),
    defaults={
        **expand_names(vocab=128_000, width=2560, layers=50, heads=48, kv_heads=4, head_dim=128, positions=262_144),
        "intermediate_size": None,
        "sliding_window": 513,
        **expand_names(expert_ffn=512, experts=384, topk=6),
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": False,
    },
    to_model=_build_kolibri1,
    write=decoder.write_layer_types,
    tensors=decoder.EXPERT_TENSORS
    | decoder.SHARED_EXPERT_TENSORS
    | {"norm1_post": "post_attn_norm", "norm2_post": "post_ffn_norm", "moe.bias": "moe.router.expert_bias"},
    stacked_tensors=decoder.name_stacked_experts()
    | {
        "norm1_post": "post_self_attn_layernorm",
        "norm2_post": "post_mlp_layernorm",
        "moe.bias": "mlp.gate.e_score_correction_bias",
    },
)

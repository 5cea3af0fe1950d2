"""Mellum: Qwen3 with experts, and a sliding window in some layers, whose rotary base is their own."""

from __future__ import annotations

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import drop_keys, expand_names, map_same_names
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.mapping import build_model, read_experts, read_mlp_layer_types, read_windows
from fivefold.model.huggingface.rope import read_gemma3_rope
from fivefold.model.spec import Model


def _build_mellum(config: Config) -> Model:
    """Return the model of a Mellum config."""
    moe = read_experts(config, **read_mlp_layer_types(config, dense=0))
    windows = read_windows(config, default=(False,))
    fields = read_gemma3_rope(config) | windows
    return build_model(config, **fields, qk_norm="head", moe=moe)


MELLUM = Family(
    model_type="mellum",
    architecture="MellumForCausalLM",
    keys=drop_keys(decoder.KEYS, "rope_theta", "rope_scaling", "original_max_position_embeddings")
    | {"num_experts": "num_experts", "num_local_experts": "num_experts"}
    | map_same_names(
        "num_experts_per_tok moe_intermediate_size norm_topk_prob router_aux_loss_coef attention_bias sliding_window "
        "layer_types mlp_layer_types"
    ),
    defaults={
        **expand_names(vocab=98_304, width=2304, ffn=7168, layers=28, kv_heads=4, head_dim=128, positions=131_072),
        "rope_theta": 500_000.0,
        "rope_local_base_freq": 10_000.0,
        "sliding_window": 1024,
        **expand_names(expert_ffn=896, experts=64, topk=8),
        "router_aux_loss_coef": 0.001,
    },
    to_model=_build_mellum,
    write=decoder.write_rope_by_layers,
    tensors=decoder.EXPERT_TENSORS,
    stacked_tensors=decoder.name_stacked_experts(),
)

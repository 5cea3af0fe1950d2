"""Flint: experts next to a shared one, attention sinks; only sliding layers have rotary positions."""

from __future__ import annotations

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import expand_names, map_same_names
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.mapping import (
    build_model,
    read_experts,
    read_shared_expert,
    read_sparse_steps,
    read_windows_of_rotating_layers,
)
from fivefold.model.spec import Model


def _build_flint(config: Config) -> Model:
    """Build Flint: the first two, every fourth and the last layer are full; sigmoid routing after two dense layers."""
    layers = config.num_hidden_layers
    slides = tuple(not (layer < 2 or layer % 4 == 1 or layer == layers - 1) for layer in range(layers))
    moe = read_experts(config, score="sigmoid", **read_shared_expert(config), **read_sparse_steps(config, dense=(0, 1)))
    fields = read_windows_of_rotating_layers(config, default=slides)
    return build_model(config, **fields, qk_norm="head", attention_sinks=True, moe=moe)


FLINT = Family(
    model_type="flint",
    architecture="FlintForCausalLM",
    keys=decoder.KEYS
    | map_same_names(
        "num_experts num_experts_per_tok moe_intermediate_size norm_topk_prob router_aux_loss_coef attention_bias "
        "shared_expert_intermediate_size mlp_only_layers decoder_sparse_step sliding_window layer_types"
    ),
    defaults={
        **expand_names(vocab=150_144, width=2048, ffn=6144, layers=49, kv_heads=4, head_dim=128, positions=262_144),
        "sliding_window": 513,
        **expand_names(expert_ffn=512, experts=256, topk=6),
        "shared_expert_intermediate_size": 1024,
        "router_aux_loss_coef": 0.0005,
    },
    to_model=_build_flint,
    write=decoder.write_layer_types,
    tensors=decoder.EXPERT_TENSORS | decoder.SHARED_EXPERT_TENSOR | {"attention.sinks": "self_attn.softmax_offset"},
    stacked_tensors=decoder.name_stacked_experts() | {"attention.sinks": "self_attn.sinks"},
)

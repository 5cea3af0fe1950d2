"""Laguna: gates of heads by softplus, other numbers of heads in sliding layers, experts chosen by sigmoids."""

from __future__ import annotations

from typing import Any

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import drop_keys, expand_names, map_same_names
from fivefold.model.huggingface.family import Family, Supported
from fivefold.model.huggingface.mapping import (
    build_model,
    read_experts,
    read_mlp_layer_types,
    read_shared_expert,
    read_windows,
)
from fivefold.model.huggingface.rope import read_rope_tables
from fivefold.model.spec import Model


def _build_laguna(config: Config) -> Model:
    """Build Laguna, in which every layer but the first has experts."""
    layers = config.num_hidden_layers
    windows = read_windows(config, default=(False,) * layers)
    pattern = windows["window_pattern"] or (True,) if windows else (False,)
    slides = [pattern[layer % len(pattern)] for layer in range(layers)]
    rope = read_rope_tables(config, slides=slides)
    heads, sliding_rope = _read_heads(config, slides), rope.pop("sliding", {})
    full_heads = heads.get(False, heads.get(True))
    if heads.get(True, full_heads) != full_heads:
        sliding_rope["heads"] = heads[True]
    fields: dict[str, Any] = {
        "heads": full_heads,
        "qk_norm": "head",
        "output_gate": True,
        "gate_activation": "softplus",
        "gate_per_head": config.gating in (True, "per-head"),
        "sliding": sliding_rope or None,
    }
    moe = read_experts(
        config, score="sigmoid", balance="free", **read_shared_expert(config), **read_mlp_layer_types(config, dense=1)
    )
    return build_model(config, **rope, **windows, **fields, moe=moe)


def _read_heads(config: Config, slides: list[bool]) -> dict[bool, int]:
    """Return the number of heads of full layers and of sliding layers."""
    listed = config.heads_of_layers or (config.num_attention_heads,) * len(slides)
    if len(listed) != len(slides):
        raise config.mistake(
            f"num_attention_heads_per_layer names {len(listed)} layers, num_hidden_layers is {len(slides)}; change one"
        )
    heads = dict(zip(slides, listed, strict=True))
    if any(heads[sliding] != number for sliding, number in zip(slides, listed, strict=True)):
        raise config.mistake(
            f"num_attention_heads_per_layer={list(listed)}: layers of one kind with different numbers of heads are not "
            "supported; give one number for full and one for sliding layers"
        )
    return heads


def _write_laguna(model: Model) -> dict[str, Any]:
    moe = model.moe
    return {
        **decoder.write_rope_tables(model),
        "num_attention_heads_per_layer": [model.attention(layer).heads for layer in range(model.layers)],
        "gating": "per-head" if model.gate_per_head else "per-element",
        **({"shared_expert_intermediate_size": moe.shared_width} if moe else {}),
    }


LAGUNA = Family(
    model_type="laguna",
    architecture="LagunaForCausalLM",
    keys=drop_keys(decoder.KEYS, "rope_theta", "rope_scaling", "original_max_position_embeddings")
    | {"num_attention_heads_per_layer": "heads_of_layers", "moe_routed_scaling_factor": "routed_scaling_factor"}
    | map_same_names(
        "num_experts num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size router_aux_loss_coef "
        "sliding_window layer_types mlp_layer_types gating"
    ),
    defaults={
        **expand_names(vocab=100_352, width=2048, ffn=8192, layers=40, heads=48, kv_heads=8, positions=131_072),
        **expand_names(expert_ffn=512, experts=256, topk=8),
        "shared_expert_intermediate_size": 512,
        "head_dim": 128,
        "sliding_window": 512,
        "router_aux_loss_coef": 0.001,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
    },
    supported={
        "attention_bias": Supported((False,), "biases of queries, keys and values without one of their gate"),
        "moe_apply_router_weight_on_input": Supported((False,), "routing weights on the inputs of sigmoid experts"),
        "moe_router_logit_softcapping": Supported((0.0,), "a cap of the router's logits"),
    },
    to_model=_build_laguna,
    write=_write_laguna,
    tensors=decoder.EXPERT_TENSORS
    | decoder.SHARED_EXPERT_TENSOR
    | {"attention.gate": "self_attn.g_proj", "moe.bias": "mlp.experts.e_score_correction_bias"},
    stacked_tensors=decoder.name_stacked_experts()
    | decoder.SHARED_EXPERT_TENSORS
    | {"moe.bias": "mlp.gate.e_score_correction_bias"},
)

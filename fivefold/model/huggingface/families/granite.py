"""Granite, dense and with experts: factors on embedding, scores, branches and logits; in some, windows and sinks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fivefold.model.huggingface import decoder, state_space
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import EXPERT_GATE_UP, FusedTensor, drop_keys, expand_names, map_same_names
from fivefold.model.huggingface.family import Family, Wrapper
from fivefold.model.huggingface.mapping import (
    build_model,
    find_period,
    list_sliding_layers,
    read_experts,
    read_mixers,
    read_shared_expert,
    read_windows,
)
from fivefold.model.huggingface.rope import read_rope
from fivefold.model.mixers.kinds import MixerName
from fivefold.model.spec import Model

KEYS = decoder.KEYS | map_same_names(
    "attention_bias embedding_multiplier attention_multiplier residual_multiplier logits_scaling"
)
DEFAULTS = {"intermediate_size": 11_008, "attention_multiplier": 1.0}


EXPERT_KEYS = KEYS | map_same_names("num_experts_per_tok router_aux_loss_coef") | {"num_local_experts": "num_experts"}
SHARED_KEY = {"shared_intermediate_size": "shared_expert_intermediate_size"}
SWASH_KEYS = map_same_names("sliding_window layer_types layer_rope_theta")
EXPERT_DEFAULTS = {**DEFAULTS, "num_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001}
EXPERT_TENSORS = decoder.TENSORS | {
    "moe.router": "block_sparse_moe.router.layer",
    **dict.fromkeys(EXPERT_GATE_UP, FusedTensor("block_sparse_moe.input_linear.weight", EXPERT_GATE_UP)),
    "moe.experts.down": "block_sparse_moe.output_linear.weight",
}
SHARED_GATE_UP = ("moe.shared.gate", "moe.shared.up")
SHARED_TENSORS: dict[str, str | FusedTensor] = {
    **dict.fromkeys(SHARED_GATE_UP, FusedTensor("shared_mlp.input_linear", SHARED_GATE_UP)),
    "moe.shared.down": "shared_mlp.output_linear",
}
STACKED = decoder.name_stacked_experts("block_sparse_moe", router="router")


def _read_factors(config: Config) -> dict[str, float | None]:
    return {
        "embedding_scale": config.embedding_multiplier,
        "attention_scale": config.attention_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": 1 / config.logits_scaling,
    }


def _read_swash(config: Config) -> dict[str, Any]:
    """Return the fields of attention with sinks, a window in three of four layers, and a rotary base for each layer."""
    layers = range(config.num_hidden_layers)
    windows = read_windows(config, default=list_sliding_layers(len(layers), period=4, full=0))
    fields = read_rope(config) | windows | {"attention_sinks": True}
    if config.layer_rope_theta is None:
        return fields
    if len(config.layer_rope_theta) < len(layers):
        raise config.mistake(
            f"layer_rope_theta names {len(config.layer_rope_theta)} layers, num_hidden_layers is {len(layers)}; change "
            "one"
        )
    bases = tuple(base or 0.0 for base in config.layer_rope_theta[: len(layers)])
    pattern = windows.get("window_pattern", (False,)) or (True,)
    full, sliding = (
        {base for layer, base in enumerate(bases) if base and pattern[layer % len(pattern)] is slides}
        for slides in (False, True)
    )
    scaled = fields["rope_scaling"] is not None
    if len(full) > 1 or len(sliding) > 1 or (scaled and full and sliding and full != sliding):
        raise config.mistake(
            f"layer_rope_theta={list(config.layer_rope_theta)} needs a rotary base for each layer; one for all full "
            "layers and one, without rope scaling, for all sliding layers are supported"
        )
    if not full | sliding:
        return fields | {"position": "none"}
    rotates = tuple(map(bool, bases))
    return fields | {
        "rope_theta": max(full or sliding),
        "rope_theta_sliding": max(sliding) if full and sliding and full != sliding else None,
        "rope_pattern": () if all(rotates) else find_period(rotates),
    }


def _build_granite_swa(config: Config) -> Model:
    fields = _read_swash(config) | _read_factors(config)
    return build_model(config, **fields)


def _build_granitemoe_swa(config: Config) -> Model:
    fields = _read_swash(config) | _read_factors(config)
    return build_model(config, **fields, moe=read_experts(config, **read_shared_expert(config)))


def _build_granitemoehybrid(config: Config) -> Model:
    """Build Granite 4: Mamba-2 in most layers; without experts its MLP has the width of the shared one."""
    default: tuple[MixerName, ...] = tuple("mamba2" for _ in range(config.num_hidden_layers))
    geometry: dict[MixerName, Any] = {"mamba2": state_space.read_mamba2(config)}
    fields = read_mixers(config, geometry, kinds=state_space.KINDS, default=default)
    position = "rope" if config.position_embedding_type == "rope" else "none"
    fields |= _read_factors(config) | {"position": position}
    if config.num_experts:
        return build_model(config, **fields, moe=read_experts(config, **read_shared_expert(config)))
    if not config.shared_expert_intermediate_size:
        raise config.mistake("shared_intermediate_size=0 leaves no MLP in a model without experts; give its width")
    return build_model(config, **fields, ffn=config.shared_expert_intermediate_size)


def _write_granitemoehybrid(model: Model) -> dict[str, Any]:
    kinds = ["full_attention" if model.has_attention(layer) else "linear_attention" for layer in range(model.layers)]
    return {
        "layer_types": kinds,
        "position_embedding_type": "rope" if model.position == "rope" else None,
        **({} if model.moe else {"shared_intermediate_size": model.ffn, "num_local_experts": 0}),
        **state_space.write_mamba2(model),
    }


GRANITE = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    keys=KEYS | map_same_names("mlp_bias"),
    defaults=DEFAULTS,
    to_model=lambda config: build_model(config, **_read_factors(config)),
)
# Granite with experts in every layer, each of width intermediate_size.
GRANITEMOE = Family(
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    keys=EXPERT_KEYS,
    defaults=EXPERT_DEFAULTS,
    to_model=lambda config: build_model(config, **_read_factors(config), moe=read_experts(config)),
    tensors=EXPERT_TENSORS,
    stacked_tensors=STACKED,
)
# Granite with experts, which may have a shared one.
GRANITEMOESHARED = Family(
    model_type="granitemoeshared",
    architecture="GraniteMoeSharedForCausalLM",
    keys=EXPERT_KEYS | SHARED_KEY,
    defaults=EXPERT_DEFAULTS,
    to_model=lambda config: build_model(
        config, **_read_factors(config), moe=read_experts(config, **read_shared_expert(config))
    ),
    tensors=EXPERT_TENSORS | SHARED_TENSORS,
    stacked_tensors=STACKED,
)
HYBRID_GATE_UP = ("mlp.gate", "mlp.up")
GRANITEMOEHYBRID = Family(
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    keys=drop_keys(EXPERT_KEYS, "hidden_act")
    | SHARED_KEY
    | state_space.KEYS
    | {"layers_block_type": "layer_types", **map_same_names("layer_types position_embedding_type")},
    defaults={**EXPERT_DEFAULTS, **state_space.DEFAULTS, "shared_expert_intermediate_size": 1024},
    supported=state_space.ACTIVATION,
    to_model=_build_granitemoehybrid,
    write=_write_granitemoehybrid,
    tensors=EXPERT_TENSORS
    | SHARED_TENSORS
    | state_space.list_tensors("mamba")
    | dict.fromkeys(HYBRID_GATE_UP, FusedTensor("shared_mlp.input_linear", HYBRID_GATE_UP))
    | {"mlp.down": "shared_mlp.output_linear"},
    stacked_tensors=STACKED,
)
GRANITE_SWA = Family(
    model_type="granite_swa",
    architecture="GraniteSWAForCausalLM",
    keys=KEYS | map_same_names("mlp_bias") | SWASH_KEYS,
    defaults={
        **DEFAULTS,
        **expand_names(vocab=100_352, width=2560, ffn=8192, layers=24, heads=20, kv_heads=4, positions=8192),
        "norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "sliding_window": 128,
    },
    to_model=_build_granite_swa,
    write=decoder.write_layer_types,
    tensors=decoder.TENSORS | {"attention": "self_attn"},
)
GRANITEMOE_SWA = Family(
    model_type="granitemoe_swa",
    architecture="GraniteMoeSWAForCausalLM",
    keys=EXPERT_KEYS | SHARED_KEY | SWASH_KEYS,
    defaults={**EXPERT_DEFAULTS, "sliding_window": 128},
    to_model=_build_granitemoe_swa,
    write=decoder.write_layer_types,
    tensors=EXPERT_TENSORS | SHARED_TENSORS | {"attention": "self_attn"},
    stacked_tensors=STACKED,
)

GRANITE_DOCLING_TEXT = replace(
    GRANITE,
    model_type="granite_docling_text",
    architecture="GraniteDoclingTextModel",
    defaults={
        **DEFAULTS,
        **expand_names(vocab=133_800, width=1024, ffn=2048, layers=28, heads=16, kv_heads=4, positions=32_768),
        "norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "embedding_multiplier": 12.0,
        "logits_scaling": 4.0,
        "residual_multiplier": 0.263,
        "attention_multiplier": 0.015625,
    },
)
GRANITE4_VISION_TEXT = replace(GRANITE, model_type="granite4_vision_text", architecture="Granite4VisionTextModel")
WRAPPERS = (
    Wrapper("granite_docling", "GraniteDoclingForConditionalGeneration", text="granite_docling_text", tied=True),
    Wrapper("granite4_vision", "Granite4VisionForConditionalGeneration", text="granite4_vision_text", tied=False),
)

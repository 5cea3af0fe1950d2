"""EXAONE 4, and K-EXAONE with experts."""

from __future__ import annotations

from typing import Any

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import drop_keys, expand_names, map_same_names
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.mapping import (
    build_model,
    list_sliding_layers,
    read_biased_experts,
    read_mlp_layer_types,
    read_windows,
    read_windows_of_rotating_layers,
)
from fivefold.model.spec import Model

KEYS = decoder.KEYS | map_same_names("sliding_window layer_types") | {"sliding_window_pattern": "sliding_window_period"}
DEFAULTS = {
    **expand_names(vocab=102_400, ffn=16_384, kv_heads=32),
    "norm_epsilon": 1e-5,
    "sliding_window": 4096,
    "sliding_window_period": 4,
}


def _read_attention(config: Config) -> dict[str, Any]:
    """Return the fields of attention: norms per head; with a window, rotary positions only in sliding layers."""
    default: tuple[bool, ...] = ()
    period = config.sliding_window_period
    if config.layer_types is None:
        if config.sliding_window is None or not isinstance(period, int):
            raise config.mistake(
                f"sliding_window={config.sliding_window} and sliding_window_pattern={period!r} without layer_types "
                "make transformers' code fail; give layer_types"
            )
        default = list_sliding_layers(config.num_hidden_layers, period=period)
    read = read_windows if config.sliding_window is None else read_windows_of_rotating_layers
    return read(config, default=default) | {"qk_norm": "head"}


def _build_exaone_moe(config: Config) -> Model:
    """Build K-EXAONE: DeepSeek-V3's experts."""
    moe = read_biased_experts(config) | read_mlp_layer_types(config, dense=config.first_k_dense_replace)
    return build_model(config, **_read_attention(config), moe=moe)


def _write_layer_types(model: Model) -> dict[str, Any]:
    """Return the kinds of all layers; without a window all rotate, and with one that none has, none does."""
    window = model.window or (model.positions if model.position == "none" else None)
    return decoder.write_layer_types(model) | {"sliding_window": window}


# EXAONE 4: norms after attention and MLP.
EXAONE4 = Family(
    model_type="exaone4",
    architecture="Exaone4ForCausalLM",
    keys=KEYS,
    defaults=DEFAULTS,
    to_model=lambda config: build_model(config, **_read_attention(config), block="post"),
    write=_write_layer_types,
    tensors=decoder.TENSORS | {"norm1": "post_attention_layernorm", "norm2": "post_feedforward_layernorm"},
)

EXAONE_MOE = Family(
    model_type="exaone_moe",
    architecture="ExaoneMoeForCausalLM",
    keys=KEYS
    | drop_keys(decoder.BIASED_EXPERT_KEYS, "num_local_experts", "n_routed_experts", "n_shared_experts")
    | {"num_shared_experts": "n_shared_experts"}
    | map_same_names("num_experts first_k_dense_replace mlp_layer_types"),
    defaults={
        **DEFAULTS,
        "first_k_dense_replace": 1,
        **expand_names(expert_ffn=1024, experts=64, topk=8, shared_experts=1),
        "routed_scaling_factor": 2.5,
    },
    to_model=_build_exaone_moe,
    write=_write_layer_types,
    tensors=decoder.BIASED_EXPERT_TENSORS | {"moe.bias": "mlp.e_score_correction_bias"},
    stacked_tensors=decoder.name_stacked_experts(),
)

"""Command-R, R+, R7B, A and Compass: parallel attention and MLP with one norm without bias, scaled logits."""

from __future__ import annotations

from typing import Any

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import drop_keys, expand_names, map_same_names
from fivefold.model.huggingface.family import Family, Wrapper
from fivefold.model.huggingface.mapping import (
    build_model,
    find_period,
    list_sliding_layers,
    read_experts,
    read_mlp_layer_types,
    read_windows,
)
from fivefold.model.huggingface.rope import read_rope_per_layer_type
from fivefold.model.spec import Model

KEYS = decoder.LAYER_NORM_KEYS | {"layer_norm_eps": "norm_epsilon"} | map_same_names("attention_bias logit_scale")
DEFAULTS = {
    **expand_names(vocab=256_000, width=8192, ffn=22_528, layers=40, heads=64, positions=8192),
    "norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "logit_scale": 0.0625,
}


def _build_command(config: Config, **of_family: Any) -> Model:
    fields = {"norm": "layernorm", "norm_bias": False, "block": "parallel_shared", "logit_scale": config.logit_scale}
    return build_model(config, **fields, **of_family)


def _build_cohere2(config: Config) -> Model:
    """Build Command-R7B and A, in which only sliding-window layers rotate."""
    default = list_sliding_layers(config.num_hidden_layers, period=config.sliding_window_pattern)
    slides = read_windows(config, default=default)
    if not slides:
        return _build_command(config, position="none")
    return _build_command(config, **slides, rope_pattern=slides["window_pattern"])


def _build_compass(config: Config) -> Model:
    """Build Compass's text model: Cohere2 with rotary parameters by kind of layer, of which one may not rotate."""
    slides = read_windows(config, default=(False,) * config.num_hidden_layers)
    scale = 1.0 if config.logit_scale is None else config.logit_scale
    rope = read_rope_per_layer_type(config, slides=slides.get("window_pattern", (False,)) or (True,))
    return _build_command(config.replace(logit_scale=scale), **slides, **rope)


def write_rope_of_layers(model: Model) -> dict[str, Any]:
    """Return rotary parameters by kind of layer, null for a kind that does not rotate."""
    rope_keys = decoder.write_rope_by_layers(model)
    for kind, slides in (("full_attention", False), ("sliding_attention", True)):
        layers = [layer for layer in range(model.layers) if model.has_window(layer) is slides]
        if layers and not any(map(model.has_rope, layers)):
            rope_keys["rope_parameters"][kind] = None
    return rope_keys


def _build_cohere2_moe(config: Config) -> Model:
    """Build Command A+: Cohere2 with experts after dense layers, which rotate even if they do not slide.

    A softmax over the logits of the chosen experts equals that over all logits, rescaled to sum to one.
    """
    layers, dense = config.num_hidden_layers, config.first_k_dense_replace
    if config.scoring_func not in ("softmax", "sigmoid"):
        raise config.mistake(f"expert_selection_fn={config.scoring_func!r} is not supported; give softmax or sigmoid")
    if config.n_shared_experts and config.shared_expert_combination_strategy != "sum":
        raise config.mistake(
            f"shared_expert_combination_strategy={config.shared_expert_combination_strategy!r} needs half of what the "
            "experts add, which is not supported; give 'sum'"
        )
    prefix = list_sliding_layers(dense, period=config.prefix_dense_sliding_window_pattern)
    slides = prefix + list_sliding_layers(layers - dense, period=config.sliding_window_pattern)
    moe = read_experts(
        config,
        aux_coefficient=0.0,
        score=config.scoring_func,
        normalized=config.scoring_func == "softmax" or config.norm_topk_prob,
        **read_mlp_layer_types(config, dense=dense),
    )
    model = _build_command(
        config,
        **read_windows(config, default=slides[:layers]),
        ffn=config.prefix_dense_intermediate_size or config.intermediate_size,
        moe=moe,
    )
    forced = config.prefix_dense_sliding_window_pattern == 1
    rotates = tuple(model.has_window(layer) or (forced and not model.is_moe(layer)) for layer in range(layers))
    if config.rms_norm_epsilon is not None:
        model = model.replace(norm="rmsnorm", norm_epsilon=config.rms_norm_epsilon)
    if not any(rotates):
        return model.replace(position="none")
    return model.replace(rope_pattern=() if all(rotates) else find_period(rotates))


def _write_cohere2_moe(model: Model) -> dict[str, Any]:
    """Return the kinds of all layers, and the prefix by which dense layers rotate."""
    assert model.moe is not None
    forced = any(model.has_rope(layer) and not model.has_window(layer) for layer in range(model.layers))
    scaling = model.rope_scaling and decoder.write_scaling(model.rope_scaling)
    return decoder.write_layer_types(model) | {
        **({"rope_parameters": {"rope_theta": model.rope_theta, **scaling}} if scaling else {}),
        "intermediate_size": model.moe.ffn,
        "prefix_dense_intermediate_size": model.ffn,
        "prefix_dense_sliding_window_pattern": 1 if forced else 2,
        "shared_expert_combination_strategy": "sum",
        **({"rms_norm_eps": model.norm_epsilon} if model.norm == "rmsnorm" else {}),
    }


# Command-R and R+; the latter norms queries and keys, with a weight for each head.
COHERE = Family(
    model_type="cohere",
    architecture="CohereForCausalLM",
    keys=KEYS | map_same_names("use_qk_norm"),
    defaults={**DEFAULTS, "rope_theta": 500_000.0},
    to_model=lambda config: _build_command(config, qk_norm="heads" if config.use_qk_norm else "none"),
    interleaved_rotary=True,
)
COHERE2 = Family(
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    keys=KEYS | map_same_names("sliding_window layer_types sliding_window_pattern"),
    defaults={**DEFAULTS, "sliding_window": 4096, "sliding_window_pattern": 4},
    to_model=_build_cohere2,
    interleaved_rotary=True,
)

COHERE2_MOE = Family(
    model_type="cohere2_moe",
    architecture="Cohere2MoeForCausalLM",
    keys=drop_keys(KEYS, "rope_scaling")  # a field of their config, which therefore is no other name of rope_parameters
    | {
        "rms_norm_eps": "rms_norm_epsilon",
        "expert_selection_fn": "scoring_func",
        "num_shared_experts": "n_shared_experts",
    }
    | map_same_names(
        "sliding_window layer_types sliding_window_pattern num_experts num_experts_per_tok norm_topk_prob "
        "first_k_dense_replace mlp_layer_types prefix_dense_sliding_window_pattern prefix_dense_intermediate_size "
        "shared_expert_combination_strategy"
    ),
    defaults={
        **DEFAULTS,
        "head_dim": 128,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        **expand_names(experts=8, topk=2),
        "scoring_func": "softmax",
        "shared_expert_combination_strategy": "average",
    },
    to_model=_build_cohere2_moe,
    write=_write_cohere2_moe,
    tensors=decoder.EXPERT_TENSORS | decoder.SHARED_EXPERT_TENSORS,
    stacked_tensors=decoder.name_stacked_experts(),
    interleaved_rotary=True,
)

COHERE_COMPASS_TEXT = Family(
    model_type="cohere_compass_text",
    architecture="CohereCompassForCausalLM",
    keys=drop_keys(KEYS, "head_dim") | map_same_names("sliding_window layer_types"),
    defaults={**DEFAULTS, "logit_scale": None, "sliding_window": 4096},
    overwritten=("head_dim",),
    to_model=_build_compass,
    write=write_rope_of_layers,
)
WRAPPERS = (Wrapper("cohere_compass", "CohereCompassForConditionalGeneration", text="cohere_compass_text", tied=False),)

"""``Model`` -> the keys of a dense family's ``config.json``: its fields in the words of ``Config``, by the keys it has.

One inverse serves all families: what a family's mapping sets by itself is not written, and reading back decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isclose
from typing import Any

from fivefold.model.huggingface.keys import KEYS
from fivefold.model.huggingface.tables import DENSE
from fivefold.model.shape import RopeScaling
from fivefold.model.spec import Model

_ACTIVATIONS = {"gelu_tanh": "gelu_pytorch_tanh"}


def candidates(model: Model) -> Iterator[str]:
    """The dense families in which ``model`` may be, the likeliest first."""
    likely = "qwen3" if model.qk_norm == "head" else "qwen2" if model.qkv_bias and not model.out_bias else "llama"
    if model.window is not None:
        likely = "mistral"
    if model.block == "sandwich":
        likely = "gemma3_text" if model.qk_norm == "head" else "gemma2"
    yield likely
    yield from (family for family in DENSE if family != likely)


def keys(model: Model, *, family: str) -> dict[str, Any]:
    """The keys of ``family`` that say what ``model`` is; of several names of one key the last that is listed."""
    fields = _fields(model)
    named = {field: key for key, field in KEYS[family].items() if field in fields}
    return {key: fields[field] for field, key in named.items() if fields[field] is not None}


def _fields(model: Model) -> dict[str, Any]:
    """Fields of ``Config``; None: left out."""
    layers, scale = range(model.layers), model.attention_scale or model.head_dim**-0.5
    rates = model.dropout_rates
    slides = tuple(model.slides(layer) for layer in layers)
    alone = model.kv_heads == 1
    return {
        "num_hidden_layers": model.layers,
        "hidden_size": model.width,
        "intermediate_size": model.ffn,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab,
        "max_position_embeddings": model.positions,
        "hidden_act": _ACTIVATIONS.get(model.activation, model.activation),
        "norm_epsilon": model.norm_epsilon,
        "tie_word_embeddings": model.tied_embeddings,
        "attention_bias": model.qkv_bias,
        "mlp_bias": model.mlp_bias,
        "attention_dropout": rates.attention,
        "hidden_dropout": rates.residual,
        "embedding_dropout": rates.embedding,
        "scale_attn_weights": model.attention_scale is None,
        "use_qk_norm": model.qk_norm == "heads",
        "use_parallel_residual": model.block == "parallel",
        "embedding_multiplier": model.embedding_scale,
        "attention_multiplier": scale,
        "residual_multiplier": model.residual_scale,
        "logits_scaling": _whole(1 / model.logit_scale) if model.logit_scale else None,
        "logit_scale": model.logit_scale,
        "no_rope_layers": [int(model.rotates(layer)) for layer in layers],
        "new_decoder_architecture": (grouped := not alone and model.block != "pre"),
        "multi_query": alone,
        "parallel_attn": model.block != "pre",
        "num_ln_in_parallel_attn": (2 if model.block == "parallel" else 1) if grouped else None,
        "rope_theta": model.rope_theta,
        "rope_local_base_freq": model.rope_theta_sliding,
        "partial_rotary_factor": model.rope_fraction,
        "rope_scaling": model.rope_scaling and scaling(model.rope_scaling),
        "original_max_position_embeddings": model.rope_scaling and model.rope_scaling.original_positions,
        "use_sliding_window": any(slides),
        "sliding_window": model.window,
        "layer_types": ["sliding_attention" if each else "full_attention" for each in slides] if any(slides) else None,
        "query_pre_attn_scalar": _whole(scale**-2),
        "attn_logit_softcapping": model.attention_softcap,
        "final_logit_softcapping": model.logit_softcap,
    }


def _whole(value: float) -> float:
    """``value``, or the whole number that it is but for rounding."""
    return round(value) if isclose(value, round(value), rel_tol=1e-12) else value


def scaling(scaling: RopeScaling) -> dict[str, Any]:
    """The keys of ``rope_scaling``."""
    values: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.original_positions:
        values["original_max_position_embeddings"] = scaling.original_positions
    if scaling.kind == "llama3":
        values |= {"low_freq_factor": scaling.low_frequency_factor, "high_freq_factor": scaling.high_frequency_factor}
    if scaling.kind == "longrope":
        lists = {"short_factor": list(scaling.short_factors), "long_factor": list(scaling.long_factors)}
        return values | lists | {"attention_factor": scaling.attention_factor}
    if scaling.kind == "yarn":
        values |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.truncate}
        weights = {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dims}
        if scaling.mscale and scaling.mscale_all_dims:  # they determine attention_factor
            return values | weights
        given = {name: weight for name, weight in weights.items() if weight is not None}
        return values | given | {"attention_factor": scaling.attention_factor}
    return values

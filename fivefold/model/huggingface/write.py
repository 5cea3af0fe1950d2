"""Write a ``Model`` as a Hugging Face ``config.json``, which must read back as the same model.

Generic code computes the fields of ``Config``; a family's record names its keys for them, and writes the keys that only
its class has. All keys are read by both transformers 4 and 5.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import isclose
from typing import Any

from fivefold.errors import UserError
from fivefold.model.activations import ACTIVATIONS
from fivefold.model.experts import MoE
from fivefold.model.huggingface.decoder import write_scaling
from fivefold.model.huggingface.families import FAMILIES
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.keys import nest_tables
from fivefold.model.huggingface.read import from_config
from fivefold.model.latent_attention import MLA
from fivefold.model.multi_token_prediction import MTP
from fivefold.model.norms import NORMS
from fivefold.model.shape import ModelShape
from fivefold.model.spec import Model
from fivefold.record import find_first_difference

ROTARY = ("rope_theta", "rope_theta_sliding", "rope_fraction", "rope_scaling")  # fields that only rotary layers use
# Families that most software can read are tried first, then the others in the order of the registry.
COMMON = ("llama", "qwen2", "qwen3", "mistral", "phi3", "gpt_neox", "starcoder2", "mixtral", "qwen3_moe")


def to_config(model: Model) -> dict[str, Any]:
    """Return the ``config.json`` of ``model`` in a family with the same computation; ``UserError`` if there is none."""
    nearest, fewest = "", None
    for family in _list_candidates(model):
        config = write_config(model, family)
        try:
            written_model = from_config(config, name=model.name)
        except UserError as refusal:
            nearest = nearest or f"; the nearest, {family.model_type}, has {refusal}"
            continue
        field_difference = find_difference(written_model, model)
        if field_difference is None:
            return config
        if fewest is None or _count_differences(written_model, model) < fewest:
            fewest = _count_differences(written_model, model)
            nearest = f"; the nearest, {family.model_type}, has {field_difference}"
    raise UserError(f"model {model.name!r}: no Hugging Face architecture can represent it{nearest}")


def _list_candidates(model: Model) -> Iterator[Family]:
    """Yield the families with the model's kinds of attention and feed-forward, the most common first."""
    for model_type in dict.fromkeys((*COMMON, *FAMILIES)):
        family = FAMILIES[model_type]
        latent, routed = model.mla is not None, model.moe is not None
        may_route = family.has_experts == routed or latent or (family.may_lack_experts and not routed)
        if not family.is_part and family.has_latent_attention == latent and may_route:
            yield family


def _count_differences(first: Model, second: Model) -> int:
    """Count the fields, including those of nested records, in which two models compute differently."""
    flat_models = [_flatten(_normalize(model).model_dump()) for model in (first, second)]
    return sum(flat_models[0].get(field) != flat_models[1].get(field) for field in flat_models[0] | flat_models[1])


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in values.items():
        fields |= _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return fields


def write_config(model: Model, family: Family) -> dict[str, Any]:
    """Return the ``config.json`` of ``family`` that comes nearest to ``model``."""
    fields = _list_fields(model)
    key_by_field = {field: key for key, field in family.keys.items() if field in fields}  # of aliases the last
    keys = {key: fields[field] for field, key in key_by_field.items() if fields[field] is not None}
    config = {"architectures": [family.architecture], "model_type": family.model_type} | keys | family.write(model)
    return nest_tables(config) if family.tables else config


def find_difference(actual: Model, expected: Model) -> str | None:
    """Return the first field in which two models compute differently, with both values; None if there is none.

    Settings of training (auxiliary loss, capacity, dropout), names and the maximum sequence length are ignored, and so
    are vision towers, because only the text model is written.
    """
    actual = _normalize(actual.replace(vision=None) if actual.vision else actual)
    expected = _normalize(expected.replace(vision=None) if expected.vision else expected)
    if actual.moe and expected.moe and "free" not in (actual.moe.balance, expected.moe.balance):
        actual = actual.replace(moe=actual.moe.replace(balance=expected.moe.balance))
    return find_first_difference(actual, expected)


@lru_cache(maxsize=256)
def _normalize(model: Model) -> Model:
    """Return ``model`` with neutral values in fields that do not change the logits."""
    default_scale = model.head_dim**-0.5
    if model.mla is not None:
        default_scale = (model.mla.nope_dim + model.mla.rope_dim) ** -0.5
        model = model.replace(kv_heads=1, head_dim=1)  # latent attention uses neither
    scale = model.attention_scale
    moe = model.moe and model.moe.replace(
        aux_coefficient=0.0,
        capacity=None,
        shared_ffn=(model.moe.shared_ffn or model.moe.ffn) if model.moe.shared_experts else None,
    )
    rotates = [model.has_rope(layer) for layer in range(model.layers)]
    slides = [model.has_window(layer) for layer in range(model.layers)]
    has_mlp = any(map(model.has_mlp, range(model.layers + model.mtp_depth)))
    # a layer without attention rotates nothing, whatever the pattern says of it
    patterned = tuple(rotates[layer] or not model.has_attention(layer) for layer in range(model.layers))
    if not any(rotates):
        default_fields = {field: ModelShape.model_fields[field].default for field in ROTARY}
        model = model.replace(position="none" if model.position == "rope" else model.position, **default_fields)
    if model.rope_theta_sliding and all(slides[layer] for layer in range(model.layers) if rotates[layer]):
        model = model.replace(rope_theta=model.rope_theta_sliding, rope_theta_sliding=None, rope_scaling=None)
    return model.replace(
        name="",
        source="",
        repository="",
        quantization="",
        double_quantization=True,
        unquantized=(),
        ffn=model.ffn if has_mlp else 1,
        dropout=0.0,
        attention_dropout=None,
        embedding_dropout=None,
        moe=moe,
        mamba2=model.mamba2 and model.mamba2.replace(chunk=1),
        lightning=model.lightning and model.lightning.replace(chunk=1),
        norm_bias=NORMS[model.norm].has_bias and model.norm_bias and model.norm_weight,
        window_kind=model.window_kind if any(slides) else "sliding",
        temperature=model.temperature if any(map(model.has_temperature, range(model.layers))) else None,
        positions=model.positions if model.position == "learned" else 1,
        mtp=model.mtp and MTP(depth=model.mtp.depth),
        rope_pattern=() if all(patterned) or not any(rotates) else patterned,
        window=model.window if any(slides) else None,
        window_pattern=() if all(slides) or not any(slides) else tuple(slides),
        attention_scale=None if scale is None or isclose(scale, default_scale, rel_tol=1e-12) else scale,
    )


def _list_fields(model: Model) -> dict[str, Any]:
    """Return the fields of ``Config`` that describe ``model``; those that are None are not written."""
    layers = range(model.layers)
    scale = model.attention_scale or model.head_dim**-0.5
    rates = model.dropout_rates
    scaling = model.rope_scaling
    slides = tuple(model.has_window(layer) for layer in layers)
    return {
        "num_hidden_layers": model.layers,
        "hidden_size": model.width,
        "intermediate_size": model.ffn,
        "intermediate_size_mlp": model.ffn,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "v_head_dim": model.value_dim or model.head_dim,
        "vocab_size": model.vocab,
        "max_position_embeddings": model.positions,
        "hidden_act": next(iter(ACTIVATIONS[model.activation].huggingface), None),
        "norm_epsilon": model.norm_epsilon,
        "tie_word_embeddings": model.tied_embeddings,
        "attention_bias": model.qkv_bias,
        "attention_out_bias": model.out_bias,
        "mlp_bias": model.mlp_bias,
        "attention_dropout": rates.attention,
        "hidden_dropout": rates.residual,
        "embedding_dropout": rates.embedding,
        "scale_attn_weights": model.attention_scale is None,
        "use_qk_norm": model.qk_norm == "heads",
        "qkv_clip": model.qkv_clip,
        "value_scale": model.value_scale,
        "head_bias": model.head_bias,
        "use_post_norm": model.block == "sandwich",
        "use_parallel_residual": model.block == "parallel",
        "embedding_multiplier": model.embedding_scale,
        "attention_multiplier": scale,
        "residual_multiplier": model.residual_scale,
        "logits_scaling": _round_to_int(1 / model.logit_scale) if model.logit_scale else None,
        "logit_scale": model.logit_scale,
        "no_rope_layers": [int(model.has_rope(layer)) for layer in layers],
        "rope_theta": model.rope_theta,
        "layer_rope_theta": [_find_theta(model, layer) for layer in layers],
        "rotary_dim": model.rope_dim,
        "rope_local_base_freq": model.rope_theta_sliding,
        "partial_rotary_factor": model.rope_fraction,
        "rope_scaling": scaling and write_scaling(scaling),
        # transformers 4 reads it here for longrope, and in rope_scaling for other kinds
        "original_max_position_embeddings": scaling.original_positions
        if scaling and scaling.kind == "longrope"
        else None,
        "use_sliding_window": any(slides),
        "sliding_window": model.window,
        "layer_types": ["sliding_attention" if sliding else "full_attention" for sliding in slides]
        if any(slides)
        else None,
        "query_pre_attn_scalar": _round_to_int(scale**-2),
        "attn_logit_softcapping": model.attention_softcap,
        "final_logit_softcapping": model.logit_softcap,
        "num_nextn_predict_layers": model.mtp_depth,
        **(_list_latent_fields(model.mla) if model.mla else {}),
        **(_list_expert_fields(model, model.moe) if model.moe else {}),
    }


def _find_theta(model: Model, layer: int) -> float:
    """Return the rotary base of ``layer``; 0 if it does not rotate."""
    theta = model.rope_theta_sliding if model.has_window(layer) and model.rope_theta_sliding else model.rope_theta
    return theta if model.has_rope(layer) else 0.0


def _list_latent_fields(mla: MLA) -> dict[str, Any]:
    return {
        "kv_lora_rank": mla.kv_rank,
        "qk_nope_head_dim": mla.nope_dim,
        "qk_rope_head_dim": mla.rope_dim,
        "v_head_dim": mla.v_dim,
        "rope_interleave": True,
    }


def _list_expert_fields(model: Model, moe: MoE) -> dict[str, Any]:
    """Return the keys of experts, under every name that a family may use."""
    routed = [model.is_moe(layer) for layer in range(model.layers)]
    return {
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.topk,
        "moe_intermediate_size": moe.ffn,
        "moe_latent_size": moe.latent_width,
        "n_shared_experts": moe.shared_experts,
        "shared_expert_intermediate_size": moe.shared_width,
        "first_k_dense_replace": moe.dense_layers,
        "mlp_only_layers": [layer for layer, routes in enumerate(routed) if not routes],
        "mlp_layer_types": ["sparse" if routes else "dense" for routes in routed],
        "router_aux_loss_coef": moe.aux_coefficient,
        "aux_loss_alpha": moe.aux_coefficient,
        "router_jitter_noise": moe.jitter,
        "norm_topk_prob": moe.normalized,
        "routed_scaling_factor": moe.scaling,
        "scoring_func": moe.score,
        "n_group": moe.groups,
        "topk_group": moe.topk_groups,
    }


def _round_to_int(value: float) -> float:
    """Round ``value`` if it differs from an integer only by rounding errors."""
    return round(value) if isclose(value, round(value), rel_tol=1e-12) else value

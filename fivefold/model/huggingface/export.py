"""``Model`` -> Hugging Face ``config.json``: the inverse of ``families.py``, which must read back the same model.

Uses keys that transformers 4 and 5 both read. If no family can represent the model, a ``Mistake`` names a field.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isclose
from typing import Any

from fivefold.model.huggingface.families import FAMILIES, from_config
from fivefold.model.huggingface.tables import DENSE
from fivefold.model.huggingface.write import candidates, keys, scaling
from fivefold.model.shape import MTP, ModelShape, MoE
from fivefold.model.spec import Model
from fivefold.record import Mistake, difference

ROTARY = ("rope_theta", "rope_theta_sliding", "rope_fraction", "rope_scaling")  # fields of rotary layers alone
FURTHER = ("deepseek_v3", "glm4_moe")  # families with multi-token prediction


def to_config(model: Model) -> dict[str, Any]:
    """The ``config.json`` of ``model`` in a family with the same computation; ``Mistake`` if there is none."""
    families = candidates(model) if model.moe is None and model.mla is None else iter([_family(model)])
    said = ""
    for family in families:
        config = _config(model, family=family)
        try:
            found = differs(from_config(config, name=model.name), model)
        except Mistake as refusal:
            found = str(refusal)
        if found is None:
            return config
        said = said or f"the nearest, {family}, has {found}"
    raise Mistake(f"model {model.name!r}: no family of Hugging Face holds it; {said}")


def _config(model: Model, *, family: str) -> dict[str, Any]:
    """The ``config.json`` of ``family`` that comes nearest to ``model``."""
    if family in DENSE:
        about = {"architectures": [FAMILIES[family].architecture], "model_type": family}
        return about | keys(model, family=family)
    return {
        "architectures": [FAMILIES[family].architecture],
        "model_type": family,
        "num_hidden_layers": model.layers,
        "hidden_size": model.width,
        "intermediate_size": model.ffn,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab,
        "max_position_embeddings": model.positions,
        "hidden_act": "silu",  # in all these families
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rope_theta,
        "tie_word_embeddings": model.tied_embeddings,
        "attention_bias": model.out_bias,
        "attention_dropout": model.dropout_rates.attention,
        **({"rope_scaling": scaling(model.rope_scaling)} if model.rope_scaling else {}),
        **({"mlp_bias": model.mlp_bias} if family == "deepseek_v2" else {}),
        **(_experts(model.moe, family=family) if model.moe else {}),
        **(_latent(model) if model.mla else {}),
        **(OWN[family](model) if family in OWN else {}),
        **({"num_nextn_predict_layers": model.predicted} if family in FURTHER else {}),
    }


def differs(there: Model, here: Model) -> str | None:
    """The first field in which two models compute differently, with both values.

    Ignores what only training uses (auxiliary loss, capacity, dropout), names and the maximal sequence length.
    """
    there, here = _normalized(there), _normalized(here)
    if there.moe and here.moe and "free" not in (there.moe.balance, here.moe.balance):
        there = there.replace(moe=there.moe.replace(balance=here.moe.balance))
    return difference(there, here)


def _normalized(model: Model) -> Model:
    """``model`` with neutral values in fields that do not change the logits."""
    plain = model.head_dim**-0.5
    if model.mla is not None:
        plain = (model.mla.nope_dim + model.mla.rope_dim) ** -0.5
        model = model.replace(kv_heads=1, head_dim=1)  # latent attention uses neither
    scale = model.attention_scale
    moe = model.moe and model.moe.replace(
        aux_coefficient=0.0, capacity=None, shared_ffn=model.moe.shared_ffn or model.moe.ffn
    )
    turns = [model.rotates(layer) for layer in range(model.layers)]
    slides = [model.slides(layer) for layer in range(model.layers)]
    if not any(turns):
        still = {field: ModelShape.model_fields[field].default for field in ROTARY}
        model = model.replace(position="none" if model.position == "rope" else model.position, **still)
    return model.replace(
        name="", source="", dropout=0.0, attention_dropout=None, embedding_dropout=None, moe=moe,
        norm_bias=model.norm == "layernorm" and model.norm_bias,
        window_kind=model.window_kind if any(slides) else "sliding",
        temperature=model.temperature if any(map(model.tempers, range(model.layers))) else None,
        positions=model.positions if model.position == "learned" else 1, mtp=model.mtp and MTP(depth=model.mtp.depth),
        rope_pattern=() if all(turns) or not any(turns) else tuple(turns),
        window=model.window if any(slides) else None,
        window_pattern=() if all(slides) or not any(slides) else tuple(slides),
        attention_scale=None if scale is None or isclose(scale, plain, rel_tol=1e-12) else scale,
    )  # fmt: skip


def _family(model: Model) -> str:
    """The family with experts or latent attention whose operations could be the model's."""
    if model.mla is not None:
        return "deepseek_v2" if model.moe and model.moe.score == "softmax" else "deepseek_v3"
    if model.attention_sinks:
        return "gpt_oss"
    if model.moe is not None and model.moe.weighs == "inputs":
        return "llama4_text"
    if model.moe is not None and model.moe.score == "sigmoid":
        return "minimax_m2" if model.qk_norm == "full" else "glm4_moe"
    if model.qk_norm == "head":
        return "qwen3_moe"
    factors = (model.embedding_scale, model.residual_scale, model.logit_scale, model.attention_scale or 1)
    return "mixtral" if factors == (1, 1, 1, 1) else "granitemoe"


def _experts(moe: MoE, *, family: str) -> dict[str, Any]:
    values: dict[str, Any] = {"num_experts_per_tok": moe.topk}
    if family == "llama4_text":
        return values | {"num_local_experts": moe.experts, "intermediate_size": moe.ffn}
    if family in ("mixtral", "granitemoe", "minimax_m2", "gpt_oss"):
        return values | {"num_local_experts": moe.experts, "router_aux_loss_coef": moe.aux_coefficient}
    values |= {"moe_intermediate_size": moe.ffn, "norm_topk_prob": moe.normalized}
    if family == "qwen3_moe":
        dense = {"mlp_only_layers": list(range(moe.dense_layers)), "decoder_sparse_step": 1}
        return values | dense | {"num_experts": moe.experts, "router_aux_loss_coef": moe.aux_coefficient}
    grouped = "group_limited_greedy" if moe.groups > 1 else "greedy"
    return values | {
        "n_routed_experts": moe.experts,
        "n_shared_experts": moe.shared_experts,
        "first_k_dense_replace": moe.dense_layers,
        "routed_scaling_factor": moe.scaling,
        "n_group": moe.groups,
        "topk_group": moe.topk_groups,
        "scoring_func": moe.score,
        "topk_method": "noaux_tc" if family == "deepseek_v3" else grouped,
        "aux_loss_alpha": moe.aux_coefficient,
    }


def _glm4_moe(model: Model) -> dict[str, Any]:
    return {
        "attention_bias": model.qkv_bias, "use_qk_norm": model.qk_norm == "head",
        "partial_rotary_factor": model.rope_fraction,
    }  # fmt: skip


def _gpt_oss(model: Model) -> dict[str, Any]:
    kinds = {True: "sliding_attention", False: "full_attention"}
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta}}  # a missing key means YaRN
    return {
        "sliding_window": model.window, "layer_types": [kinds[model.slides(layer)] for layer in range(model.layers)],
        **({} if model.rope_scaling else plain),
    }  # fmt: skip


def _llama4(model: Model) -> dict[str, Any]:
    layers, heat = range(model.layers), model.temperature
    kinds = {True: "chunked_attention", False: "full_attention"}
    return {
        "intermediate_size_mlp": model.ffn, "use_qk_norm": model.qk_norm == "unit",
        "moe_layers": [layer for layer in layers if model.is_moe(layer)],
        "no_rope_layers": [int(model.rotates(layer)) for layer in layers],
        "layer_types": [kinds[model.slides(layer)] for layer in layers],
        "attention_chunk_size": model.window or 8192, "attn_temperature_tuning": heat is not None,
        **({"attn_scale": heat.scale, "floor_scale": heat.floor} if heat else {}),
    }  # fmt: skip


# Keys of a family alone.
OWN: dict[str, Callable[[Model], dict[str, Any]]] = {
    "glm4_moe": _glm4_moe,
    "minimax_m2": lambda model: {"rotary_dim": model.rope_dim},
    "gpt_oss": _gpt_oss,
    "llama4_text": _llama4,
    "granitemoe": lambda model: keys(model, family="granitemoe"),
}


def _latent(model: Model) -> dict[str, Any]:
    assert model.mla is not None
    return {
        "q_lora_rank": model.mla.q_rank,
        "kv_lora_rank": model.mla.kv_rank,
        "qk_nope_head_dim": model.mla.nope_dim,
        "qk_rope_head_dim": model.mla.rope_dim,
        "v_head_dim": model.mla.v_dim,
        "num_key_value_heads": model.heads,
        "head_dim": model.mla.rope_dim,  # transformers' convention; others ignore it
        "rope_interleave": True,
    }

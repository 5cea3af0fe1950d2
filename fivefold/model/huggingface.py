"""Hugging Face ``config.json`` -> ``Model``: one small mapping per family, defaults of missing keys as data.

A family with a feature that ``Model`` cannot hold is refused with the missing operation; nothing is guessed.
Source: configuration and modelling code of transformers 5.23, against which the tests count every family.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fivefold.model.huggingface_config import (
    Config,
    activation,
    dropout,
    head_dim,
    read_config,
    rope,
    windows,
    yarn_mscale,
)
from fivefold.model.huggingface_defaults import DEFAULTS
from fivefold.model.spec import Model
from fivefold.record import Mistake


def from_config(config: dict[str, Any], *, name: str, source: str = "") -> Model:
    """The model that a ``config.json`` describes.

    ``config`` is the file's dictionary, of any transformers version; ``name`` the model's name in messages.
    Raises ``Mistake`` for an unknown architecture and for what cannot be represented.
    """
    kind = model_type(config, name=name)
    family = FAMILIES[kind]
    values = _text_config(config, name=name) if family.wrapper else config
    model = family.mapping(read_config(values, defaults=DEFAULTS[kind], name=name))
    return model.replace(source=source or f"Hugging Face config.json, {family.architecture}")


def model_type(config: dict[str, Any], *, name: str) -> str:
    """The family, by ``architectures`` where given (remote code may carry a ``model_type`` of its own)."""
    architectures = config.get("architectures")
    if isinstance(architectures, list) and architectures:
        wanted, known = str(architectures[0]), {family.architecture: kind for kind, family in FAMILIES.items()}
    else:
        wanted, known = str(config.get("model_type")), {kind: kind for kind in FAMILIES}
    if wanted not in known:
        raise Mistake(f"{name}: architecture {wanted!r} is not known; known: {', '.join(sorted(known))}")
    return known[wanted]


def _text_config(config: dict[str, Any], *, name: str) -> dict[str, Any]:
    """The language model within a multimodal one."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise Mistake(f"{name}: a multimodal config without a text_config table")
    return {"tie_word_embeddings": config.get("tie_word_embeddings", True), **text}


def _model(config: Config, **fields: Any) -> Model:
    """What all families share, with ``fields`` over it."""
    shared = {
        "name": config.name,
        "layers": config.num_hidden_layers,
        "width": config.hidden_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads or config.num_attention_heads,
        "head_dim": head_dim(config),
        "ffn": config.intermediate_size,
        "vocab": config.vocab_size,
        "positions": config.max_position_embeddings,
        "norm_epsilon": config.norm_epsilon,
        "activation": activation(config),
        "dropout": dropout(config),
        "tied_embeddings": config.tie_word_embeddings,
    }
    return Model.read({**shared, **fields}, origin=config.name)


def _attention_bias(config: Config) -> dict[str, bool]:
    return {"qkv_bias": config.attention_bias, "out_bias": config.attention_bias}


def _llama(config: Config) -> Model:
    return _model(config, **rope(config), **_attention_bias(config), mlp_bias=config.mlp_bias)


def _mistral(config: Config) -> Model:
    return _model(config, **rope(config), **windows(config))


def _mixtral(config: Config) -> Model:
    # The softmax over the chosen logits is the softmax over all of them, rescaled to sum to one.
    moe = {
        "experts": config.num_experts,
        "topk": config.num_experts_per_tok,
        "ffn": config.intermediate_size,
        "aux_coefficient": config.router_aux_loss_coef,
    }
    return _model(config, **rope(config), **windows(config), moe=moe)


def _late_windows(config: Config) -> dict[str, Any]:
    """Qwen: the layers from ``max_window_layers`` on slide."""
    layers = range(config.num_hidden_layers)
    return windows(config, default=tuple(layer >= config.max_window_layers for layer in layers))


def _qwen2(config: Config) -> Model:
    return _model(config, **rope(config), **_late_windows(config), qkv_bias=True)


def _qwen3(config: Config) -> Model:
    return _model(config, **rope(config), **_late_windows(config), **_attention_bias(config), qk_norm="head")


def _qwen3_moe(config: Config) -> Model:
    dense = sorted(config.mlp_only_layers or ())
    if dense != list(range(len(dense))):
        raise config.mistake(f"mlp_only_layers={dense} needs dense layers after experts, which is not supported")
    moe = {
        "experts": config.num_experts,
        "topk": config.num_experts_per_tok,
        "ffn": config.moe_intermediate_size,
        "dense_layers": len(dense),
        "aux_coefficient": config.router_aux_loss_coef,
        "normalized": config.norm_topk_prob,
    }
    return _model(config, **rope(config), **windows(config), **_attention_bias(config), qk_norm="head", moe=moe)


def _gemma(config: Config, *, slides: tuple[bool, ...], **fields: Any) -> Model:
    return _model(
        config,
        **rope(config),
        **windows(config, default=slides),
        **_attention_bias(config),
        norm_plus_one=True,
        block="sandwich",
        attention_scale=config.query_pre_attn_scalar**-0.5,
        logit_softcap=config.final_logit_softcapping,
        embedding_scale=config.hidden_size**0.5,
        **fields,
    )


def _gemma2(config: Config) -> Model:
    return _gemma(config, slides=(True, False), attention_softcap=config.attn_logit_softcapping)


def _gemma3(config: Config) -> Model:
    if config.attn_logit_softcapping is not None:
        raise config.mistake("attn_logit_softcapping in Gemma 3, whose code does not apply it, is not supported")
    slides = (*(True,) * (config.sliding_window_pattern - 1), False)
    return _gemma(config, slides=slides, qk_norm="head")


def _phi3(config: Config) -> Model:
    # The file holds q, k, v and gate, up as two fused matrices: the same weights. "yarn" was an early name of longrope.
    return _model(config, **rope(config, longrope=("longrope", "su", "yarn")), **windows(config))


def _gpt2(config: Config) -> Model:
    return _model(
        config,
        norm="layernorm",
        mlp="plain",
        mlp_bias=True,
        ffn=config.intermediate_size or 4 * config.hidden_size,
        kv_heads=config.num_attention_heads,
        position="learned",
        qkv_bias=True,
        out_bias=True,
        attention_scale=None if config.scale_attn_weights else 1.0,
    )


def _gpt_neox(config: Config) -> Model:
    fields = {"norm": "layernorm", "mlp": "plain", "mlp_bias": True, "kv_heads": config.num_attention_heads}
    block = "parallel" if config.use_parallel_residual else "pre"
    return _model(config, **rope(config), **_attention_bias(config), **fields, block=block)


def _nemotron(config: Config) -> Model:
    fields = {"norm": "layernorm", "norm_plus_one": True, "mlp": "plain", "mlp_bias": config.mlp_bias}
    return _model(config, **rope(config), **_attention_bias(config), **fields)


def _deepseek(config: Config, *, score: str, method: tuple[str, ...], moe: dict[str, Any]) -> Model:
    if config.scoring_func not in (None, score):
        raise config.mistake(f"scoring_func={config.scoring_func!r} is not supported in this family; only {score!r}")
    if config.topk_method not in (None, *method):
        raise config.mistake(f"topk_method={config.topk_method!r} is not supported; supported: {', '.join(method)}")
    experts = {
        "experts": config.num_experts,
        "topk": config.num_experts_per_tok,
        "ffn": config.moe_intermediate_size,
        "shared_experts": config.n_shared_experts or 0,
        "dense_layers": config.first_k_dense_replace,
        "score": score,
        "scaling": config.routed_scaling_factor,
    }
    mla = {
        "q_rank": config.q_lora_rank,
        "kv_rank": config.kv_lora_rank,
        "nope_dim": config.qk_nope_head_dim,
        "rope_dim": config.qk_rope_head_dim,
        "v_dim": config.v_head_dim,
    }
    qk_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    rotary = rope(config)
    scaling = rotary["rope_scaling"] or {"mscale_all_dims": None}
    weight = scaling["mscale_all_dims"]
    sharper = yarn_mscale(scaling["factor"], weight=weight) if weight else 1.0
    return _model(
        config,
        **rotary,
        **_attention_bias(config),
        mlp_bias=config.mlp_bias,
        kv_heads=config.num_attention_heads,
        head_dim=qk_dim,
        attention_scale=sharper**2 / qk_dim**0.5,
        mla=mla,
        moe=experts | moe,
    )


def _deepseek_v2(config: Config) -> Model:
    if config.norm_topk_prob:
        raise config.mistake("norm_topk_prob=true differs between codes of DeepSeek-V2 and is not supported")
    grouped = config.topk_method == "group_limited_greedy"
    moe = {
        "aux_coefficient": config.aux_loss_alpha or 0.0,
        "normalized": False,
        "groups": config.n_group if grouped else 1,
        "topk_groups": config.topk_group if grouped else 1,
    }
    return _deepseek(config, score="softmax", method=("greedy", "group_limited_greedy"), moe=moe)


def _deepseek_v3(config: Config) -> Model:
    # The balancing bias e_score_correction_bias is no weight: a buffer in transformers 5.23, moved by the load and
    # not by gradients. We do not count it, nor the multi-token-prediction module, which the reference leaves out.
    # Rotary dims interleave in the file and are halves with us: an order of rows, not another operation.
    moe = {
        "balance": "free",
        "aux_coefficient": config.aux_loss_alpha or 0.0,
        "normalized": config.norm_topk_prob,
        "groups": config.n_group or 1,
        "topk_groups": config.topk_group or 1,
    }
    return _deepseek(config, score="sigmoid", method=("noaux_tc",), moe=moe)


def _olmo2(config: Config) -> Model:
    return _model(config, **rope(config), **_attention_bias(config), block="post", qk_norm="full")


def _gpt_oss(config: Config) -> Model:
    moe = {
        "experts": config.num_experts,
        "topk": config.num_experts_per_tok,
        "ffn": config.intermediate_size,
        "aux_coefficient": config.router_aux_loss_coef,
        "router_bias": True,
        "expert_bias": True,
    }
    fields = {"activation": "clamped_swiglu", "attention_sinks": True, "moe": moe}
    return _model(config, **rope(config), **windows(config, default=(True, False)), **_attention_bias(config), **fields)


class Family(NamedTuple):
    """One ``model_type``: its class in transformers and our mapping."""

    architecture: str
    mapping: Callable[[Config], Model]
    wrapper: bool = False  # a multimodal model, of which we take ``text_config``


FAMILIES = {
    "llama": Family("LlamaForCausalLM", _llama),
    "mistral": Family("MistralForCausalLM", _mistral),
    "mixtral": Family("MixtralForCausalLM", _mixtral),
    "qwen2": Family("Qwen2ForCausalLM", _qwen2),
    "qwen3": Family("Qwen3ForCausalLM", _qwen3),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", _qwen3_moe),
    "gemma2": Family("Gemma2ForCausalLM", _gemma2),
    "gemma3_text": Family("Gemma3ForCausalLM", _gemma3),
    "gemma3": Family("Gemma3ForConditionalGeneration", _gemma3, wrapper=True),
    "phi3": Family("Phi3ForCausalLM", _phi3),
    "gpt2": Family("GPT2LMHeadModel", _gpt2),
    "gpt_neox": Family("GPTNeoXForCausalLM", _gpt_neox),
    "nemotron": Family("NemotronForCausalLM", _nemotron),
    "kimi_k2": Family("DeepseekV3ForCausalLM", _deepseek_v3),
    "deepseek_v2": Family("DeepseekV2ForCausalLM", _deepseek_v2),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", _deepseek_v3),
    "olmo2": Family("Olmo2ForCausalLM", _olmo2),
    "gpt_oss": Family("GptOssForCausalLM", _gpt_oss),
}

"""The keys of a Hugging Face ``config.json`` that each family reads, and what happens to all others.

    KEYS       read by the family's code and by us: becomes a field of ``Config``
    REFUSED    read by the family's code, but ``Model`` cannot represent it: ``Mistake`` unless it has a neutral value
    HARMLESS   not read by the family's code and changes no logits: ignored; other unread keys give one remark

Source: transformers 5.23, against which ``tests/model/test_families.py`` checks every key of every family.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from fivefold.model.huggingface.defaults import DEFAULTS
from fivefold.record import Mistake


def _same(text: str) -> dict[str, str]:
    return {key: key for key in text.split()}


_SIZES = _same(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads max_position_embeddings "
    "tie_word_embeddings attention_dropout"
)
_ROTARY = _same("rope_theta rope_scaling rope_parameters original_max_position_embeddings")
# Stored with every family's rotary parameters, but applied only by families that rotate a part of the head.
_UNREAD = "unread_rotary_factor"
_WHOLE = {"partial_rotary_factor": _UNREAD}
_GROUPED = _SIZES | _ROTARY | _WHOLE | _same("num_key_value_heads head_dim") | {"rms_norm_eps": "norm_epsilon"}
_DECODER = _GROUPED | _same("hidden_act")
_GEMMA = (
    _GROUPED
    | {"hidden_activation": "hidden_act"}
    | _same(
        "attention_bias query_pre_attn_scalar sliding_window layer_types attn_logit_softcapping final_logit_softcapping"
    )
)
_EXPERTS = _same("num_experts num_experts_per_tok router_aux_loss_coef") | {"num_local_experts": "num_experts"}
_LATE_WINDOWS = _same("use_sliding_window sliding_window max_window_layers layer_types")
_DEEPSEEK = _DECODER | _same(
    "attention_bias q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim num_experts_per_tok "
    "moe_intermediate_size n_shared_experts first_k_dense_replace routed_scaling_factor n_group topk_group "
    "topk_method scoring_func norm_topk_prob aux_loss_alpha rope_interleave"
)
_MTP = dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers"), "num_nextn_predict_layers")
_DEEPSEEK_V3 = _DEEPSEEK | {"n_routed_experts": "num_experts", "num_local_experts": "num_experts"} | _MTP

_GRANITE = _DECODER | _same(
    "attention_bias embedding_multiplier attention_multiplier residual_multiplier logits_scaling"
)
_LAYER_NORMED = {key: field for key, field in _DECODER.items() if key != "rms_norm_eps"}
_COMMAND = _LAYER_NORMED | {"layer_norm_eps": "norm_epsilon"} | _same("attention_bias logit_scale")
_FALCON = {
    key: field
    for key, field in (_SIZES | _ROTARY | _WHOLE).items()
    if key not in ("intermediate_size", "attention_dropout")
}

# family: {config key: field of ``Config``}; keys of one field are aliases
KEYS: dict[str, dict[str, str]] = {
    "llama": _DECODER | _same("attention_bias mlp_bias"),
    "internlm3": _DECODER | _same("attention_bias mlp_bias") | {"qkv_bias": "attention_bias", "bias": "mlp_bias"},
    "iquestcoder": _DECODER | _same("attention_bias mlp_bias"),
    "mistral": _DECODER | _same("sliding_window"),
    "mixtral": _DECODER | _EXPERTS | _same("sliding_window"),
    "qwen2": _DECODER | _LATE_WINDOWS,
    "qwen2_5_vl_text": {key: field for key, field in _DECODER.items() if key != "head_dim"} | _LATE_WINDOWS,
    "qwen3": _DECODER | _LATE_WINDOWS | _same("attention_bias"),
    "qwen3_moe": _DECODER
    | _EXPERTS
    | _same("attention_bias use_sliding_window sliding_window moe_intermediate_size norm_topk_prob mlp_only_layers"),
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA | _same("rope_local_base_freq sliding_window_pattern"),
    "phi3": _DECODER | _same("partial_rotary_factor sliding_window") | {"resid_pdrop": "hidden_dropout"},
    "gpt2": {key: field for key, field in _SIZES.items() if key not in ("intermediate_size", "attention_dropout")}
    | {
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "n_positions": "max_position_embeddings",
        "activation_function": "hidden_act",
        "layer_norm_epsilon": "norm_epsilon",
        "attn_pdrop": "attention_dropout",
        "resid_pdrop": "hidden_dropout",
        "embd_pdrop": "embedding_dropout",
    }
    | _same("scale_attn_weights"),
    "gpt_neox": _SIZES
    | {key: field for key, field in _ROTARY.items() if key != "rope_theta"}
    | {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor", "layer_norm_eps": "norm_epsilon"}
    | _same("hidden_act head_dim attention_bias hidden_dropout use_parallel_residual"),
    "nemotron": _LAYER_NORMED | {"norm_eps": "norm_epsilon"} | _same("partial_rotary_factor attention_bias mlp_bias"),
    "deepseek_v2": _DEEPSEEK | {"n_routed_experts": "num_experts", "num_experts": "num_experts"} | _same("mlp_bias"),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "olmo2": _DECODER | _same("attention_bias"),
    "granite": _GRANITE | _same("mlp_bias"),
    "granitemoe": _GRANITE | _same("num_experts_per_tok router_aux_loss_coef") | {"num_local_experts": "num_experts"},
    "starcoder2": _LAYER_NORMED
    | {"norm_epsilon": "norm_epsilon", "use_bias": "attention_bias", "residual_dropout": "hidden_dropout"}
    | _same("sliding_window embedding_dropout"),
    "glm": _DECODER | _same("partial_rotary_factor attention_bias"),
    "glm4": _DECODER | _same("partial_rotary_factor attention_bias"),
    "smollm3": _DECODER
    | _same(
        "attention_bias mlp_bias use_sliding_window sliding_window layer_types no_rope_layers no_rope_layer_interval"
    ),
    "cohere": _COMMAND | _same("use_qk_norm"),
    "cohere2": _COMMAND | _same("sliding_window layer_types sliding_window_pattern"),
    "falcon": {"n_embed": "hidden_size"}
    | _FALCON
    | _same("new_decoder_architecture multi_query parallel_attn num_ln_in_parallel_attn")
    | {
        "ffn_hidden_size": "intermediate_size",
        "num_kv_heads": "num_key_value_heads",
        "activation": "hidden_act",
        "bias": "attention_bias",
        "layer_norm_epsilon": "norm_epsilon",
    },
    "glm4_moe": _DECODER
    | {"n_routed_experts": "num_experts", "num_local_experts": "num_experts"}
    | _MTP
    | _same(
        "partial_rotary_factor attention_bias use_qk_norm num_experts_per_tok moe_intermediate_size n_shared_experts "
        "first_k_dense_replace routed_scaling_factor n_group topk_group norm_topk_prob"
    ),
    "llama4_text": _DECODER
    | {"num_local_experts": "num_experts"}
    | _same(
        "intermediate_size_mlp num_experts_per_tok moe_layers interleave_moe_layer_step use_qk_norm no_rope_layers "
        "no_rope_layer_interval attention_chunk_size layer_types attn_temperature_tuning floor_scale attn_scale "
        "router_aux_loss_coef "  # which its class does not apply
        "attention_bias"
    ),
    "minimax_m2": _DECODER | _EXPERTS | _same("partial_rotary_factor rotary_dim"),
    "gpt_oss": _GROUPED | _EXPERTS | _same("attention_bias sliding_window layer_types"),
}


class Only(NamedTuple):
    """The supported values of a key, and the operation that any other value would need."""

    values: tuple[Any, ...]
    operation: str


_LAYER_FREQUENCY = Only((1,), "experts in every n-th layer only")
_GEMMA_REFUSED = {"use_bidirectional_attention": Only((False, None), "attention that is not causal")}
_DEEPSEEK_REFUSED = {"moe_layer_freq": _LAYER_FREQUENCY}  # read by the family's published code
# family, or "" for all: {key: supported values}
REFUSED: dict[str, dict[str, Only]] = {
    "": {
        "is_causal": Only((True,), "attention that is not causal"),
        "per_layer_config": Only((None, {}), "layers that differ from each other"),
    },
    "iquestcoder": {
        "clip_qkv": Only((None,), "queries, keys and values that are clipped"),
        "use_sliding_window": Only((False, None), "a sliding window, which the family's code refuses"),
    },
    "mixtral": {"router_jitter_noise": Only((0,), "noise on the router's input")},
    "minimax_m2": {"router_jitter_noise": Only((0,), "noise on the router's input")},
    "qwen3_moe": {"decoder_sparse_step": _LAYER_FREQUENCY},
    "gemma2": _GEMMA_REFUSED,
    "gemma3_text": _GEMMA_REFUSED,
    "falcon": {
        "alibi": Only((False, None), "scores with a bias by distance (ALiBi)"),
        "attention_dropout": Only((0, None), "dropout of what attention adds alone"),
        "hidden_dropout": Only((0, None), "one mask of dropout over what attention and MLP add"),
    },
    "gpt2": {
        "add_cross_attention": Only((False,), "cross-attention"),
        "scale_attn_by_inverse_layer_idx": Only((False,), "an attention scale per layer"),
    },
    "deepseek_v2": _DEEPSEEK_REFUSED | {"rope_interleave": Only((True,), "rotary pairs that lie half a head apart")},
    "deepseek_v3": _DEEPSEEK_REFUSED,
    "kimi_k2": _DEEPSEEK_REFUSED,
    "gpt_oss": {
        "swiglu_alpha": Only((1.702,), "another gain of the clamped SwiGLU"),
        "swiglu_limit": Only((7.0,), "another limit of the clamped SwiGLU"),
    },
}

# Keys of published files that change no logits: metadata, other software, tokens, generation, classification heads,
# initial weights (ours have their own rule), storage, modules that a family does not build (multi-token prediction),
# and duplicates of other keys.
HARMLESS = _same(
    "architectures model_type transformers_version auto_map tokenizer_class name torch_dtype dtype torchscript "
    "use_bfloat16 quantization_config attn_implementation cache_implementation use_cache gradient_checkpointing "
    "return_dict output_attentions output_hidden_states output_router_logits problem_type id2label label2id num_labels "
    "classifier_dropout task_specific_params pruned_heads is_decoder is_encoder_decoder tie_encoder_decoder "
    "chunk_size_feed_forward pretraining_tp reorder_and_upcast_attn initializer_range vision_config "
    "ep_size seq_aux num_nextn_predict_layers num_mtp_layers qk_head_dim max_length min_length temperature top_k top_p "
    "do_sample num_beams repetition_penalty bad_words_ids suppress_tokens initial_context_length experts_per_token "
    "n_ctx max_window_layers is_llama_config transformers.js_config"
).keys()
_ENDS = ("_token_id", "_token_ids", "_token_index", "_token")
_STARTS = ("_", "summary_", "unsloth_")


def fields(values: dict[str, Any], *, family: str, name: str) -> dict[str, Any]:
    """The keys that the family reads, renamed to fields of ``Config``; ``Mistake`` for a refused value."""
    for key, only in (REFUSED[""] | REFUSED.get(family, {})).items():
        if key in values and not any(values[key] == held for held in only.values):
            raise Mistake(
                f"{name}: {key}={values[key]!r} needs {only.operation}, which is not supported; "
                f"remove it or give {key}={only.values[0]!r}"
            )
    found: dict[str, Any] = {}
    said: dict[str, str] = {}
    for key, field in KEYS[family].items():
        if key not in values:
            continue
        if field in found and found[field] != values[key]:
            raise Mistake(
                f"{name}: {said[field]}={found[field]!r} and {key}={values[key]!r} are one key of {family}; give one"
            )
        found[field], said[field] = values[key], key
    return found


def unread(values: dict[str, Any], *, family: str) -> Iterator[str]:
    """The keys that may change the model, but that the family's code ignores.

    Leaves out neutral values (none, false, 0, 1, empty) and values that the family uses anyway.
    """
    read = KEYS[family] | {key: key for key in REFUSED[""] | REFUSED.get(family, {})}
    meant = {name: field for keys in KEYS.values() for name, field in keys.items()}
    given = {field: values[key] for key, field in KEYS[family].items() if key in values and field != _UNREAD}
    own = DEFAULTS[family] | given
    for key, value in values.items():
        if (key in read and read[key] != _UNREAD) or _harmless(key):
            continue
        empty = value is None or value is False or (value is not True and value in (0, 1, "", [], {}))
        if not empty and (meant.get(key) not in own or own[meant[key]] != value):
            yield key


def describe_quantization(values: dict[str, Any]) -> str | None:
    """Return in words that the weights of a checkpoint are quantized, and as what they are counted; None if not."""
    quantized = values.get("quantization_config")
    if not quantized:
        return None
    method = quantized.get("quant_method") if isinstance(quantized, dict) else None
    return (
        f"the checkpoint's weights are quantized ({method or 'quantization_config'}); counted as trained from weights "
        "in the precision of the job: convert them to bf16 before training"
    )


def _harmless(key: str) -> bool:
    return key in HARMLESS or key.endswith(_ENDS) or key.startswith(_STARTS)

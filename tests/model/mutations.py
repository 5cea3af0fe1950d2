"""Small configs of every family that is read, and the ways to change one key of each: sizes, switches, scalings.

``MUTATIONS`` holds every key that a family's configuration class knows, keys of other families among them, and some
of models that are not read. A change of one key is tried on every family.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

PLAIN = {
    "vocab_size": 131, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = PLAIN | {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
ALIKE = PLAIN | {"num_experts_per_tok": 2, "num_local_experts": 4}  # experts as wide as the dense layers
LATENT = {
    **{key: value for key, value in EXPERTS.items() if key != "head_dim"},
    "num_key_value_heads": 6, "kv_lora_rank": 20, "q_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 6, "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1,
}  # fmt: skip
GPT2 = {"vocab_size": 131, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 64, "tie_word_embeddings": False}
STILL = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
GEMMA = PLAIN | {"sliding_window": 6, "query_pre_attn_scalar": 12}
WIDE = {key: value for key, value in PLAIN.items() if key not in ("num_key_value_heads", "head_dim")}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": PLAIN,
    "mistral": PLAIN | {"sliding_window": 6},
    "mixtral": ALIKE,
    "qwen2": PLAIN | {"sliding_window": 6, "max_window_layers": 1},
    "qwen3": PLAIN | {"sliding_window": 6, "max_window_layers": 1},
    "qwen3_moe": EXPERTS | {"num_experts": 4, "mlp_only_layers": [0], "sliding_window": 6},
    "gemma2": GEMMA,
    "gemma3_text": GEMMA | {"sliding_window_pattern": 2},
    "phi3": PLAIN | {"pad_token_id": 0},
    "gpt2": GPT2 | STILL,
    "gpt_neox": WIDE,
    "nemotron": PLAIN,
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT | {"n_group": 2, "topk_group": 1},
    "olmo2": PLAIN | {"pad_token_id": 0},
    "gpt_oss": ALIKE | {"sliding_window": 6},
}

_ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "relu2", "quick_gelu")
_LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 3.0, 4.0, 5.0]}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 16}  # fmt: skip
_ROPE: tuple[Any, ...] = (
    None,
    {},
    {"rope_type": "default", "rope_theta": 300.0},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"rope_type": "linear", "factor": 3.0},
    {"type": "linear", "factor": 3.0},
    {"rope_type": "linear", "factor": 3.0, "rope_theta": 300.0},
    {"rope_type": "linear", "factor": 3.0, "attention_factor": 1.7},
    {"rope_type": "linear", "factor": 3.0, "partial_rotary_factor": 0.5},
    {"rope_type": "linear", "factor": 3.0, "mscale_all_dim": 0.7},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16},
    _YARN,
    {"rope_type": "yarn", "factor": 4.0},
    _YARN | {"factor": None},
    _YARN | {"attention_factor": 1.3},
    _YARN | {"beta_fast": 8.0, "beta_slow": 2.0},
    _YARN | {"beta_fast": 2.0, "beta_slow": 8.0},
    _YARN | {"beta_fast": 0.1, "beta_slow": 0.05},
    _YARN | {"truncate": False},
    _YARN | {"mscale": 0.7},
    _YARN | {"mscale_all_dim": 0.7},
    _YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
    _YARN | {"partial_rotary_factor": 0.5},
    _LLAMA3,
    _LLAMA3 | {"attention_factor": 1.7},
    _LLAMA3 | {"high_freq_factor": 1.0},
    _LLAMA3 | {"low_freq_factor": 4.0, "high_freq_factor": 1.0},
    _LLAMA3 | {"original_max_position_embeddings": None},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16},
    _LONG | {"original_max_position_embeddings": 16},
    _LONG | {"factor": 3.0, "original_max_position_embeddings": 16},
    _LONG,
    _LONG | {"attention_factor": 1.3, "original_max_position_embeddings": 16},
    {**_LONG, "rope_type": "su"},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    {"rope_type": "mrope", "mrope_section": [1, 1, 2]},
    {"full_attention": {"rope_type": "default", "rope_theta": 300.0}},
    {"full_attention": _YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}},
    {"full_attention": _YARN | {"truncate": False}},
    {layers: {"rope_type": "linear", "factor": 3.0} for layers in ("full_attention", "sliding_attention")},
    {"full_attention": {"rope_type": "default", "partial_rotary_factor": 0.5}},
)  # fmt: skip

MUTATIONS: dict[str, tuple[Any, ...]] = {
    "vocab_size": (97,),
    "hidden_size": (96,),
    "intermediate_size": (56,),
    "num_hidden_layers": (1, 3),
    "num_attention_heads": (2, 4, 12),
    "num_key_value_heads": (1, 3, 6, None),
    "head_dim": (4, 12, None),
    "hidden_act": _ACTIVATIONS,
    "hidden_activation": _ACTIVATIONS,
    "activation_function": _ACTIVATIONS,
    "max_position_embeddings": (24, 80),
    "n_embd": (96,),
    "n_layer": (3,),
    "n_head": (4,),
    "n_inner": (56, None),
    "n_positions": (80,),
    "n_ctx": (80,),
    "rms_norm_eps": (0.05,),
    "layer_norm_eps": (0.05,),
    "layer_norm_epsilon": (0.05,),
    "norm_eps": (0.05,),
    "tie_word_embeddings": (True, False),
    "attention_bias": (True, False),
    "mlp_bias": (True, False),
    "qkv_bias": (True,),
    "lm_head_bias": (True,),
    "attention_dropout": (0.1,),
    "hidden_dropout": (0.1,),
    "embd_pdrop": (0.1,),
    "attn_pdrop": (0.1,),
    "resid_pdrop": (0.1,),
    "initializer_range": (0.3,),
    "pad_token_id": (3,),
    "use_cache": (False,),
    "pretraining_tp": (2,),
    "chunk_size_feed_forward": (3,),
    "rope_theta": (300.0,),
    "rope_local_base_freq": (30.0,),
    "rotary_emb_base": (300.0,),
    "partial_rotary_factor": (0.5, 0.25, 1.0),
    "rotary_pct": (0.5, 1.0),
    "rope_scaling": _ROPE,
    "rope_parameters": _ROPE,
    "original_max_position_embeddings": (16, 24),
    "rope_interleave": (False, None),
    "is_causal": (False, True),
    "is_decoder": (True,),
    "add_cross_attention": (True,),
    "use_bidirectional_attention": (True, False),
    "use_sliding_window": (True, False),
    "sliding_window": (5, None),
    "max_window_layers": (0, 1, 5),
    "layer_types": (
        ["full_attention"] * 2, ["sliding_attention"] * 2, ["full_attention", "sliding_attention"],
        ["attention", "attention"], ["full_attention"] * 3, ["chunked_attention"] * 2, None,
    ),
    "sliding_window_pattern": (1, 3),
    "attention_chunk_size": (4,),
    "query_pre_attn_scalar": (4,),
    "attn_logit_softcapping": (0.5, None),
    "final_logit_softcapping": (0.5, None),
    "scale_attn_weights": (False, True),
    "scale_attn_by_inverse_layer_idx": (True,),
    "reorder_and_upcast_attn": (True,),
    "use_parallel_residual": (True, False),
    "num_experts": (8,),
    "num_local_experts": (8,),
    "n_routed_experts": (4, 16),
    "num_experts_per_tok": (1, 3, 7),
    "moe_intermediate_size": (20,),
    "router_aux_loss_coef": (0.5,),
    "aux_loss_alpha": (0.5,),
    "output_router_logits": (True,),
    "router_jitter_noise": (0.1,),
    "norm_topk_prob": (True, False),
    "mlp_only_layers": ([0], [1], [0, 1], [], None),
    "decoder_sparse_step": (1, 2),
    "moe_layer_freq": (1, 2),
    "first_k_dense_replace": (0, 1, 2),
    "n_shared_experts": (0, 1, 3),
    "routed_scaling_factor": (2.0,),
    "n_group": (1, 2, 4, 8, None),
    "topk_group": (1, 2, 3, None),
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc"),
    "scoring_func": ("softmax", "sigmoid"),
    "num_nextn_predict_layers": (0, 2),
    "num_mtp_layers": (0, 2),
    "q_lora_rank": (None, 16),
    "kv_lora_rank": (12,),
    "qk_nope_head_dim": (12,),
    "qk_rope_head_dim": (8,),
    "v_head_dim": (10,),
    "swiglu_alpha": (1.5, 1.702),
    "swiglu_limit": (0.5, 7.0),
    "qk_norm": (True,),
    "use_qk_norm": (True,),
    "qk_layernorm": (True,),
    "clip_qkv": (1.0,),
    "attention_multiplier": (0.5,),
    "embedding_multiplier": (2.0,),
    "residual_multiplier": (0.5,),
    "logits_scaling": (4.0,),
    "hidden_norm": ("layernorm",),
    "per_layer_config": ({0: {"intermediate_size": 24}}, None),
}  # fmt: skip


def mutations(kind: str) -> Iterator[tuple[str, Any]]:
    """Each change of one key that makes another config of the family ``kind``."""
    for key, values in MUTATIONS.items():
        for value in values:
            if key not in FAMILIES[kind] or FAMILIES[kind][key] != value:
                yield key, value

"""Default values of missing keys of a Hugging Face ``config.json``, per family.

Source: the configuration classes of transformers 5.23. Names are the fields of ``config.Config``.
"""

from __future__ import annotations

from typing import Any

from fivefold.model.huggingface.dense_defaults import DECODER, DENSE

_DEEPSEEK = {
    **DECODER,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_DEEPSEEK_V3 = {
    **_DEEPSEEK,
    "vocab_size": 129_280,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
}

DEFAULTS: dict[str, dict[str, Any]] = {
    **DENSE,
    "deepseek_v2": {
        **_DEEPSEEK,
        "vocab_size": 102_400,
        "intermediate_size": 11_008,
        "moe_intermediate_size": 1407,
        "n_shared_experts": 2,
        "num_experts": 64,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "aux_loss_alpha": 0.001,
    },
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "llama4_text": {
        **DECODER,
        "vocab_size": 202_048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16_384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "norm_epsilon": 1e-5,
        "rope_theta": 500_000.0,
        "num_experts": 16,
        "num_experts_per_tok": 1,
        "use_qk_norm": True,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
    },
    "minimax_m2": {
        **DECODER,
        "vocab_size": 200_064,
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_hidden_layers": 62,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 196_608,
        "rope_theta": 5_000_000.0,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "router_aux_loss_coef": 0.001,
    },
    "gpt_oss": {
        **DECODER,
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
        "norm_epsilon": 1e-5,
        "attention_bias": True,
        "sliding_window": 128,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "router_aux_loss_coef": 0.001,
        "rope_theta": 150_000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
}

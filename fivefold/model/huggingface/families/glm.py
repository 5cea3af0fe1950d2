"""GLM-4 of 2024 and of 2025, and GLM-4.5 with experts."""

from __future__ import annotations

from typing import Any

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import same
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.mapping import build_model, read_mtp
from fivefold.model.huggingface.rope import read_rope
from fivefold.model.spec import Model

KEYS = decoder.KEYS | same("partial_rotary_factor attention_bias")
DEFAULTS = {
    **decoder.DEFAULTS,
    "vocab_size": 151_552,
    "intermediate_size": 13_696,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "norm_epsilon": 1.5625e-7,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}
TENSORS = decoder.TENSORS | decoder.FUSED_GATE_UP


def _build_glm(config: Config) -> Model:
    """Build GLM-4 of 2024, in which half of each head rotates."""
    return build_model(config, **read_rope(config, partly=True), qkv_bias=config.attention_bias)


def _build_glm4(config: Config) -> Model:
    """Build GLM-4 of 2025, which also has norms after attention and MLP."""
    return _build_glm(config).replace(block="sandwich")


def _build_glm4_moe(config: Config) -> Model:
    """Build GLM-4.5: DeepSeek-V3's experts with grouped-query attention, which rotates a part of each head."""
    moe = {
        "experts": config.num_experts,
        "topk": config.num_experts_per_tok,
        "ffn": config.moe_intermediate_size,
        "shared_experts": config.n_shared_experts or 0,
        "dense_layers": config.first_k_dense_replace,
        "score": "sigmoid",
        "balance": "free",
        "aux_coefficient": 0.0,
        "normalized": config.norm_topk_prob,
        "scaling": config.routed_scaling_factor,
        "groups": config.n_group or 1,
        "topk_groups": config.topk_group or 1,
    }
    fields: dict[str, Any] = {
        "qkv_bias": config.attention_bias,
        "qk_norm": "head" if config.use_qk_norm else "none",
        "head_dim": config.head_dim or config.hidden_size // config.num_attention_heads,
    }
    return build_model(config, **read_rope(config, partly=True), **fields, moe=moe, mtp=read_mtp(config))


GLM = Family(
    model_type="glm",
    architecture="GlmForCausalLM",
    keys=KEYS,
    defaults=DEFAULTS,
    to_model=_build_glm,
    tensors=TENSORS,
    interleaved_rotary=True,
)
GLM4 = Family(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    keys=KEYS,
    defaults=DEFAULTS,
    to_model=_build_glm4,
    tensors=TENSORS | {"norm1_post": "post_self_attn_layernorm", "norm2_post": "post_mlp_layernorm"},
    interleaved_rotary=True,
)
GLM4_MOE = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    keys=decoder.KEYS
    | {"num_local_experts": "num_experts", "n_routed_experts": "num_experts"}
    | decoder.MTP_KEYS
    | same(
        "partial_rotary_factor attention_bias use_qk_norm num_experts_per_tok moe_intermediate_size n_shared_experts "
        "first_k_dense_replace routed_scaling_factor n_group topk_group norm_topk_prob"
    ),
    defaults={
        **decoder.DEFAULTS,
        "vocab_size": 151_552,
        "hidden_size": 4096,
        "intermediate_size": 10_944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "norm_epsilon": 1e-5,
        "partial_rotary_factor": 0.5,
        "n_shared_experts": 1,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
    },
    to_model=_build_glm4_moe,
    write=lambda model: {"use_qk_norm": model.qk_norm == "head"},
    tensors=decoder.EXPERT_TENSORS | decoder.SHARED_EXPERT_TENSORS | {"moe.bias": "mlp.gate.e_score_correction_bias"},
    stacked_tensors=decoder.stack_experts(),
)

FAMILIES = (GLM, GLM4, GLM4_MOE)

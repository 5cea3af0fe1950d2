"""GLM-4 of 2024 and of 2025, GLM-4.5 and 4.7-Flash with experts; the text models of GLM-4.1V, 4.5V, 4.6V and OCR."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import drop_keys, expand_names, map_same_names
from fivefold.model.huggingface.family import Family, Wrapper
from fivefold.model.huggingface.mapping import (
    build_model,
    read_biased_experts,
    read_latent,
    read_mlp_layer_types,
    read_mtp,
)
from fivefold.model.huggingface.rope import read_rope
from fivefold.model.spec import Model

KEYS = decoder.KEYS | map_same_names("partial_rotary_factor attention_bias")
DEFAULTS = {
    **expand_names(vocab=151_552, ffn=13_696, layers=40, kv_heads=2, head_dim=128, positions=131_072),
    "norm_epsilon": 1.5625e-7,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}
TENSORS = decoder.TENSORS | decoder.FUSED_GATE_UP


def _build_glm(config: Config) -> Model:
    """Build GLM-4 of 2024, in which half of each head rotates."""
    return build_model(config, **read_rope(config, has_partial_rotary=True), out_bias=False)


def _build_glm4(config: Config) -> Model:
    """Build GLM-4 of 2025, which also has norms after attention and MLP."""
    return _build_glm(config).replace(block="sandwich")


def _build_glm4_moe(config: Config) -> Model:
    """Build GLM-4.5: DeepSeek-V3's experts with grouped-query attention, which rotates a part of each head."""
    moe = read_biased_experts(config) | {"dense_layers": config.first_k_dense_replace}
    fields: dict[str, Any] = {
        "out_bias": False,
        "qk_norm": "head" if config.use_qk_norm else "none",
        "head_dim": config.head_dim or config.hidden_size // config.num_attention_heads,
    }
    return build_model(config, **read_rope(config, has_partial_rotary=True), **fields, moe=moe, mtp=read_mtp(config))


def _build_glm4_moe_lite(config: Config) -> Model:
    """Build GLM-4.7-Flash: DeepSeek-V3's attention and experts."""
    moe = read_biased_experts(config) | read_mlp_layer_types(config, dense=1)
    return build_model(config, **read_latent(config), moe=moe)


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
    | decoder.BIASED_EXPERT_KEYS
    | decoder.MTP_KEYS
    | map_same_names("partial_rotary_factor attention_bias use_qk_norm first_k_dense_replace"),
    defaults={
        **expand_names(vocab=151_552, width=4096, ffn=10_944, layers=46, heads=96, kv_heads=8, positions=131_072),
        **expand_names(expert_ffn=1408, shared_experts=1, experts=128, topk=8),
        "norm_epsilon": 1e-5,
        "partial_rotary_factor": 0.5,
        "first_k_dense_replace": 1,
    },
    to_model=_build_glm4_moe,
    write=lambda model: {"use_qk_norm": model.qk_norm == "head"},
    tensors=decoder.BIASED_EXPERT_TENSORS,
    stacked_tensors=decoder.name_stacked_experts(),
)

GLM4_MOE_LITE = Family(
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    keys=decoder.KEYS
    | decoder.LATENT_KEYS
    | decoder.BIASED_EXPERT_KEYS
    | {"head_dim": "qk_rope_head_dim", "qk_rope_head_dim": "qk_rope_head_dim"}
    | map_same_names("mlp_layer_types"),
    defaults={
        **expand_names(vocab=154_880, width=2048, ffn=10_240, layers=47, heads=20, kv_heads=20, positions=202_752),
        **expand_names(expert_ffn=1536, shared_experts=1, experts=64, topk=4),
        "routed_scaling_factor": 1.8,
        **expand_names(kv_rank=512, q_rank=768, nope_dim=192, rope_dim=64, v_dim=256),
        "norm_epsilon": 1e-5,
    },
    to_model=_build_glm4_moe_lite,
    write=decoder.write_latent,
    tensors=decoder.BIASED_EXPERT_TENSORS | decoder.LATENT_TENSORS,
    stacked_tensors=decoder.name_stacked_experts(),
)

# The text model of GLM-4.1V and 4.6V as GLM-4 of 2025; queries, keys and values always have biases.
GLM4V_TEXT = replace(
    GLM4,
    model_type="glm4v_text",
    architecture="Glm4vTextModel",
    keys=drop_keys(KEYS, "attention_bias", "head_dim"),
    defaults={
        **{key: value for key, value in DEFAULTS.items() if key not in ("head_dim", "attention_bias")},
        "max_position_embeddings": 32_768,
        "norm_epsilon": 1e-5,
        "partial_rotary_factor": 1.0,
    },
    to_model=lambda config: _build_glm4(config.replace(attention_bias=True)),
    has_mrope=True,
)
GLM_OCR_TEXT = replace(
    GLM4V_TEXT,
    model_type="glm_ocr_text",
    architecture="GlmOcrTextModel",
    keys=drop_keys(KEYS, "attention_bias"),
    defaults={
        **GLM4V_TEXT.defaults,
        **expand_names(vocab=59_392, width=1024, ffn=4096, layers=16, heads=16, kv_heads=8, positions=131_072),
    },
    to_model=_build_glm4,
)
GLM4V_MOE_TEXT = replace(
    GLM4_MOE,
    model_type="glm4v_moe_text",
    architecture="Glm4vMoeTextModel",
    keys=drop_keys(GLM4_MOE.keys, *decoder.MTP_KEYS, "use_qk_norm"),
    defaults={**GLM4_MOE.defaults, "vocab_size": 151_424, "max_position_embeddings": 65_536, "attention_bias": True},
    has_mrope=True,
    write=lambda model: {},
)
WRAPPERS = (
    Wrapper("glm4v", "Glm4vForConditionalGeneration", text="glm4v_text", tied=False),
    Wrapper("glm46v", "Glm46VForConditionalGeneration", text="glm4v_text", tied=False),
    Wrapper("glmga", "Glm46VForConditionalGeneration", text="glm4v_text", tied=False),
    Wrapper("glm4v_moe", "Glm4vMoeForConditionalGeneration", text="glm4v_moe_text", tied=False),
    Wrapper("glm_ocr", "GlmOcrForConditionalGeneration", text="glm_ocr_text", tied=False),
)

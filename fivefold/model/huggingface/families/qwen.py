"""Qwen 2 and 3, with experts and without, and the text models of Qwen2-VL, 2.5-VL and 3-VL."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import drop_keys, expand_names, map_same_names
from fivefold.model.huggingface.family import Family, Supported, Wrapper
from fivefold.model.huggingface.mapping import build_model, read_experts, read_gated_experts, read_windows
from fivefold.model.spec import Model

WINDOWS = map_same_names("use_sliding_window sliding_window max_window_layers layer_types")
DEFAULTS = {
    **expand_names(vocab=151_936, ffn=22_016, kv_heads=32, positions=32_768),
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def _read_late_windows(config: Config) -> dict[str, Any]:
    """Return the fields of sliding windows, which layers from ``max_window_layers`` on may have."""
    used = config.use_sliding_window and config.sliding_window is not None
    layers = range(config.num_hidden_layers)
    return read_windows(config, default=tuple(used and layer >= config.max_window_layers for layer in layers))


def _build_qwen2(config: Config) -> Model:
    """Build Qwen2: Llama with biases of q, k and v."""
    return build_model(config, **_read_late_windows(config), qkv_bias=True)


def _build_qwen3(config: Config) -> Model:
    """Build Qwen3: norms of queries and keys per head."""
    return build_model(config, **_read_late_windows(config), qk_norm="head")


def _build_qwen3_moe(config: Config) -> Model:
    """Build Qwen3 with experts after the first dense layers; norms of queries and keys per head."""
    dense = sorted(config.mlp_only_layers or ())
    if dense != list(range(len(dense))):
        raise config.mistake(f"mlp_only_layers={dense} needs dense layers after experts, which is not supported")
    moe = read_experts(config, dense_layers=len(dense))
    return build_model(config, **read_windows(config), qk_norm="head", moe=moe)


def _build_qwen2_moe(config: Config) -> Model:
    """Build Qwen1.5-MoE and Qwen2 with experts: a gated shared expert; every other early layer may slide."""
    layers = range(config.num_hidden_layers)
    used = config.use_sliding_window and config.sliding_window is not None
    slides = tuple(used and layer % 2 == 0 and layer < config.max_window_layers for layer in layers)
    fields = read_windows(config, default=slides)
    return build_model(config, **fields, out_bias=False, moe=read_gated_experts(config))


QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    keys=decoder.KEYS | WINDOWS,
    defaults=DEFAULTS,
    to_model=_build_qwen2,
)
QWEN2_5_VL_TEXT = Family(
    model_type="qwen2_5_vl_text",
    architecture="Qwen2_5_VLTextModel",
    keys=drop_keys(decoder.KEYS, "head_dim") | WINDOWS,
    defaults={
        **DEFAULTS,
        **expand_names(vocab=152_064, width=8192, ffn=29_568, layers=80, heads=64, kv_heads=8),
        "norm_epsilon": 1e-5,
        "rope_theta": 1_000_000.0,
        "max_window_layers": 80,
    },
    to_model=_build_qwen2,
    has_mrope=True,
)
QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    keys=decoder.KEYS | WINDOWS | map_same_names("attention_bias"),
    defaults={**DEFAULTS, "head_dim": 128},
    to_model=_build_qwen3,
)
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    keys=decoder.KEYS
    | {"num_local_experts": "num_experts", "num_experts": "num_experts"}
    | map_same_names(
        "num_experts_per_tok router_aux_loss_coef attention_bias use_sliding_window sliding_window "
        "moe_intermediate_size norm_topk_prob mlp_only_layers"
    ),
    defaults={
        **DEFAULTS,
        **expand_names(width=2048, ffn=6144, layers=24, kv_heads=4),
        **expand_names(expert_ffn=768, experts=128, topk=8),
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.001,
    },
    supported={"decoder_sparse_step": Supported((1,), "experts in every n-th layer only")},
    to_model=_build_qwen3_moe,
    write=lambda model: {"decoder_sparse_step": 1},
    tensors=decoder.EXPERT_TENSORS,
    stacked_tensors=decoder.name_stacked_experts(),
)

QWEN2_MOE = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    keys=decoder.KEYS
    | WINDOWS
    | {"num_local_experts": "num_experts", "num_experts": "num_experts", "qkv_bias": "attention_bias"}
    | map_same_names(
        "num_experts_per_tok router_aux_loss_coef moe_intermediate_size shared_expert_intermediate_size "
        "norm_topk_prob mlp_only_layers decoder_sparse_step"
    ),
    defaults={
        **DEFAULTS,
        **expand_names(width=2048, ffn=5632, layers=24, heads=16, kv_heads=16),
        **expand_names(expert_ffn=1408, experts=60, topk=4),
        "shared_expert_intermediate_size": 5632,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.001,
        "attention_bias": True,
    },
    to_model=_build_qwen2_moe,
    write=decoder.write_dense_layers,
    tensors=decoder.EXPERT_TENSORS | decoder.SHARED_EXPERT_TENSOR | {"moe.shared_gate": "mlp.shared_expert_gate"},
    stacked_tensors=decoder.name_stacked_experts(),
)
QWEN2_VL_TEXT = replace(QWEN2_5_VL_TEXT, model_type="qwen2_vl_text", architecture="Qwen2VLTextModel")
QWEN3_VL_TEXT = Family(
    model_type="qwen3_vl_text",
    architecture="Qwen3VLTextModel",
    keys=decoder.KEYS | map_same_names("attention_bias"),
    defaults={
        **DEFAULTS,
        "head_dim": 128,
        "max_position_embeddings": 128_000,
        "rope_theta": 500_000.0,
        "sliding_window": None,
    },
    to_model=_build_qwen3,
    has_mrope=True,
)
QWEN3_VL_MOE_TEXT = replace(
    QWEN3_MOE,
    model_type="qwen3_vl_moe_text",
    architecture="Qwen3VLMoeTextModel",
    keys=drop_keys(QWEN3_MOE.keys, "use_sliding_window", "sliding_window", "norm_topk_prob"),
    defaults={
        **QWEN3_MOE.defaults,
        **expand_names(ffn=5632, heads=16, kv_heads=16, positions=128_000),
        "rope_theta": 500_000.0,
        **expand_names(expert_ffn=1408, experts=60, topk=4),
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
        "sliding_window": None,
    },
    to_model=_build_qwen3_moe,
    has_mrope=True,
    overwritten=("sliding_window",),
)

QWEN2_5_OMNI_TEXT = replace(
    QWEN2_5_VL_TEXT,
    model_type="qwen2_5_omni_text",
    architecture="Qwen2_5OmniThinkerTextModel",
    defaults={
        **QWEN2_5_VL_TEXT.defaults,
        **expand_names(width=3584, ffn=18_944, layers=28, heads=28, kv_heads=4),
        "norm_epsilon": 1e-6,
        "max_window_layers": 28,
        "tie_word_embeddings": True,
    },
)
QWEN3_OMNI_MOE_TEXT = replace(
    QWEN3_VL_MOE_TEXT,
    model_type="qwen3_omni_moe_text",
    architecture="Qwen3OmniMoeThinkerTextModel",
    keys={**QWEN3_VL_MOE_TEXT.keys, **map_same_names("norm_topk_prob")},
    defaults={
        **QWEN3_MOE.defaults,
        **expand_names(vocab=3584, ffn=18_944, layers=28, heads=28),
        "rope_theta": 1_000_000.0,
        "norm_topk_prob": True,
        "sliding_window": None,
    },
)
WRAPPERS = (
    Wrapper("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", text="qwen2_5_vl_text", tied=False, flat=True),
    Wrapper("qwen2_vl", "Qwen2VLForConditionalGeneration", text="qwen2_vl_text", tied=False, flat=True),
    Wrapper("qwen3_vl", "Qwen3VLForConditionalGeneration", text="qwen3_vl_text", tied=False),
    Wrapper("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", text="qwen3_vl_moe_text", tied=False),
    Wrapper("qwen2_5_omni_thinker", "Qwen2_5OmniThinkerForConditionalGeneration", text="qwen2_5_omni_text", tied=False),
    Wrapper(
        "qwen3_omni_moe_thinker", "Qwen3OmniMoeThinkerForConditionalGeneration", text="qwen3_omni_moe_text", tied=False
    ),
    Wrapper("cosmos3_omni", "Cosmos3OmniForConditionalGeneration", text="qwen3_vl_text", tied=False),
)

"""ERNIE 4.5, dense and with experts, and the text model of PaddleOCR-VL."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fivefold.model.experts import MoE
from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import drop_keys, expand_names, map_same_names
from fivefold.model.huggingface.family import Family, Supported, Wrapper
from fivefold.model.huggingface.mapping import build_model, read_experts, read_layers_of_experts
from fivefold.model.spec import Model

KEYS = drop_keys(decoder.KEYS, "attention_dropout") | {"use_bias": "attention_bias"}


def _build_ernie4_5(config: Config) -> Model:
    """Build ERNIE 4.5: Llama with biases in all matrices or in none."""
    return build_model(config, mlp_bias=config.attention_bias)


def _build_ernie4_5_moe(config: Config) -> Model:
    """Build ERNIE 4.5 with experts: softmax routing, balanced by a bias; with biases, the head has one too."""
    layers = range(config.num_hidden_layers)
    last = len(layers) - 1 if config.moe_layer_end_index == -1 else config.moe_layer_end_index
    within = range(config.moe_layer_start_index, last + 1)
    moe = read_experts(
        config,
        balance="free",
        aux_coefficient=0.0,
        **read_layers_of_experts(
            [layer in within and (layer + 1) % config.moe_layer_interval == 0 for layer in layers]
        ),
    )
    return _build_ernie4_5(config).replace(head_bias=config.attention_bias, moe=MoE.read(moe, origin=config.name))


def _write_ernie4_5_moe(model: Model) -> dict[str, Any]:
    """Return which layers have experts: all from one on, or each n-th of a range."""
    routed = [layer for layer in range(model.layers) if model.is_moe(layer)] or [model.layers]
    interval = routed[1] - routed[0] if len(routed) > 1 else 1
    start = routed[0] if interval == 1 or (routed[0] + 1) % interval == 0 else 0
    return {"moe_layer_start_index": start, "moe_layer_end_index": routed[-1], "moe_layer_interval": interval}


ERNIE4_5 = Family(
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    keys=KEYS,
    defaults={
        **expand_names(vocab=103_424, width=1024, ffn=3072, layers=18, heads=16, kv_heads=2, positions=131_072),
        "head_dim": 128,
        "norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "rope_theta": 500_000.0,
    },
    to_model=_build_ernie4_5,
    interleaved_rotary=True,
)

ERNIE4_5_MOE = Family(
    model_type="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    keys=KEYS
    | {
        "num_experts": "num_experts",
        "moe_num_experts": "num_experts",
        "num_experts_per_tok": "num_experts_per_tok",
        "moe_k": "num_experts_per_tok",
        "moe_num_shared_experts": "n_shared_experts",
    }
    | map_same_names(
        "moe_intermediate_size moe_layer_start_index moe_layer_end_index moe_layer_interval router_aux_loss_coef"
    ),
    defaults={
        **expand_names(vocab=103_424, width=2560, ffn=12_288, layers=28, heads=20, kv_heads=4, positions=131_072),
        "norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "rope_theta": 500_000.0,
        **expand_names(expert_ffn=1536, experts=64, topk=6, shared_experts=2),
        "moe_layer_start_index": 1,
    },
    supported={"moe_norm_min": Supported((1e-12,), "another least sum of routing weights")},
    to_model=_build_ernie4_5_moe,
    write=_write_ernie4_5_moe,
    tensors=decoder.EXPERT_TENSORS
    | decoder.SHARED_EXPERT_TENSORS
    | {"moe.bias": "mlp.moe_statics.e_score_correction_bias"},
    stacked_tensors=decoder.name_stacked_experts(),
    interleaved_rotary=True,
    bias_is_row=True,
)

PADDLEOCR_VL_TEXT = replace(
    ERNIE4_5,
    model_type="paddleocr_vl_text",
    architecture="PaddleOCRTextModel",
    has_mrope=True,
    interleaved_rotary=False,
)
WRAPPERS = (
    Wrapper(
        "paddleocr_vl", "PaddleOCRVLForConditionalGeneration", text="paddleocr_vl_text", tied=True, inner_ties=True
    ),
)

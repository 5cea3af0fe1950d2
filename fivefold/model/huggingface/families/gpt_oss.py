"""gpt-oss."""

from __future__ import annotations

from typing import Any

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import EXPERT_GATE_UP, FusedTensor, expand_names, map_same_names
from fivefold.model.huggingface.family import Family, Supported
from fivefold.model.huggingface.mapping import build_model, read_experts, read_windows
from fivefold.model.spec import Model

BIASES = ("moe.experts.gate_bias", "moe.experts.up_bias")


def _build_gpt_oss(config: Config) -> Model:
    """Build gpt-oss: experts with biases, attention sinks, a sliding window in every other layer."""
    fields = {
        "activation": "clamped_swiglu",
        "attention_sinks": True,
        "moe": read_experts(config, router_bias=True, expert_bias=True),
    }
    slides = read_windows(config, default=(True, False))
    return build_model(config, **slides, **fields)


def _write_gpt_oss(model: Model) -> dict[str, Any]:
    return {
        "hidden_act": "silu",  # which its class does not read
        **decoder.write_layer_types(model),
        **decoder.write_unscaled_rope(model),
    }


GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    keys=decoder.GROUPED | decoder.EXPERT_KEYS | map_same_names("attention_bias sliding_window layer_types"),
    defaults={
        **expand_names(vocab=201_088, width=2880, ffn=2880, layers=36, heads=64, kv_heads=8, positions=131_072),
        "head_dim": 64,
        "norm_epsilon": 1e-5,
        "attention_bias": True,
        "sliding_window": 128,
        **expand_names(experts=128, topk=4),
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
    supported={
        "swiglu_alpha": Supported((1.702,), "another gain of the clamped SwiGLU"),
        "swiglu_limit": Supported((7.0,), "another limit of the clamped SwiGLU"),
    },
    to_model=_build_gpt_oss,
    write=_write_gpt_oss,
    tensors=decoder.TENSORS
    | {
        "attention": "self_attn",  # its sinks
        "moe.router": "mlp.router",
        **dict.fromkeys(
            EXPERT_GATE_UP, FusedTensor("mlp.experts.gate_up_proj", EXPERT_GATE_UP, groups=0, transposed=True)
        ),
        **dict.fromkeys(BIASES, FusedTensor("mlp.experts.gate_up_proj_bias", BIASES, groups=0)),
        "moe.experts.down": FusedTensor("mlp.experts.down_proj", ("moe.experts.down",), transposed=True),
        "moe.experts.down_bias": "mlp.experts.down_proj_bias",
    },
)

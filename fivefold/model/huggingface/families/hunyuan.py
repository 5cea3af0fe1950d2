"""Hunyuan (Hy) 3."""

from __future__ import annotations

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import same
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.mapping import (
    build_model,
    read_attention_bias,
    read_biased_experts,
    read_mlp_layer_types,
)
from fivefold.model.huggingface.rope import read_rope
from fivefold.model.spec import Model


def _build_hy_v3(config: Config) -> Model:
    """Build Hy 3: experts chosen by sigmoids and a bias after the first layer, norms of queries and keys per head."""
    moe = read_biased_experts(config) | read_mlp_layer_types(config, dense=1)
    fields = {"mlp_bias": config.mlp_bias, "qk_norm": "head", "moe": moe}
    return build_model(config, **read_rope(config), **read_attention_bias(config), **fields)


HY_V3 = Family(
    model_type="hy_v3",
    architecture="HYV3ForCausalLM",
    keys=decoder.KEYS
    | {
        "num_local_experts": "num_experts",
        "num_experts": "num_experts",
        "num_shared_experts": "n_shared_experts",
        "router_scaling_factor": "routed_scaling_factor",
    }
    | same("attention_bias mlp_bias num_experts_per_tok moe_intermediate_size mlp_layer_types"),
    defaults={
        **decoder.DEFAULTS,
        "vocab_size": 120_832,
        "intermediate_size": 13_312,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "norm_epsilon": 1e-5,
        "rope_theta": 11_158_840.0,
        "num_experts": 192,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.826,
    },
    to_model=_build_hy_v3,
    tensors=decoder.EXPERT_TENSORS
    | {f"moe.shared.{part}": f"mlp.shared_mlp.{part}_proj" for part in ("gate", "up", "down")}
    | {"moe.router": "mlp.router.gate", "moe.bias": "mlp.expert_bias"},
    stacked_tensors=decoder.stack_experts()
    | decoder.SHARED_EXPERT_TENSORS
    | {"moe.bias": "mlp.e_score_correction_bias"},
)

FAMILIES = (HY_V3,)

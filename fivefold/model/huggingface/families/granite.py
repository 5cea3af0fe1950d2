"""Granite, dense and with experts: factors on embedding, scores, branches and logits."""

from __future__ import annotations

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import EXPERT_GATE_UP, same
from fivefold.model.huggingface.family import Family, Fused
from fivefold.model.huggingface.mapping import build_model, read_attention_bias, read_experts
from fivefold.model.huggingface.rope import read_rope
from fivefold.model.spec import Model

KEYS = decoder.KEYS | same(
    "attention_bias embedding_multiplier attention_multiplier residual_multiplier logits_scaling"
)
DEFAULTS = {**decoder.DEFAULTS, "intermediate_size": 11_008}


def _read_factors(config: Config) -> dict[str, float]:
    return {
        "embedding_scale": config.embedding_multiplier,
        "attention_scale": config.attention_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": 1 / config.logits_scaling,
    }


def _build_granite(config: Config) -> Model:
    fields = read_rope(config) | read_attention_bias(config) | _read_factors(config)
    return build_model(config, **fields, mlp_bias=config.mlp_bias)


def _build_granitemoe(config: Config) -> Model:
    """Build Granite with experts in every layer, each of width intermediate_size."""
    fields = read_rope(config) | read_attention_bias(config) | _read_factors(config)
    return build_model(config, **fields, moe=read_experts(config))


GRANITE = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    keys=KEYS | same("mlp_bias"),
    defaults=DEFAULTS,
    to_model=_build_granite,
    tensors=decoder.TENSORS,
)
GRANITEMOE = Family(
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    keys=KEYS | same("num_experts_per_tok router_aux_loss_coef") | {"num_local_experts": "num_experts"},
    defaults={**DEFAULTS, "num_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001},
    to_model=_build_granitemoe,
    tensors=decoder.TENSORS
    | {
        "moe.router": "block_sparse_moe.router.layer",
        **dict.fromkeys(EXPERT_GATE_UP, Fused("block_sparse_moe.input_linear.weight", EXPERT_GATE_UP)),
        "moe.experts.down": "block_sparse_moe.output_linear.weight",
    },
    stacked_tensors=decoder.stack_experts("block_sparse_moe", router="router"),
)

FAMILIES = (GRANITE, GRANITEMOE)

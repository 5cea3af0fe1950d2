"""MiniMax-M2."""

from __future__ import annotations

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import map_same_names
from fivefold.model.huggingface.family import Family, Supported
from fivefold.model.huggingface.mapping import build_model, read_experts
from fivefold.model.huggingface.rope import read_rope
from fivefold.model.spec import Model


def _build_minimax_m2(config: Config) -> Model:
    """Build MiniMax-M2: experts in every layer, sigmoid routing with a balancing bias, norms over all heads at once."""
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    if config.rotary_dim is not None and config.unread_rotary_factor == 1:  # as in published files
        config = config.replace(partial_rotary_factor=config.rotary_dim / head_dim)
    moe = read_experts(config) | {"score": "sigmoid", "balance": "free"}
    return build_model(config, **read_rope(config, partly=True), qk_norm="full", moe=moe)


MINIMAX_M2 = Family(
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    keys=decoder.KEYS | decoder.EXPERT_KEYS | map_same_names("partial_rotary_factor rotary_dim"),
    defaults={
        **decoder.DEFAULTS,
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
    supported={"router_jitter_noise": Supported((0,), "noise on the router's input")},
    to_model=_build_minimax_m2,
    tensors=decoder.MIXTRAL_TENSORS | {"moe.bias": "block_sparse_moe.e_score_correction_bias"},
    stacked_tensors=decoder.stack_experts() | {"moe.bias": "mlp.e_score_correction_bias"},
)

FAMILIES = (MINIMAX_M2,)

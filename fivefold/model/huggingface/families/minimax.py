"""MiniMax-M2, and MiniMax-01: lightning attention in every other layer."""

from __future__ import annotations

from typing import Any

from fivefold.model.factors import ResidualFactors
from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import expand_names, map_same_names
from fivefold.model.huggingface.family import Family, Supported
from fivefold.model.huggingface.mapping import build_model, read_experts, read_mixers, read_windows
from fivefold.model.huggingface.rope import read_rope
from fivefold.model.mixers.kinds import MixerName
from fivefold.model.spec import Model


def _build_minimax_m2(config: Config) -> Model:
    """Build MiniMax-M2: experts in every layer, sigmoid routing with a balancing bias, norms over all heads at once."""
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    if config.rotary_dim is not None and config.unread_rotary_factor == 1:  # as in published files
        config = config.replace(partial_rotary_factor=config.rotary_dim / head_dim)
    moe = read_experts(config, score="sigmoid", balance="free")
    return build_model(config, **read_rope(config, has_partial_rotary=True), qk_norm="full", moe=moe)


FACTORS = {  # our field → the names of its factors on the stream and on the branch
    field: (f"{key}_alpha_factor", f"{key}_beta_factor")
    for field, key in (("attention", "full_attn"), ("mixer", "linear_attn"), ("feed_forward", "mlp"))
}
NORM_EPSILON = 1e-6  # of the outputs of lightning attention; no key sets it
KINDS: dict[str, MixerName] = {"full_attention": "attention", "linear_attention": "lightning"}


def _build_minimax(config: Config) -> Model:
    """Build MiniMax-01, whose norms make the stream that branches are added to, each with a factor."""
    dim = config.head_dim or config.hidden_size // config.num_attention_heads
    geometry: dict[MixerName, Any] = {
        "lightning": {
            "heads": config.num_attention_heads,
            "dim": dim,
            "chunk": config.ssm_chunk,
            "norm_epsilon": NORM_EPSILON,
        }
    }
    default: tuple[MixerName, ...] = tuple(
        "lightning" if layer % 2 else "attention" for layer in range(config.num_hidden_layers)
    )
    factors = {field: tuple(getattr(config, name) for name in names) for field, names in FACTORS.items()}
    attends = config.replace(layer_types=None)
    return build_model(
        config,
        **read_windows(attends),
        **read_mixers(config, geometry, kinds=KINDS, default=default),
        block="norm_stream",
        residual_factors=factors,
        moe=read_experts(config),
    )


def _write_minimax(model: Model) -> dict[str, Any]:
    """Return the keys of MiniMax: kinds of its layers, residual factors and lightning attention's blocks."""
    net, factors = model.lightning, model.residual_factors or ResidualFactors()
    names = {ours: theirs for theirs, ours in KINDS.items()}
    factor_keys = {
        name: value
        for field, keys in FACTORS.items()
        for name, value in zip(keys, getattr(factors, field), strict=True)
    }
    return {
        **factor_keys,
        "layer_types": [names.get(model.mixer_name(layer), "full_attention") for layer in range(model.layers)],
        "block_size": net.chunk if net else 256,
    }


MINIMAX_M2 = Family(
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    keys=decoder.KEYS | decoder.EXPERT_KEYS | map_same_names("partial_rotary_factor rotary_dim"),
    defaults={
        **expand_names(vocab=200_064, width=3072, ffn=1536, layers=62, heads=48, kv_heads=8, positions=196_608),
        "head_dim": 128,
        "rope_theta": 5_000_000.0,
        **expand_names(experts=256, topk=8),
        "router_aux_loss_coef": 0.001,
    },
    supported={"router_jitter_noise": Supported((0,), "noise on the router's input")},
    to_model=_build_minimax_m2,
    tensors=decoder.MIXTRAL_TENSORS | {"moe.bias": "block_sparse_moe.e_score_correction_bias"},
    stacked_tensors=decoder.name_stacked_experts() | {"moe.bias": "mlp.e_score_correction_bias"},
)

MINIMAX = Family(
    model_type="minimax",
    architecture="MiniMaxForCausalLM",
    keys=decoder.KEYS
    | decoder.EXPERT_KEYS
    | map_same_names("sliding_window layer_types")
    | {"block_size": "ssm_chunk"}
    | {name: name for names in FACTORS.values() for name in names},
    defaults={
        **expand_names(ffn=14_336, kv_heads=8, positions=131_072),
        "norm_epsilon": 1e-5,
        "rope_theta": 1_000_000.0,
        **expand_names(experts=8, topk=2),
        "router_aux_loss_coef": 0.001,
    },
    supported={"router_jitter_noise": Supported((0,), "noise on the router's input")},
    to_model=_build_minimax,
    write=_write_minimax,
    tensors=decoder.MIXTRAL_TENSORS
    | {
        "mixer.project": "self_attn.qkv_proj",
        "mixer.gate": "self_attn.output_gate",
        "mixer.norm": "self_attn.norm",
        "mixer.out": "self_attn.out_proj",
    },
    stacked_tensors=decoder.name_stacked_experts(),
)

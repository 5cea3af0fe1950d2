"""LFM2 and LFM3: gated short convolutions in most layers, attention in the others; with experts and without."""

from __future__ import annotations

from typing import Any

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import drop_keys, expand_names, map_same_names
from fivefold.model.huggingface.family import Family, Supported
from fivefold.model.huggingface.mapping import build_model, find_period, read_experts, read_mixers
from fivefold.model.huggingface.rope import KINDS as ROPE_KINDS
from fivefold.model.huggingface.rope import read_rope_tables
from fivefold.model.mixers.kinds import MixerName
from fivefold.model.spec import Model

KINDS: dict[str, MixerName] = {"conv": "short_conv", "full_attention": "attention"}
NAMES = {ours: theirs for theirs, ours in KINDS.items()}


def _read_layers(config: Config) -> dict[str, Any]:
    """Return the token mixers, and attention with norms of queries and keys per head."""
    layers = range(config.num_hidden_layers)
    attends = layers if config.full_attention_layers is None else config.full_attention_layers
    default: tuple[MixerName, ...] = tuple("attention" if layer in attends else "short_conv" for layer in layers)
    geometry: dict[MixerName, Any] = {"short_conv": {"taps": config.conv_taps, "bias": config.conv_bias}}
    mixers = read_mixers(config, geometry, kinds=KINDS, default=default)
    return {**mixers, "qk_norm": "head"}


def _build_lfm2(config: Config) -> Model:
    """Build LFM2, whose ``intermediate_size`` is by default that of an MLP without a gate."""
    ffn = config.intermediate_size
    if config.rounds_intermediate_size and ffn is not None:
        ffn = int(2 * ffn / 3)
        if config.intermediate_multiplier is not None:
            multiple = config.intermediate_multiple
            ffn = -(-int(config.intermediate_multiplier * ffn) // multiple) * multiple
    return build_model(config, **_read_layers(config), ffn=ffn)


def _build_lfm2_moe(config: Config) -> Model:
    """Build LFM2 with experts after the first dense layers, routed by sigmoids and a balancing bias."""
    moe = read_experts(
        config,
        dense_layers=min(config.first_k_dense_replace, config.num_hidden_layers),
        score="sigmoid",
        balance="free" if config.use_routing_bias else "none",
        aux_coefficient=0.0,
    )
    return build_model(config, **_read_layers(config), moe=moe)


def _build_lfm3(config: Config) -> Model:
    """Build LFM3: some attention slides, its heads have gates, and norms follow each branch."""
    layers = range(config.num_hidden_layers)
    kinds = {**KINDS, "sliding_attention": "attention"}
    default = ["full_attention" if i % 4 == 2 else "conv" if i % 4 or not i else "sliding_attention" for i in layers]
    types = tuple(default) if config.layer_types is None else config.layer_types
    geometry: dict[MixerName, Any] = {"short_conv": {"taps": config.conv_taps, "bias": config.conv_bias}}
    mixers = read_mixers(config.replace(layer_types=types), geometry, kinds=kinds, default=())
    slides = tuple(kind == "sliding_attention" for kind in types)
    rope = read_rope_tables(
        config,
        slides=[sliding for kind, sliding in zip(types, slides, strict=True) if kind != "conv"],
        has_partial_rotary=False,
        kinds={**ROPE_KINDS, "proportional": "proportional"},
    )
    fields: dict[str, Any] = {
        "block": "sandwich" if config.use_post_norm else "pre",
        "qk_norm": "head",
        "output_gate": config.use_attention_gate,
        "gate_per_head": config.use_attention_gate,
    }
    if any(slides):
        if config.sliding_window is None:
            raise config.mistake("layer_types has sliding-window layers, but sliding_window is missing; give it")
        fields |= {"window": config.sliding_window, "window_pattern": find_period(slides)}
    return build_model(config, **mixers, **(rope or {"position": "none"}), **fields)


def _write_lfm3(model: Model) -> dict[str, Any]:
    """Return the kinds of layers, and their rotary tables."""
    kinds = {"short_conv": "conv", "attention": "full_attention"}
    types = [
        "sliding_attention" if model.has_window(layer) else kinds.get(model.mixer_name(layer), "full_attention")
        for layer in range(model.layers)
    ]
    return {
        **_write_layers(model),
        **decoder.write_rope_tables(model),
        "layer_types": types,
        "use_sandwich_norm": model.block == "sandwich",
        "use_attention_gate": model.output_gate,
    }


def _write_layers(model: Model) -> dict[str, Any]:
    conv = model.short_conv
    return {
        "layer_types": [NAMES.get(model.mixer_name(layer), "full_attention") for layer in range(model.layers)],
        **({"conv_L_cache": conv.taps, "conv_bias": conv.bias} if conv else {}),
    }


KEYS = {
    "tie_embedding": "tie_word_embeddings",
    **drop_keys(decoder.GROUPED, "rms_norm_eps", "attention_dropout"),
    "norm_eps": "norm_epsilon",
    "conv_L_cache": "conv_taps",
    **map_same_names("conv_bias layer_types"),
}
DEFAULTS = {
    **expand_names(vocab=65_536, width=2560, ffn=12_288, kv_heads=8, positions=128_000),
    "norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "rope_theta": 1_000_000.0,
}
TENSORS = decoder.TENSORS | {
    "head.norm": "model.embedding_norm",
    "norm1": "operator_norm",
    "norm2": "ffn_norm",
    "attention.q_norm": "self_attn.q_layernorm",
    "attention.k_norm": "self_attn.k_layernorm",
    "attention.out": "self_attn.out_proj",
    "mixer.project": "conv.in_proj",
    "mixer.conv": "conv.conv",
    "mixer.out": "conv.out_proj",
    "mlp.gate": "feed_forward.w1",
    "mlp.up": "feed_forward.w3",
    "mlp.down": "feed_forward.w2",
}
LFM2 = Family(
    model_type="lfm2",
    architecture="Lfm2ForCausalLM",
    keys={
        "block_ff_dim": "intermediate_size",
        **KEYS,
        "block_auto_adjust_ff_dim": "rounds_intermediate_size",
        "block_multiple_of": "intermediate_multiple",
        "block_ffn_dim_multiplier": "intermediate_multiplier",
        "full_attn_idxs": "full_attention_layers",
    },
    defaults={**DEFAULTS, "rounds_intermediate_size": True},
    to_model=_build_lfm2,
    write=lambda model: {**_write_layers(model), "block_auto_adjust_ff_dim": False},
    tensors=TENSORS,
)
LFM2_MOE = Family(
    model_type="lfm2_moe",
    architecture="Lfm2MoeForCausalLM",
    keys={
        **KEYS,
        **map_same_names("num_experts num_experts_per_tok moe_intermediate_size norm_topk_prob routed_scaling_factor"),
        "num_dense_layers": "first_k_dense_replace",
        "use_expert_bias": "use_routing_bias",
    },
    defaults={
        **DEFAULTS,
        "hidden_size": 2048,
        "intermediate_size": 7168,
        **expand_names(expert_ffn=1792, experts=32, topk=4),
        "first_k_dense_replace": 2,
    },
    to_model=_build_lfm2_moe,
    write=lambda model: {**_write_layers(model), "use_expert_bias": bool(model.moe and model.moe.balance == "free")},
    tensors=TENSORS
    | {
        "moe.router": "feed_forward.gate",
        "moe.bias": "feed_forward.expert_bias",
        "moe.experts.gate": "feed_forward.experts.{}.w1.weight",
        "moe.experts.up": "feed_forward.experts.{}.w3.weight",
        "moe.experts.down": "feed_forward.experts.{}.w2.weight",
    },
    stacked_tensors=decoder.name_stacked_experts("feed_forward"),
)

LFM3 = Family(
    model_type="lfm3",
    architecture="Lfm3ForCausalLM",
    keys={
        **drop_keys(KEYS, "tie_embedding", "rope_theta", "rope_scaling", "original_max_position_embeddings"),
        **map_same_names("sliding_window use_attention_gate attention_dropout"),
        "use_sandwich_norm": "use_post_norm",
    },
    defaults={
        **DEFAULTS,
        **expand_names(vocab=128_000, width=2048, ffn=7680, layers=24, heads=16, kv_heads=4, head_dim=128),
        "conv_taps": 7,
        "sliding_window": 256,
        "use_post_norm": True,
        "use_attention_gate": True,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        },
    },
    supported={"attention_bias": Supported((False,), "biases of queries, keys and values without one of their gate")},
    to_model=_build_lfm3,
    write=_write_lfm3,
    tensors=TENSORS
    | {
        "norm1_post": "post_operator_norm",
        "norm2_post": "post_ffn_norm",
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
        "attention.out": "self_attn.o_proj",
        "attention.gate": "self_attn.gate_proj",
    },
)

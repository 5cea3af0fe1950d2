"""RecurrentGemma (Griffin): RG-LRUs in two of three layers, attention with a sliding window in the third."""

from __future__ import annotations

import struct
from typing import Any

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import drop_keys, expand_names, map_same_names
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.mapping import build_model, find_period
from fivefold.model.huggingface.rope import read_rope
from fivefold.model.mixers.kinds import MixerName
from fivefold.model.spec import Model

KINDS: dict[str, MixerName] = {"recurrent": "rg_lru", "attention": "attention"}
NAMES = {ours: theirs for theirs, ours in KINDS.items()}
MAX_REPEATS = 100  # of ``block_types``, however many layers there are


def _build(config: Config) -> Model:
    """Build RecurrentGemma; half of ``intermediate_size`` is the width of an MLP."""
    blocks = config.block_types or ("recurrent", "recurrent", "attention")
    if unknown := sorted(set(blocks) - KINDS.keys()):
        raise config.mistake(f"block type {unknown[0]!r} is not supported; supported: recurrent and attention")
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    if len(blocks) * MAX_REPEATS < layers:
        raise config.mistake(
            f"block_types has {len(blocks)} kinds and repeats {MAX_REPEATS} times at most, less than {layers} layers; "
            "name more kinds"
        )
    if config.intermediate_size is None or config.intermediate_size < 2:
        raise config.mistake(f"intermediate_size={config.intermediate_size} leaves no MLP; give a number of 2 or more")
    mixers = tuple(KINDS[blocks[layer % len(blocks)]] for layer in range(layers))
    fields: dict[str, Any] = {
        "head_dim": config.head_dim or config.hidden_size // heads,
        "ffn": config.intermediate_size // 2,
    }
    if "rg_lru" in mixers:
        net = {"inner": config.lru_width or config.hidden_size, "blocks": heads, "taps": config.conv_taps}
        fields |= {"mixers": find_period(mixers), "rg_lru": net}
    return build_model(
        config,
        **fields,
        **read_rope(config, has_partial_rotary=True, kinds={}),
        window=config.sliding_window,
        out_bias=True,
        mlp_bias=True,
        norm_plus_one=True,
        embedding_scale=_round_to_bf16(config.hidden_size**0.5),
        logit_softcap=config.final_logit_softcapping,
    )


def _round_to_bf16(value: float) -> float:
    """Return ``value`` as a bf16 number, in which transformers stores the factor on the embedding."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    (rounded,) = struct.unpack("<f", struct.pack("<I", bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000))
    return float(rounded)


def _write(model: Model) -> dict[str, Any]:
    """Return the keys of this family's ``config.json`` for ``model``."""
    net = model.rg_lru
    return {
        "block_types": [NAMES.get(model.mixer_name(layer), "attention") for layer in range(model.layers)],
        "intermediate_size": 2 * model.ffn,
        "partial_rotary_factor": model.rope_fraction,
        **({"lru_width": net.inner, "conv1d_width": net.taps} if net else {}),
    }


RECURRENT_GEMMA = Family(
    model_type="recurrent_gemma",
    architecture="RecurrentGemmaForCausalLM",
    keys=drop_keys(decoder.GROUPED, "max_position_embeddings", "partial_rotary_factor")
    | map_same_names("attention_bias partial_rotary_factor block_types lru_width")
    | {
        "hidden_activation": "hidden_act",
        "attention_window_size": "sliding_window",
        "sliding_window": "sliding_window",
        "conv1d_width": "conv_taps",
        "logits_soft_cap": "final_logit_softcapping",
    },
    defaults={
        **expand_names(vocab=256_000, width=2560, ffn=7680, layers=26, heads=10, positions=8192),
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "sliding_window": 2048,
        "conv_taps": 4,
        "partial_rotary_factor": 0.5,
        "final_logit_softcapping": 30.0,
    },
    to_model=_build,
    write=_write,
    tensors={
        "blocks": "model.layers.{}",
        "embed.tokens": "model.embed_tokens",
        "head.norm": "model.final_norm",
        "head.out": "lm_head",
        "norm1": "temporal_pre_norm",
        "norm2": "channel_pre_norm",
        **{f"attention.{name}": f"temporal_block.{name}_proj" for name in "qkv"},
        "attention.out": "temporal_block.o_proj",
        "mixer.x": "temporal_block.linear_x",
        "mixer.y": "temporal_block.linear_y",
        "mixer.conv": "temporal_block.conv_1d",
        **{
            f"mixer.{ours}.{leaf}": f"temporal_block.rg_lru.{theirs}_{leaf}"
            for ours, theirs in (("input_gate", "input_gate"), ("rate_gate", "recurrent_gate"))
            for leaf in ("weight", "bias")
        },
        "mixer.rate": "temporal_block.rg_lru.recurrent_param",
        "mixer.out": "temporal_block.linear_out",
        **{f"mlp.{name}": f"mlp_block.{name}_proj" for name in ("gate", "up", "down")},
    },
)

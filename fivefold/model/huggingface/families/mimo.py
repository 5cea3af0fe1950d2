"""MiMo-V2-Flash: sliding layers with sinks and twice the key heads of others, values narrower than keys, experts."""

from __future__ import annotations

from typing import Any

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import drop_keys, expand_names, map_same_names
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.mapping import build_model, read_biased_experts, read_mlp_layer_types, read_windows
from fivefold.model.huggingface.rope import read_rope_tables
from fivefold.model.spec import Model


def _build_mimo(config: Config) -> Model:
    """Build MiMo-V2-Flash: the first and every sixth layer are full, and the first has no experts."""
    layers = config.num_hidden_layers
    if config.tokens_before is not None:
        config = config.replace(sliding_window=config.tokens_before + 1)
    windows = read_windows(config, default=tuple(layer > 0 and (layer + 1) % 6 > 0 for layer in range(layers)))
    pattern = windows["window_pattern"] or (True,) if windows else (False,)
    rope = read_rope_tables(config, slides=[pattern[layer % len(pattern)] for layer in range(layers)])
    kv_heads = config.num_key_value_heads or config.num_attention_heads
    fields: dict[str, Any] = {
        "value_dim": config.v_head_dim,
        "value_scale": 1.0 if config.value_scale is None else config.value_scale,
        "out_bias": False,
    }
    if windows:
        fields["sliding"] = rope.pop("sliding", {}) | {"kv_heads": 2 * kv_heads, "sinks": True}
    moe = read_biased_experts(config) | read_mlp_layer_types(config, dense=1)
    return build_model(config, **rope, **windows, **fields, moe=moe)


MIMO_V2_FLASH = Family(
    model_type="mimo_v2_flash",
    architecture="MiMoV2FlashForCausalLM",
    keys=drop_keys(decoder.KEYS, "rope_theta", "rope_scaling", "original_max_position_embeddings")
    | drop_keys(decoder.BIASED_EXPERT_KEYS, "n_shared_experts")
    | map_same_names("attention_bias sliding_window layer_types mlp_layer_types v_head_dim")
    | {"attention_value_scale": "value_scale", "sliding_window_size": "tokens_before"},
    defaults={
        **expand_names(vocab=152_576, ffn=16_384, layers=48, heads=64, kv_heads=4, head_dim=192, positions=131_072),
        **expand_names(expert_ffn=2048, experts=256, topk=8),
        "v_head_dim": 128,
        "norm_epsilon": 1e-5,
        "sliding_window": 129,
        "value_scale": 0.707,
        "partial_rotary_factor": 0.334,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.334},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.334},
        },
    },
    to_model=_build_mimo,
    write=decoder.write_rope_tables,
    tensors=decoder.BIASED_EXPERT_TENSORS | {"attention.sinks": "self_attn.attention_sink_bias"},
    stacked_tensors=decoder.name_stacked_experts() | {"attention.sinks": "self_attn.sinks"},
)

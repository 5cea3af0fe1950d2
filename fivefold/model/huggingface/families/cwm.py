"""Code World Model: Llama with a sliding window in three of four layers."""

from __future__ import annotations

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import expand_names, map_same_names
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.mapping import build_model, list_sliding_layers, read_windows
from fivefold.model.spec import Model


def _build_cwm(config: Config) -> Model:
    """Build CWM, in which the first of four layers is full."""
    default = list_sliding_layers(config.num_hidden_layers, period=4, full=0)
    windows = read_windows(config, default=default)
    return build_model(config, **windows)


CWM = Family(
    model_type="cwm",
    architecture="CwmForCausalLM",
    keys=decoder.KEYS | map_same_names("mlp_bias sliding_window layer_types"),
    defaults={
        **expand_names(vocab=128_256, width=6144, ffn=21_504, layers=64, heads=48, kv_heads=8, positions=131_072),
        "head_dim": 128,
        "norm_epsilon": 1e-5,
        "sliding_window": 8192,
        "rope_theta": 1_000_000.0,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
    },
    to_model=_build_cwm,
    write=lambda model: decoder.write_layer_types(model) | decoder.write_unscaled_rope(model),
)

"""SmolLM3."""

from __future__ import annotations

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import expand_names, map_same_names
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.mapping import build_model, find_period, list_rotating_layers, read_windows
from fivefold.model.spec import Model


def _build_smollm3(config: Config) -> Model:
    """Build SmolLM3: every fourth layer has no positions, or those that are listed."""
    rotate = list_rotating_layers(config, listed=config.no_rope_layers)
    slide = config.use_sliding_window and config.sliding_window is not None
    slides = read_windows(config, default=tuple(slide and not rotates for rotates in rotate))
    return build_model(config, **slides, rope_pattern=() if all(rotate) else find_period(rotate))


SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    keys=decoder.KEYS
    | map_same_names(
        "attention_bias mlp_bias use_sliding_window sliding_window layer_types no_rope_layers no_rope_layer_interval"
    ),
    defaults={
        **expand_names(vocab=128_256, width=2048, ffn=11_008, layers=36, heads=16, kv_heads=4, positions=32_768),
        "rope_theta": 2_000_000.0,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
    },
    to_model=_build_smollm3,
)

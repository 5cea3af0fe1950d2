"""Command-R, R+, R7B and A: parallel attention and MLP with one norm without bias, scaled logits."""

from __future__ import annotations

from typing import Any

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import same
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.mapping import build_model, read_attention_bias, read_windows
from fivefold.model.huggingface.rope import read_rope
from fivefold.model.spec import Model

KEYS = decoder.LAYER_NORM_KEYS | {"layer_norm_eps": "norm_epsilon"} | same("attention_bias logit_scale")
DEFAULTS = {
    **decoder.DEFAULTS,
    "vocab_size": 256_000,
    "hidden_size": 8192,
    "intermediate_size": 22_528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
    "norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "logit_scale": 0.0625,
}


def _build_command(config: Config, **of_family: Any) -> Model:
    fields = {"norm": "layernorm", "norm_bias": False, "block": "parallel_shared", "logit_scale": config.logit_scale}
    return build_model(config, **read_rope(config), **read_attention_bias(config), **fields, **of_family)


def _build_cohere(config: Config) -> Model:
    """Build Command-R and R+; the latter norms queries and keys, with a weight for each head."""
    return _build_command(config, qk_norm="heads" if config.use_qk_norm else "none")


def _build_cohere2(config: Config) -> Model:
    """Build Command-R7B and A, in which only sliding-window layers rotate."""
    layers = range(config.num_hidden_layers)
    default = tuple((layer + 1) % config.sliding_window_pattern != 0 for layer in layers)
    slides = read_windows(config, default=default)
    if not slides:
        return _build_command(config, position="none")
    return _build_command(config, **slides, rope_pattern=slides["window_pattern"])


COHERE = Family(
    model_type="cohere",
    architecture="CohereForCausalLM",
    keys=KEYS | same("use_qk_norm"),
    defaults={**DEFAULTS, "rope_theta": 500_000.0},
    to_model=_build_cohere,
    tensors=decoder.TENSORS,
    interleaved_rotary=True,
)
COHERE2 = Family(
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    keys=KEYS | same("sliding_window layer_types sliding_window_pattern"),
    defaults={**DEFAULTS, "sliding_window": 4096, "sliding_window_pattern": 4},
    to_model=_build_cohere2,
    tensors=decoder.TENSORS,
    interleaved_rotary=True,
)

FAMILIES = (COHERE, COHERE2)

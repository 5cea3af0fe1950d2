"""Gemma 1, 2 and 3, and VaultGemma."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import expand_names, map_same_names
from fivefold.model.huggingface.family import Family, Supported, Wrapper
from fivefold.model.huggingface.mapping import build_model, read_windows
from fivefold.model.huggingface.rope import read_gemma3_rope
from fivefold.model.spec import Model

KEYS = (
    decoder.GROUPED
    | {"hidden_activation": "hidden_act"}
    | map_same_names(
        "attention_bias query_pre_attn_scalar sliding_window layer_types attn_logit_softcapping final_logit_softcapping"
    )
)
SUPPORTED = {"use_bidirectional_attention": Supported((False, None), "attention that is not causal")}
DEFAULTS = {
    **expand_names(width=2304, ffn=9216, layers=26, heads=8, kv_heads=4, head_dim=256),
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
TENSORS = decoder.TENSORS | {
    "norm1_post": "post_attention_layernorm",
    "norm2": "pre_feedforward_layernorm",
    "norm2_post": "post_feedforward_layernorm",
}


def _build_gemma1(config: Config) -> Model:
    """Build Gemma 1: ``gelu`` in its files means the approximation by tanh."""
    if config.hidden_act == "gelu":
        config = config.replace(hidden_act="gelu_pytorch_tanh")
    return build_model(config, norm_plus_one=True, embedding_scale=config.hidden_size**0.5)


def _build_gemma(config: Config, *, slides: tuple[bool, ...], **of_family: Any) -> Model:
    """Return the model of a Gemma config; ``slides``: which layers have a sliding window by default."""
    return build_model(
        config,
        **read_windows(config, default=slides),
        norm_plus_one=True,
        block="sandwich",
        attention_scale=config.query_pre_attn_scalar**-0.5,
        logit_softcap=config.final_logit_softcapping,
        embedding_scale=config.hidden_size**0.5,
        **of_family,
    )


def _build_gemma2(config: Config) -> Model:
    """Build Gemma 2: every other layer has a sliding window; scores and logits are capped."""
    return _build_gemma(config, slides=(True, False), attention_softcap=config.attn_logit_softcapping)


def _build_gemma3(config: Config) -> Model:
    """Build Gemma 3: five of six layers have a sliding window and a rotary base of their own; QK norms per head."""
    if config.attn_logit_softcapping is not None:
        raise config.mistake(
            "attn_logit_softcapping is not supported, as the code of Gemma 3 does not apply it; remove it"
        )
    slides = (*(True,) * (config.sliding_window_pattern - 1), False)
    return _build_gemma(config, slides=slides, **read_gemma3_rope(config), qk_norm="head")


GEMMA = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    keys=decoder.KEYS | map_same_names("attention_bias"),
    defaults={
        **expand_names(vocab=256_000, width=3072, ffn=24_576, layers=28, heads=16, kv_heads=16, positions=8192),
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    supported=SUPPORTED,
    to_model=_build_gemma1,
)
GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    keys=KEYS,
    defaults={
        **DEFAULTS,
        "vocab_size": 256_000,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    supported=SUPPORTED,
    to_model=_build_gemma2,
    tensors=TENSORS,
)
# VaultGemma: Gemma 2 without norms after attention and MLP.
VAULTGEMMA = replace(
    GEMMA2,
    model_type="vaultgemma",
    architecture="VaultGemmaForCausalLM",
    supported={},
    to_model=lambda config: _build_gemma2(config).replace(block="pre"),
    tensors=decoder.TENSORS | {"norm2": "pre_feedforward_layernorm"},
)
GEMMA3_TEXT = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    keys=KEYS | map_same_names("rope_local_base_freq sliding_window_pattern"),
    defaults={
        **DEFAULTS,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "sliding_window_pattern": 6,
    },
    supported=SUPPORTED,
    to_model=_build_gemma3,
    tensors=TENSORS,
)
WRAPPERS = (
    Wrapper("gemma3", "Gemma3ForConditionalGeneration", text="gemma3_text", tied=True),
    Wrapper("shieldgemma2", "Gemma3ForConditionalGeneration", text="gemma3_text", tied=False, inner_ties=True),
)

"""Hugging Face ``config.json`` -> ``Model``: one small mapping per family; defaults of missing keys are data.

A config with a feature that ``Model`` cannot represent raises ``Mistake``; nothing is guessed.
Source: configuration and modelling code of transformers 5.23, against which the tests check every family.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Iterable
from difflib import SequenceMatcher
from typing import Any, NamedTuple

from fivefold.model.huggingface.config import Config, attention_bias, model, read_config, windows
from fivefold.model.huggingface.experts import deepseek_v2, deepseek_v3, gpt_oss, mixtral, qwen3_moe
from fivefold.model.huggingface.keys import unread
from fivefold.model.huggingface.rope import rope, rope_by_layers
from fivefold.model.spec import Model
from fivefold.record import Mistake


def from_config(config: dict[str, Any], *, name: str, source: str = "") -> Model:
    """Build the model that a ``config.json`` describes.

    ``config``: the file's dictionary, of any transformers version; ``name``: the model's name in messages.
    Raises ``Mistake`` for an unknown architecture or an unsupported feature.
    """
    kind, values = _text_config(config, name=name)
    family = FAMILIES[kind]
    found = family.mapping(read_config(values, family=kind, name=name))
    return found.replace(source=source or f"Hugging Face config.json, {family.architecture}")


def remark(config: dict[str, Any], *, name: str) -> str | None:
    """One line that lists keys which may change the model but which the family's code ignores; None without any."""
    kind, values = _text_config(config, name=name)
    if not (keys := list(unread(values, family=kind))):
        return None
    said = ", ".join(f"{key}={reprlib.repr(values[key])}" for key in keys)
    return f"{name}: not read, nor by transformers' {FAMILIES[kind].architecture}: {said}"


def interleaves(config: dict[str, Any], *, name: str) -> bool:
    """Whether the rotary pairs of latent attention are interleaved in the file, as in every published one."""
    kind, values = _text_config(config, name=name)
    return bool(read_config(values, family=kind, name=name).rope_interleave)


def model_type(config: dict[str, Any], *, name: str) -> str:
    """The family, from ``architectures`` if given, as remote code may have its own ``model_type``, else from that."""
    architectures = config.get("architectures")
    if isinstance(architectures, list) and architectures:
        wanted, known = str(architectures[0]), {family.architecture: kind for kind, family in FAMILIES.items()}
    else:
        wanted, known = str(config.get("model_type")), {kind: kind for kind in FAMILIES}
    if wanted not in known:
        raise Mistake(
            f"{name}: architecture {reprlib.repr(wanted)} is not known; the nearest of {len(FAMILIES)} is "
            f"{_nearest(wanted, known)}; or write its shape as in examples/models/mixture.toml"
        )
    said = FAMILIES.get(str(config.get("model_type")), FAMILIES[known[wanted]])
    if said.architecture != FAMILIES[known[wanted]].architecture:  # transformers follows model_type
        raise Mistake(f"{name}: model_type {config['model_type']!r} is not that of {wanted}; correct one of them")
    return known[wanted]


def _nearest(wanted: str, known: Iterable[str]) -> str:
    """The known name most similar to ``wanted``, ignoring suffixes such as ForCausalLM."""
    told = {re.sub("For[A-Z].*|LMHead.*", "", name).lower(): name for name in known}
    word = re.sub("For[A-Z].*|LMHead.*", "", wanted).lower()
    return told[max(told, key=lambda name: SequenceMatcher(None, word, name).ratio())]


def _text_config(config: dict[str, Any], *, name: str) -> tuple[str, dict[str, Any]]:
    """The family and the keys of the text model, which a multimodal config has under ``text_config``."""
    kind = model_type(config, name=name)
    if not FAMILIES[kind].wrapper:
        return kind, config
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise Mistake(f"{name}: a multimodal config without a text_config table")
    return kind, {**text, "tie_word_embeddings": config.get("tie_word_embeddings", True)}  # only the outer key is read


def _llama(config: Config) -> Model:
    return model(config, **rope(config), **attention_bias(config), mlp_bias=config.mlp_bias)


def _mistral(config: Config) -> Model:
    return model(config, **rope(config), **windows(config))


def _qwen_windows(config: Config) -> dict[str, Any]:
    """Qwen: if windows are used, layers from ``max_window_layers`` on have a sliding window."""
    used = config.use_sliding_window and config.sliding_window is not None
    layers = range(config.num_hidden_layers)
    return windows(config, default=tuple(used and layer >= config.max_window_layers for layer in layers))


def _qwen2(config: Config) -> Model:
    return model(config, **rope(config), **_qwen_windows(config), qkv_bias=True)


def _qwen3(config: Config) -> Model:
    return model(config, **rope(config), **_qwen_windows(config), **attention_bias(config), qk_norm="head")


def _gemma(config: Config, *, slides: tuple[bool, ...], **of_family: Any) -> Model:
    return model(
        config,
        **windows(config, default=slides),
        **attention_bias(config),
        norm_plus_one=True,
        block="sandwich",
        attention_scale=config.query_pre_attn_scalar**-0.5,
        logit_softcap=config.final_logit_softcapping,
        embedding_scale=config.hidden_size**0.5,
        **of_family,
    )


def _gemma2(config: Config) -> Model:
    return _gemma(config, slides=(True, False), **rope(config), attention_softcap=config.attn_logit_softcapping)


def _gemma3(config: Config) -> Model:
    if config.attn_logit_softcapping is not None:
        raise config.mistake("attn_logit_softcapping in Gemma 3, whose code does not apply it, is not supported")
    slides = (*(True,) * (config.sliding_window_pattern - 1), False)
    return _gemma(config, slides=slides, **rope_by_layers(config), qk_norm="head")


def _phi3(config: Config) -> Model:
    # The file fuses q, k, v and gate, up into two matrices: the same weights. "yarn" was an early name of longrope.
    kinds = dict.fromkeys(("longrope", "su", "yarn"), "longrope")
    return model(config, **rope(config, partly=True, kinds=kinds), **windows(config))


def _gpt2(config: Config) -> Model:
    return model(
        config,
        norm="layernorm",
        mlp="plain",
        mlp_bias=True,
        ffn=config.intermediate_size or 4 * config.hidden_size,
        kv_heads=config.num_attention_heads,
        position="learned",
        qkv_bias=True,
        out_bias=True,
        attention_scale=None if config.scale_attn_weights else 1.0,
    )


def _gpt_neox(config: Config) -> Model:
    head_dim = config.hidden_size // config.num_attention_heads
    if config.head_dim not in (None, head_dim):
        raise config.mistake(
            f"head_dim={config.head_dim} is not hidden_size / num_attention_heads = {head_dim}: the family's code "
            "would rotate by the one and attend by the other; remove it"
        )
    fields = {"norm": "layernorm", "mlp": "plain", "mlp_bias": True, "kv_heads": config.num_attention_heads}
    block = "parallel" if config.use_parallel_residual else "pre"
    return model(config, **rope(config, partly=True), **attention_bias(config), **fields, block=block)


def _nemotron(config: Config) -> Model:
    fields = {"norm": "layernorm", "norm_plus_one": True, "mlp": "plain", "mlp_bias": config.mlp_bias}
    return model(config, **rope(config, partly=True), **attention_bias(config), **fields)


def _olmo2(config: Config) -> Model:
    return model(config, **rope(config), **attention_bias(config), block="post", qk_norm="full")


class Family(NamedTuple):
    """One ``model_type``: its class in transformers and our mapping."""

    architecture: str
    mapping: Callable[[Config], Model]
    wrapper: bool = False  # a multimodal model, of which only ``text_config`` is read


FAMILIES = {
    "llama": Family("LlamaForCausalLM", _llama),
    "mistral": Family("MistralForCausalLM", _mistral),
    "mixtral": Family("MixtralForCausalLM", mixtral),
    "qwen2": Family("Qwen2ForCausalLM", _qwen2),
    "qwen3": Family("Qwen3ForCausalLM", _qwen3),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", qwen3_moe),
    "gemma2": Family("Gemma2ForCausalLM", _gemma2),
    "gemma3_text": Family("Gemma3ForCausalLM", _gemma3),
    "gemma3": Family("Gemma3ForConditionalGeneration", _gemma3, wrapper=True),
    "phi3": Family("Phi3ForCausalLM", _phi3),
    "gpt2": Family("GPT2LMHeadModel", _gpt2),
    "gpt_neox": Family("GPTNeoXForCausalLM", _gpt_neox),
    "nemotron": Family("NemotronForCausalLM", _nemotron),
    "kimi_k2": Family("DeepseekV3ForCausalLM", deepseek_v3),
    "deepseek_v2": Family("DeepseekV2ForCausalLM", deepseek_v2),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", deepseek_v3),
    "olmo2": Family("Olmo2ForCausalLM", _olmo2),
    "gpt_oss": Family("GptOssForCausalLM", gpt_oss),
}

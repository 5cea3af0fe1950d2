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

from fivefold.model.huggingface import dense
from fivefold.model.huggingface.config import Config, read_config
from fivefold.model.huggingface.experts import (
    deepseek_v2,
    deepseek_v3,
    glm4_moe,
    gpt_oss,
    granitemoe,
    llama4,
    minimax_m2,
    mixtral,
    qwen3_moe,
)
from fivefold.model.huggingface.keys import describe_quantization, unread
from fivefold.model.huggingface.model_types import MODEL_TYPES
from fivefold.model.huggingface.remote_code import describe_assumed, require_shape
from fivefold.model.spec import Model
from fivefold.record import Mistake

_LINEAR = "three of four of its layers are linear attention (gated delta rule), which is neither counted nor trained"
# Architectures that people ask for, by class and by model_type, and what they need that ``Model`` has no field for.
LACKS = {"Qwen3NextForCausalLM": _LINEAR, "qwen3_next": _LINEAR}


def from_config(config: dict[str, Any], *, name: str, source: str = "") -> Model:
    """Build the model that a ``config.json`` describes.

    ``config``: the file's dictionary, of any transformers version; ``name``: the model's name in messages.
    Raises ``Mistake`` for an unknown architecture or an unsupported feature.
    """
    read = text_of(config, name=name)
    found = FAMILIES[read.family].mapping(read_config(read.values, family=read.family, name=name))
    return found.replace(source=source or f"Hugging Face config.json, {read.architecture}")


def remark(config: dict[str, Any], *, name: str) -> str | None:
    """One line that lists keys which may change the model but which the family's code ignores, or what was assumed of
    a model whose ``model_type`` is unknown, and whether the weights are quantized; None without any.
    """
    read = text_of(config, name=name)
    remarks = []
    if read.remote:
        remarks.append(describe_assumed(read.values, family=read.family, architecture=read.architecture))
    elif keys := list(unread(read.values, family=read.family)):
        said = ", ".join(f"{key}={reprlib.repr(read.values[key])}" for key in keys)
        remarks.append(f"not read, nor by transformers' {read.architecture}: {said}")
    if quantized := describe_quantization(config | read.values):
        remarks.append(quantized)
    return f"{name}: {'; '.join(remarks)}" if remarks else None


def interleaves(config: dict[str, Any], *, name: str) -> bool:
    """Whether the rotary pairs of latent attention are interleaved in the file, as in every published one."""
    read = text_of(config, name=name)
    return bool(read_config(read.values, family=read.family, name=name).rope_interleave)


class Text(NamedTuple):
    """The text model of a config: its family and keys; ``architecture``: the class of the whole."""

    family: str
    values: dict[str, Any]
    architecture: str
    wrapped: bool = False  # in a multimodal model
    remote: bool = False  # of an unknown ``model_type``, with all of its shape given


def text_of(config: dict[str, Any], *, name: str) -> Text:
    """The text model of ``config``, which a multimodal one has under ``text_config``; ``Mistake`` if it is not read."""
    kind = _model_type(config, name=name)
    if kind in FAMILIES:
        architecture, said = FAMILIES[kind].architecture, config.get("model_type")
        remote = said is not None and str(said) not in FAMILIES
        if remote:
            require_shape(config, family=kind, architecture=architecture, name=name)
        return Text(kind, config, architecture, remote=remote)
    wrapper = WRAPPERS[kind]
    values = config.get("text_config", config if wrapper.flat else None)
    if not isinstance(values, dict):
        raise Mistake(f"{name}: a multimodal config without a text_config table")
    said = values.get("model_type", wrapper.text)
    if said not in (wrapper.text, kind):
        raise Mistake(
            f"{name}: its text model is {reprlib.repr(said)}; of {wrapper.architecture} {wrapper.text} is read"
        )
    tied = config.get("tie_word_embeddings", wrapper.tied)  # only the outer key is read, but for old files
    if wrapper.flat:
        tied = tied or values.get("tie_word_embeddings", False)
    return Text(wrapper.text, {**values, "tie_word_embeddings": tied}, wrapper.architecture, wrapped=True)


def _model_type(config: dict[str, Any], *, name: str) -> str:
    """The family, from ``architectures`` if given, else from ``model_type``; a ``Mistake`` if the two contradict.

    transformers builds the class of ``model_type``. One that it does not know is of remote code, which may be one of
    our architectures by another name.
    """
    classes = {kind: read.architecture for kind, read in FAMILIES.items()}
    classes |= {kind: wrapper.architecture for kind, wrapper in WRAPPERS.items()}
    said = config.get("model_type")
    architectures = config.get("architectures")
    if isinstance(architectures, list) and architectures:
        wanted, known = str(architectures[0]), {architecture: kind for kind, architecture in reversed(classes.items())}
        known |= {read.published: kind for kind, read in FAMILIES.items() if read.published}
    else:
        wanted, known = str(config.get("model_type")), {kind: kind for kind in classes}
    if wanted in LACKS:
        raise Mistake(f"{name}: architecture {wanted!r} is not read: {LACKS[wanted]}")
    if wanted not in known:
        raise Mistake(
            f"{name}: architecture {reprlib.repr(wanted)} is not known; the nearest of {len(classes)} is "
            f"{_nearest(wanted, known)}; or write its shape as in examples/models/mixture.toml"
        )
    family = known[wanted]
    if said is None or classes.get(str(said)) == classes[family]:
        return str(said or family)
    if str(said) in MODEL_TYPES | classes.keys() or family in WRAPPERS:
        raise Mistake(
            f"{name}: model_type {reprlib.repr(said)} is not that of {wanted}, and transformers builds the class of "
            f"model_type; if the file is one of {wanted}, give model_type {family!r}"
        )
    return family


def _nearest(wanted: str, known: Iterable[str]) -> str:
    """The known name most similar to ``wanted``, ignoring suffixes such as ForCausalLM."""
    told = {re.sub("For[A-Z].*|LMHead.*", "", name).lower(): name for name in known}
    word = re.sub("For[A-Z].*|LMHead.*", "", wanted).lower()
    return told[max(told, key=lambda name: SequenceMatcher(None, word, name).ratio())]


class Family(NamedTuple):
    """One ``model_type``: its class in transformers and our mapping; ``published``: its class in published files."""

    architecture: str
    mapping: Callable[[Config], Model]
    published: str = ""


class Wrapper(NamedTuple):
    """A multimodal ``model_type``, of which only the text model is read: its class and the family of that model."""

    architecture: str
    text: str
    tied: bool  # a missing ``tie_word_embeddings``
    flat: bool = False  # published with the keys of the text model beside the others


FAMILIES = {
    "llama": Family("LlamaForCausalLM", dense.llama),
    "mistral": Family("MistralForCausalLM", dense.mistral),
    "mixtral": Family("MixtralForCausalLM", mixtral),
    "qwen2": Family("Qwen2ForCausalLM", dense.qwen2),
    "qwen2_5_vl_text": Family("Qwen2_5_VLTextModel", dense.qwen2_5_vl),
    "qwen3": Family("Qwen3ForCausalLM", dense.qwen3),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", qwen3_moe),
    "gemma2": Family("Gemma2ForCausalLM", dense.gemma2),
    "gemma3_text": Family("Gemma3ForCausalLM", dense.gemma3),
    "phi3": Family("Phi3ForCausalLM", dense.phi3),
    "gpt2": Family("GPT2LMHeadModel", dense.gpt2),
    "gpt_neox": Family("GPTNeoXForCausalLM", dense.gpt_neox),
    "nemotron": Family("NemotronForCausalLM", dense.nemotron),
    "granite": Family("GraniteForCausalLM", dense.granite),
    "granitemoe": Family("GraniteMoeForCausalLM", granitemoe),
    "starcoder2": Family("Starcoder2ForCausalLM", dense.starcoder2),
    "glm": Family("GlmForCausalLM", dense.glm),
    "glm4": Family("Glm4ForCausalLM", dense.glm4),
    "smollm3": Family("SmolLM3ForCausalLM", dense.smollm3),
    "cohere": Family("CohereForCausalLM", dense.cohere),
    "cohere2": Family("Cohere2ForCausalLM", dense.cohere2),
    "falcon": Family("FalconForCausalLM", dense.falcon),
    "deepseek_v2": Family("DeepseekV2ForCausalLM", deepseek_v2),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", deepseek_v3),
    "kimi_k2": Family("DeepseekV3ForCausalLM", deepseek_v3),
    "olmo2": Family("Olmo2ForCausalLM", dense.olmo2),
    "glm4_moe": Family("Glm4MoeForCausalLM", glm4_moe),
    "llama4_text": Family("Llama4ForCausalLM", llama4),
    "minimax_m2": Family("MiniMaxM2ForCausalLM", minimax_m2),
    "gpt_oss": Family("GptOssForCausalLM", gpt_oss),
    "internlm3": Family("LlamaForCausalLM", dense.internlm3, published="InternLM3ForCausalLM"),
    "iquestcoder": Family("LlamaForCausalLM", dense.llama, published="IQuestCoderForCausalLM"),
}

WRAPPERS = {
    "gemma3": Wrapper("Gemma3ForConditionalGeneration", "gemma3_text", tied=True),
    "llama4": Wrapper("Llama4ForConditionalGeneration", "llama4_text", tied=False),
    "mistral3": Wrapper("Mistral3ForConditionalGeneration", "mistral", tied=True),
    "qwen2_5_vl": Wrapper("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text", tied=False, flat=True),
}

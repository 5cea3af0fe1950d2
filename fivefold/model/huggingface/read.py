"""Read a Hugging Face ``config.json`` as a ``Model``: find its family, and let that family's record read it.

A config with a feature that ``Model`` cannot represent raises ``Mistake``; nothing is guessed.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable
from difflib import SequenceMatcher
from typing import Any, NamedTuple

from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.families import FAMILIES, WRAPPERS
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.keys import describe_quantization, list_unread, read_fields
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
    model = read.family.to_model(read_config(read.values, family=read.family, name=name))
    return model.replace(source=source or f"Hugging Face config.json, {read.architecture}")


def read_config(values: dict[str, Any], *, family: Family, name: str) -> Config:
    """Read the keys of ``family`` over its defaults; a ``Mistake`` names a key that is not supported."""
    given = read_fields(values, family=family, name=name)
    if given.get("rope_parameters", {}) is None:  # null: use the family's default
        del given["rope_parameters"]
    return Config.read({**family.defaults, **given, "name": name}, origin=name)


def remark(config: dict[str, Any], *, name: str) -> str | None:
    """One line that lists keys which may change the model but which the family's code ignores, or what was assumed of
    a model whose ``model_type`` is unknown, and whether the weights are quantized; None without any.
    """
    read = text_of(config, name=name)
    remarks = []
    if read.remote:
        remarks.append(describe_assumed(read.values, family=read.family))
    elif keys := list(list_unread(read.values, family=read.family)):
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

    family: Family
    values: dict[str, Any]
    architecture: str
    wrapped: bool = False  # in a multimodal model
    remote: bool = False  # of an unknown ``model_type``, with all of its shape given


def text_of(config: dict[str, Any], *, name: str) -> Text:
    """The text model of ``config``, which a multimodal one has under ``text_config``; ``Mistake`` if it is not read."""
    kind = _model_type(config, name=name)
    if kind in FAMILIES:
        family, said = FAMILIES[kind], config.get("model_type")
        remote = said is not None and str(said) not in FAMILIES
        if remote:
            require_shape(config, family=family, name=name)
        return Text(family, config, family.architecture, remote=remote)
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
    return Text(FAMILIES[wrapper.text], {**values, "tie_word_embeddings": tied}, wrapper.architecture, wrapped=True)


def _model_type(config: dict[str, Any], *, name: str) -> str:
    """The family, from ``architectures`` if given, else from ``model_type``; a ``Mistake`` if the two contradict.

    transformers builds the class of ``model_type``. One that it does not know is of remote code, which may be one of
    our architectures by another name.
    """
    classes = {kind: read.architecture for kind, read in (FAMILIES | WRAPPERS).items()}
    said = config.get("model_type")
    architectures = config.get("architectures")
    if isinstance(architectures, list) and architectures:
        wanted, known = str(architectures[0]), {architecture: kind for kind, architecture in reversed(classes.items())}
        known |= {read.published_architecture: kind for kind, read in FAMILIES.items() if read.published_architecture}
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

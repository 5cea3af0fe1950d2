"""Read a Hugging Face ``config.json`` as a ``Model``: find its family, and let that family's record read it.

A config with a feature that ``Model`` cannot represent raises ``UserError``.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import Any, NamedTuple

from fivefold.errors import UserError
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.families import FAMILIES, WRAPPERS
from fivefold.model.huggingface.family import Family, Wrapper
from fivefold.model.huggingface.keys import flatten_tables, list_unread, read_fields
from fivefold.model.huggingface.model_types import MODEL_TYPES, UNSUPPORTED_REASONS
from fivefold.model.huggingface.quantization import find_quantization, has_double_quantization, list_unquantized
from fivefold.model.huggingface.remote_code import REMOTE_CLASSES, translate_remote_config
from fivefold.model.huggingface.vision import UnreadTower, read_tower
from fivefold.model.spec import Model
from fivefold.model.vision import VisionTower

# Fields of ``Config`` that determine which weights a model has.
_SHAPE = """
    vocab_size hidden_size intermediate_size intermediate_size_mlp num_hidden_layers num_attention_heads
    num_key_value_heads head_dim max_position_embeddings tie_word_embeddings attention_bias mlp_bias
    use_parallel_residual use_qk_norm new_decoder_architecture multi_query parallel_attn num_ln_in_parallel_attn
    num_experts num_experts_per_tok moe_intermediate_size mlp_only_layers moe_layers interleave_moe_layer_step
    first_k_dense_replace n_shared_experts num_nextn_predict_layers q_lora_rank kv_lora_rank qk_nope_head_dim
    qk_rope_head_dim v_head_dim topk_of_layers
"""
SHAPE_FIELDS = frozenset(_SHAPE.split())
MAX_NAME_LENGTH = 100  # of a class or a model type that an error quotes: longer ones are cut
DEFAULT_IF_NULL = ("rope_parameters", "routed_scaling_factor")  # fields of which a null is the default of the family


def from_config(config: dict[str, Any], *, name: str, source: str = "") -> Model:
    """Build the model that a ``config.json`` describes.

    ``config``: the file's dictionary, of any transformers version; ``name``: the model's name in messages.
    Raises ``UserError`` for an unknown architecture or an unsupported feature.
    """
    text = find_text_model(config, name=name)
    model = text.family.to_model(read_config(text.values, family=text.family, name=name))
    if text.wrapped:
        model = model.replace(vision=_find_tower(config, text_width=model.width, name=name)[0])
    values = config | text.values
    return model.replace(
        source=source or f"Hugging Face config.json, {text.architecture}",
        quantization=find_quantization(values),
        double_quantization=has_double_quantization(values),
        unquantized=list_unquantized(values, model=model, family=text.family, name=name),
    )


def _find_tower(config: dict[str, Any], *, text_width: int, name: str) -> tuple[VisionTower | None, str]:
    """Return the vision tower of a multimodal config, or None and the reason why it is not read.

    A table of the config that is broken is a ``UserError``; defaults of its family that do not fit together are not.
    """
    unread = UserError if config.get("vision_config") is None else UnreadTower
    try:
        return read_tower(config, kind=_find_model_type(config, name=name), text_width=text_width, name=name), ""
    except unread as error:
        return None, str(error)


def read_config(values: dict[str, Any], *, family: Family, name: str) -> Config:
    """Read the keys of ``family`` over its defaults; a ``UserError`` names a key that is not supported."""
    given = read_fields(values, family=family, name=name)
    given = {key: value for key, value in given.items() if value is not None or key not in DEFAULT_IF_NULL}
    keys = {field: key for key, field in family.keys.items() if key in values}  # as the file spells them
    config = Config.read({**family.list_defaults(), **given, "name": name}, origin=name, options=keys)
    return _omit_mrope(config) if family.has_mrope else config


def _omit_mrope(config: Config) -> Config:
    """Return the config with plain rotary positions, as the three positions (mrope) of a text token are equal."""
    of_text = {
        field: {**given, "rope_type": "default"}
        for field in ("rope_scaling", "rope_parameters")
        if (given := getattr(config, field)) and given.get("rope_type", given.get("type")) == "mrope"
    }
    return config.replace(**of_text)


def describe_remark(config: dict[str, Any], *, name: str) -> str | None:
    """Return a one-line warning about a config; None if there is nothing to say.

    It lists keys that may change the model but that the family's code ignores, or what was assumed about a model whose
    ``model_type`` is unknown.
    """
    text = find_text_model(config, name=name)
    warnings = []
    if text.remote:
        warnings.append(describe_assumed(text.values, family=text.family))
    elif keys := list(list_unread(text.values, family=text.family)):
        ignored = ", ".join(f"{key}={reprlib.repr(text.values[key])}" for key in keys)
        warnings.append(f"keys without effect, as in transformers' {text.architecture}: {ignored}")
    if text.wrapped:
        if assumed := _describe_assumed_tie(config, text=text, name=name):
            warnings.append(assumed)
        width = from_config(config, name=name).width
        if reason := _find_tower(config, text_width=width, name=name)[1]:
            warnings.append(f"only the text model is read: {reason.removeprefix(f'{name}: ')}")
    return f"{name}: {'; '.join(warnings)}" if warnings else None


def is_rope_interleaved(config: dict[str, Any], *, name: str) -> bool:
    """Tell whether the rotary pairs of latent attention are interleaved in the file, as in all published ones."""
    text = find_text_model(config, name=name)
    return bool(read_config(text.values, family=text.family, name=name).rope_interleave)


def _describe_assumed_tie(config: dict[str, Any], *, text: Text, name: str) -> str:
    """Say that the head is tied by default if a multimodal config says nothing and its text family would not tie it.

    transformers takes the default of the outer class, but does not tie two different tensors of a checkpoint: published
    weights may have a head of their own.
    """
    wrapper = WRAPPERS[_find_model_type(config, name=name)]
    inner = config.get("text_config", {})
    if not wrapper.tied or "tie_word_embeddings" in config or not text.values["tie_word_embeddings"]:
        return ""
    if inner.get("tie_word_embeddings", text.family.defaults.get("tie_word_embeddings", False)):
        return ""
    untied = from_config(config | {"tie_word_embeddings": False}, name=name)
    return (
        f"tie_word_embeddings is missing, so the head is the embedding as in transformers' {wrapper.architecture}; if "
        "the checkpoint has an lm_head.weight, give tie_word_embeddings=false: "
        f"{untied.parameters / 1e9:.1f} B parameters"
    )


class Text(NamedTuple):
    """The text model of a config: its family and keys, those of tables too. ``architecture``: of the full model."""

    family: Family
    values: dict[str, Any]
    architecture: str
    wrapped: bool = False  # it is part of a multimodal model
    is_separable: bool = False  # of which transformers loads it alone
    remote: bool = False  # its ``model_type`` is unknown, but all of its shape is given


def find_text_model(config: dict[str, Any], *, name: str) -> Text:
    """Find the text model of ``config``, in a multimodal one under ``text_config``; ``UserError`` if not supported."""
    config = translate_remote_config(config, name=name)
    kind = _find_model_type(config, name=name)
    if kind in FAMILIES:
        family, model_type = FAMILIES[kind], config.get("model_type")
        remote = model_type is not None and str(model_type) not in FAMILIES
        values: Any = flatten_tables(config, family=family, name=name)
        if remote:
            require_shape(values, family=family, name=name)
        return Text(family, values, family.architecture, remote=remote)
    wrapper = WRAPPERS[kind]
    values = config.get("text_config", config if wrapper.flat else None)
    if not isinstance(values, dict):
        raise UserError(f"{name}: a multimodal config without a text_config table; give the complete config")
    model_type = str(values.get("model_type", wrapper.text))
    inner = FAMILIES.get(model_type if wrapper.any_text else wrapper.text)
    if inner is None or (not wrapper.any_text and model_type not in (wrapper.text, kind)):
        missing = f", which needs {UNSUPPORTED_REASONS[model_type]}" if model_type in UNSUPPORTED_REASONS else ""
        supported = "any supported family" if wrapper.any_text else wrapper.text
        raise UserError(
            f"{name}: the text model {model_type[:MAX_NAME_LENGTH]!r}{missing} is not supported; the text model of "
            f"{wrapper.architecture} may be {supported}"
        )
    tied = config.get("tie_word_embeddings", wrapper.tied)  # only the outer key is read, except in old files
    if wrapper.tied is None:
        tied = values.get("tie_word_embeddings", True)
    elif wrapper.flat or wrapper.inner_ties:
        tied = tied or values.get("tie_word_embeddings", wrapper.inner_ties)
    values = {**wrapper.missing, **values, "tie_word_embeddings": tied and wrapper.ties}
    values = flatten_tables(values, family=inner, name=name)
    return Text(inner, values, wrapper.architecture, wrapped=True, is_separable=wrapper.is_separable)


def _find_model_type(config: dict[str, Any], *, name: str) -> str:
    """Find the family, from ``architectures`` if given, else from ``model_type``; ``UserError`` if the two contradict.

    transformers builds the class of ``model_type``. A type that it does not know belongs to remote code, which may be a
    known architecture under another name.
    """
    given = config.get("model_type")
    architectures = config.get("architectures")
    by_class = isinstance(architectures, list) and bool(architectures)
    wanted = str(architectures[0] if by_class and architectures else given)
    family = _find_by_class(wanted) if by_class else wanted if _find_record(wanted) else None
    if family is None and _is_class_of(str(given), wanted):
        family = str(given)
    if family is None and (missing := UNSUPPORTED_REASONS.get(wanted) or UNSUPPORTED_REASONS.get(str(given))):
        raise UserError(f"{name}: architecture {wanted!r} is not supported: {missing}")
    if family is None:
        known = list(_list_names(by_class=by_class))
        raise UserError(
            f"{name}: architecture {wanted[:MAX_NAME_LENGTH]!r} is not one of the {len(FAMILIES) + len(WRAPPERS)} "
            f"supported ones;{_suggest_architecture(wanted, known)} `fivefold models --families` lists all; or "
            "describe the model as in examples/models/mixture.toml"
        )
    of_given, of_family = _find_record(str(given)), _find_record(family)
    assert of_family is not None
    if given is None or (of_given is not None and of_given.architecture == of_family.architecture):
        return str(given or family)
    if str(given) in MODEL_TYPES or of_given is not None or family in WRAPPERS:
        raise UserError(
            f"{name}: architectures says {wanted}, but model_type {str(given)[:MAX_NAME_LENGTH]!r} is another's, and "
            f"transformers follows model_type; for a {wanted}, set model_type to {family!r}"
        )
    return family


def _find_record(model_type: str) -> Family | Wrapper | None:
    return FAMILIES.get(model_type) or WRAPPERS.get(model_type)


def _find_by_class(architecture: str) -> str | None:
    """Return the model type of a class: that of the family in whose published files it is, or the first that has it."""
    families = FAMILIES.list_named(architecture)
    published = [family.model_type for family in families if family.published_architecture == architecture]
    built = [family.model_type for family in families if family.architecture == architecture]
    wrappers = [
        wrapper.model_type for wrapper in WRAPPERS.list_named(architecture) if wrapper.architecture == architecture
    ]
    return next(iter((*published, *built, *wrappers)), None)


def _is_class_of(model_type: str, architecture: str) -> bool:
    """Tell whether a class is that of a known model type, spelled otherwise than in transformers.

    Files of Kimi K2.5 (kimi_k25) name KimiK25ForConditionalGeneration, which transformers has as Kimi_K25….
    """
    stem = re.sub("For(CausalLM|ConditionalGeneration)$", "", architecture)
    spelled = stem != architecture and stem.lower() == model_type.replace("_", "")
    return spelled and _find_record(model_type) is not None


def _list_names(*, by_class: bool) -> Iterator[str]:
    """Yield all model types, or all classes."""
    for model_type, family in FAMILIES.items():
        yield family.architecture if by_class else model_type
        if by_class and family.published_architecture:
            yield family.published_architecture
    if by_class:
        yield from REMOTE_CLASSES
    for model_type, wrapper in WRAPPERS.items():
        yield wrapper.architecture if by_class else model_type


def _suggest_architecture(wanted: str, known: Iterable[str]) -> str:
    """Return a question for the known name most similar to ``wanted``, ignoring suffixes; empty if none is similar."""
    name_by_stem = {re.sub("For[A-Z].*|LMHead.*", "", name).lower(): name for name in known}
    close = get_close_matches(re.sub("For[A-Z].*|LMHead.*", "", wanted).lower(), name_by_stem, n=1, cutoff=0.7)
    return f" did you mean {name_by_stem[close[0]]}?" if close else ""


def require_shape(values: dict[str, Any], *, family: Family, name: str) -> None:
    """Raise a ``UserError`` if a config of remote code, of an unknown ``model_type``, does not give its full shape.

    The unknown class sets the defaults of missing keys.
    """
    kind = reprlib.repr(values.get("model_type"))
    known = f"or give model_type {family.model_type!r}, if it is one"
    if missing := [key for field, key in _list_missing_fields(values, family=family) if field in SHAPE_FIELDS]:
        raise UserError(
            f"{name}: model_type {kind} is not known, nor what its missing keys mean; to read it as "
            f"{family.architecture} give {', '.join(missing)}; {known}"
        )
    if unread := list(list_unread(values, family=family)):
        unread_text = ", ".join(f"{key}={reprlib.repr(values[key])}" for key in unread)
        raise UserError(
            f"{name}: model_type {kind} is not known, and {family.architecture} has no {unread_text}, which may change "
            f"the model; remove what changes nothing, {known}"
        )


def describe_assumed(values: dict[str, Any], *, family: Family) -> str:
    """Say as which architecture a config of an unknown ``model_type`` was read, and which values were assumed."""
    defaults = {name: field.default for name, field in Config.model_fields.items()} | family.list_defaults()
    assumed = [
        f"{key}={reprlib.repr(defaults[field])}"
        for field, key in _list_missing_fields(values, family=family)
        if defaults[field] not in (None, 0, 1, "", (), {})
    ]
    left = f"; assumed as there: {', '.join(assumed)}" if assumed else ""
    return f"model_type {reprlib.repr(values.get('model_type'))} is not known: read as {family.architecture}{left}"


def _list_missing_fields(values: dict[str, Any], *, family: Family) -> Iterator[tuple[str, str]]:
    """Yield the fields of a family that no key of ``values`` sets, each with its key."""
    keys = {field: key for key, field in family.keys.items()}
    given = {field for key, field in family.keys.items() if key in values}
    yield from ((field, key) for field, key in keys.items() if field not in given)

"""Configs of remote code: a known architecture whose ``model_type`` neither Fivefold nor transformers knows.

The unknown class sets the defaults of missing keys, so no key that affects the shape of the model may be missing.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from typing import Any

from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.keys import list_unread
from fivefold.record import UserError

# Fields of ``Config`` that determine which weights a model has.
_SHAPE = """
    vocab_size hidden_size intermediate_size intermediate_size_mlp num_hidden_layers num_attention_heads
    num_key_value_heads head_dim max_position_embeddings tie_word_embeddings attention_bias mlp_bias
    use_parallel_residual use_qk_norm new_decoder_architecture multi_query parallel_attn num_ln_in_parallel_attn
    num_experts num_experts_per_tok moe_intermediate_size mlp_only_layers moe_layers interleave_moe_layer_step
    first_k_dense_replace n_shared_experts num_nextn_predict_layers q_lora_rank kv_lora_rank qk_nope_head_dim
    qk_rope_head_dim v_head_dim
"""
SHAPE_FIELDS = frozenset(_SHAPE.split())


def require_shape(values: dict[str, Any], *, family: Family, name: str) -> None:
    """Raise a ``UserError`` if a config of an unknown ``model_type`` does not give its full shape."""
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
    defaults = {name: field.default for name, field in Config.model_fields.items()} | {**family.defaults}
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

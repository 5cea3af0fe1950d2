"""The keys of a Hugging Face ``config.json``: which ones a family reads, and how all others are handled.

    Family.keys        read by the family's code and by us: a field of ``Config``
    Family.supported   read by the family's code, but only some values are supported: ``UserError`` for others
    HARMLESS           not read by the family's code and does not change logits: ignored; other unread keys: a warning

Source: transformers 5.23, against which ``tests/model/huggingface/test_keys.py`` checks every key of every family.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from fivefold.errors import UserError
from fivefold.model.huggingface.families import FAMILIES
from fivefold.model.huggingface.family import Family, Supported

UNREAD = "unread_rotary_factor"
EVERY_FAMILY = {
    "is_causal": Supported((True,), "attention that is not causal"),
    "per_layer_config": Supported((None, {}), "layers that differ from each other"),
}

# Keys of published files that do not change logits: metadata, other software, tokens, generation, classification heads,
# initial weights (Fivefold has its own rule), storage, modules that a family does not build (multi-token prediction),
# and duplicates of other keys.
_HARMLESS = """
    architectures model_type transformers_version auto_map tokenizer_class name torch_dtype dtype torchscript
    use_bfloat16 quantization_config attn_implementation cache_implementation use_cache gradient_checkpointing
    return_dict output_attentions output_hidden_states output_router_logits problem_type id2label label2id num_labels
    classifier_dropout task_specific_params pruned_heads is_decoder is_encoder_decoder tie_encoder_decoder
    chunk_size_feed_forward pretraining_tp reorder_and_upcast_attn initializer_range init_std vision_config
    ep_size seq_aux num_nextn_predict_layers num_mtp_layers qk_head_dim max_length min_length temperature top_k top_p
    do_sample num_beams repetition_penalty bad_words_ids suppress_tokens initial_context_length experts_per_token
    n_ctx max_window_layers is_llama_config transformers.js_config attention_softmax_in_fp32
    scale_attention_softmax_in_fp32 embedding_initializer_range enable_moe_fp32_combine residual_in_fp32
    rescale_prenorm_residual use_mamba_kernels num_logits_to_keep mamba_ssm_cache_dtype moe_shared_expert_overlap
    time_step_rank time_step_min time_step_floor time_step_max time_step_scale time_step_init_scheme use_mambapy
    use_falcon_mambapy use_associative_scan mtp_layers_block_type z_loss_coefficient vocab_size_per_layer_input
    linear_a_log_min linear_a_log_max linear_dt_min linear_dt_max linear_dt_init_floor
    rescale_every lambda_std_dev initializer_cutoff_factor
    attn_impl init_device learned_pos_emb norm_type embedding_fraction
    w_init_variance_scale final_w_init_variance_scale
"""
HARMLESS = frozenset(_HARMLESS.split())
_ENDS = ("_token_id", "_token_ids", "_token_index", "_token")
_STARTS = ("_", "summary_", "unsloth_")


def read_fields(values: dict[str, Any], *, family: Family, name: str) -> dict[str, Any]:
    """Return the fields of ``Config`` that the keys of a family set; ``UserError`` for an unsupported value."""
    unread = {key: supported for key, supported in EVERY_FAMILY.items() if key not in family.keys}
    for key, supported in {**unread, **family.supported}.items():
        if key in values and not any(values[key] == neutral for neutral in supported.values):
            raise UserError(
                f"{name}: {key}={values[key]!r} needs {supported.operation}, which is not supported; "
                f"remove it or give {key}={supported.values[0]!r}"
            )
    fields: dict[str, Any] = {}
    given_by: dict[str, str] = {}
    for key, field in family.keys.items():
        if key not in values:
            continue
        if field in fields and fields[field] != values[key]:
            raise UserError(
                f"{name}: {given_by[field]}={fields[field]!r} and {key}={values[key]!r} are one key of "
                f"{family.model_type}; give one"
            )
        fields[field], given_by[field] = values[key], key
    return fields


def flatten_tables(values: dict[str, Any], *, family: Family, name: str) -> dict[str, Any]:
    """Return the keys of a config in which those of the family's tables are at the top level, as TABLE.KEY."""
    flat = {key: value for key, value in values.items() if key not in family.tables}
    for table in family.tables:
        inner = values.get(table)
        if inner is not None and not isinstance(inner, dict):
            raise UserError(f"{name}: {table}={inner!r} is not a table of keys")
        flat |= {f"{table}.{key}": value for key, value in (inner or {}).items()}
    return flat


def nest_tables(flat: dict[str, Any]) -> dict[str, Any]:
    """Return the inverse of ``flatten_tables``: the keys of tables within their tables."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        table, _, inner = key.rpartition(".")
        (nested.setdefault(table, {}) if table else nested)[inner] = value
    return nested


def list_unread(values: dict[str, Any], *, family: Family) -> Iterator[str]:
    """Yield the keys that may change the model, but that the family's code ignores.

    Neutral values (none, false, 0, 1, empty) and values that the family uses anyway are left out.
    """
    read = (
        {key for key, field in family.keys.items() if field != UNREAD} | EVERY_FAMILY.keys() | family.supported.keys()
    )
    given = {field: values[key] for key, field in family.keys.items() if key in values and field != UNREAD}
    used_values = {**family.list_defaults(), **given}
    for key, value in values.items():
        if key in read or key in family.overwritten or _is_harmless(key):
            continue
        if value is None or value is False or (value is not True and value in (0, 1, "", [], {})):
            continue
        fields = _collect_meanings().get(key, set()) & used_values.keys()
        if not fields or any(used_values[field] != value for field in fields):
            yield key


@cache
def _collect_meanings() -> dict[str, set[str]]:
    """Map each key to the fields of ``Config`` that it sets in any family."""
    meanings: dict[str, set[str]] = {}
    for family in FAMILIES.values():
        for key, field in family.keys.items():
            meanings.setdefault(key, set()).add(field)
    return meanings


def _is_harmless(key: str) -> bool:
    key = key.rpartition(".")[2]
    return key in HARMLESS or key.endswith(_ENDS) or key.startswith(_STARTS)

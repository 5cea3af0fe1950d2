"""Parse Megatron's arguments in a script, a launch line or a YAML into values by their names in ``args``."""

from __future__ import annotations

from typing import Any

from fivefold.errors import UserError
from fivefold.interop.format import Document, Overrides, ParsedConfig
from fivefold.interop.keys import Values, part
from fivefold.interop.megatron.keys import ALIAS, CORE_FIELDS, NEGATED, TABLE, VERSION
from fivefold.interop.shell.launch import parse_keys

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF",)  # environment variables that are read

YAML_ACTIVATIONS: dict[str, dict[str, Any]] = {  # megatron/training/yaml_arguments.py
    "swiglu": {"swiglu": True},
    "squaredrelu": {"squared_relu": True},
    "gelu": {},
}

SIGNS = ("tensor-model-parallel-size", "num-layers", "micro-batch-size", "num-attention-heads", "hidden-size")


def is_megatron(document: Document) -> bool:
    """Return whether the words, or a YAML's keys, are Megatron's arguments."""
    return _is_swift(document) or sum(sign in _list_keys(document) for sign in SIGNS) >= 2


def _is_swift(document: Document) -> bool:
    """Return whether it is a command ``megatron sft`` of ms-swift, or its arguments as a YAML."""
    is_tuned = bool(document.values.keys() & {"tuner_type", "train_type"})
    return document.words[:1] == ("megatron",) or (is_tuned and not _list_keys(document).isdisjoint(SIGNS))


def _list_keys(document: Document) -> set[str]:
    if document.kind == "words":
        return {key.replace("_", "-") for key in parse_keys(document.words)}
    if document.kind not in ("yaml", "json"):
        return set()
    return {name.lstrip("-").replace("_", "-") for name in _flatten(document.values)}


def _flatten(values: Any) -> dict[str, Any]:
    """Return all keys of a YAML, whatever group they are in; lists are values."""
    flattened: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flattened |= _flatten(value)
        else:
            flattened[str(key)] = value
    return flattened


def parse(document: Document, overrides: Overrides) -> ParsedConfig:
    """Return the values of the arguments."""
    if _is_swift(document):
        raise UserError(
            f"{document.origin}: arguments of `megatron sft` of ms-swift, which are not read; give model and "
            "layout, as in `fivefold predict qwen3-8b h100:8 'dp4 tp2 mbs1' --stack megatron-core`"
        )
    given = parse_keys(document.words) if document.kind == "words" else _flatten(document.values)
    environment = document.values if document.kind == "words" else given
    segments = "expandable_segments:True" in str(environment.get(ALLOCATOR_VARIABLES[0], ""))
    arguments = {name: value for name, value in given.items() if not name.isupper()}
    if document.kind != "words":
        arguments |= {
            f"env.{name}": value for name, value in given.items() if name.isupper() and name not in ALLOCATOR_VARIABLES
        }
    table = TABLE if document.kind == "words" else {**CORE_FIELDS, **TABLE}  # a YAML may use Megatron-Core's names
    origin, named_values = document.origin, normalize_names(arguments)
    if document.kind != "words" and named_values.get("activation_func") in YAML_ACTIVATIONS:
        table = {**table, "activation_func": part("model.mlp and model.activation", None)}
        named_values |= YAML_ACTIVATIONS[str(named_values["activation_func"])]
    for name, value in named_values.items():
        has_cost = name in TABLE and TABLE[name].kind != "idle"
        if has_cost and name != "tokenizer_model" and str(value).startswith("$"):
            flag = f"{origin}: --{name.replace('_', '-')}"
            variable = str(value).strip("${}")
            if str(value).startswith("$("):
                raise UserError(
                    f"{flag} is the output of a command, {value}…, which is not run; write the value itself"
                )
            raise UserError(f"{flag} is {value}, which is not set; add {variable}=VALUE to the file")
    values = Values(table, named_values, origin=origin, software="megatron", version=VERSION)
    fields = {"job.stack.expandable_segments": segments}
    return ParsedConfig(document, values, model=overrides.model, stack="megatron-core", fields=fields)


def normalize_names(given: dict[str, Any]) -> dict[str, Any]:
    """Return arguments by their names in ``args``: without dashes, aliases and negations."""
    values: dict[str, Any] = {}
    for key, value in given.items():
        name = key if key.startswith("env.") else key.rpartition(".")[2].lstrip("-").replace("-", "_")
        name = ALIAS.get(name, name)
        if name in NEGATED and isinstance(value, bool):
            name, value = NEGATED[name], not value
        if name in ("position_embedding_type", "cp_comm_type") and isinstance(value, list) and len(value) == 1:
            value = value[0]
        values[name] = value
    return values

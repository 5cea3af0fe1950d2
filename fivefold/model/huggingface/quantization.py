"""How a checkpoint quantizes its weights (``quantization_config``), and which linear layers it keeps in 16 bits."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from fivefold.base_format import BASE_FORMATS, FOUR_BIT_BASES
from fivefold.errors import UserError
from fivefold.model.huggingface.families import FAMILIES
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.tensors import list_tensors, unwrap_name
from fivefold.model.spec import Model
from fivefold.model.weight import is_quantized
from fivefold.model.weights import list_weights

# Modules that are not quantized: of bitsandbytes, and of fp8 and mxfp4.
SKIPPED = ("llm_int8_skip_modules", "modules_to_not_convert")
PATTERN = re.compile(r"[\w.-]*(?:\.?\*[\w.-]*){0,3}")  # of names of modules; ``.*`` or ``*`` is any text


def find_quantization(values: Mapping[str, Any]) -> str:
    """Return the format of quantized weights, nf4, fp4, int8, fp8 or mxfp4, or their method's name; else nothing."""
    quantized = values.get("quantization_config")
    if not quantized:
        return ""
    table = quantized if isinstance(quantized, dict) else {}
    method = str(table.get("quant_method") or ("bitsandbytes" if "load_in_4bit" in table else "an unknown method"))
    if not method.startswith("bitsandbytes"):
        return method
    if not (table.get("load_in_4bit") or method.endswith("4bit")):
        return "int8"
    return str(table.get("bnb_4bit_quant_type", "fp4"))  # transformers' default


def has_double_quantization(values: Mapping[str, Any]) -> bool:
    """Tell whether a repository in nf4 or fp4 quantizes its scales too; true of others, which have no choice."""
    is_four_bit = find_quantization(values) in FOUR_BIT_BASES
    return not is_four_bit or values["quantization_config"].get("bnb_4bit_use_double_quant") is True


def list_unquantized(values: Mapping[str, Any], *, model: Model, family: Family, name: str) -> tuple[str, ...]:
    """Return the linear layers and experts of blocks that a quantized checkpoint keeps in 16 bits, by our names.

    Source: transformers@5.23.0:src/transformers/quantizers/quantizers_utils.py, should_convert_module. Raises
    ``UserError`` for a list of modules that is none.
    """
    base = BASE_FORMATS.get(find_quantization(values))
    if base is None:
        return ()
    patterns = list(_list_skipped(values["quantization_config"], family=family, name=name))
    if not patterns:
        return ()
    ends = tuple(pattern for pattern in patterns if pattern and "*" not in pattern)
    starts = frozenset(ends)
    regexes = [re.compile(_write_regex(pattern)) for pattern in patterns if "*" in pattern]

    def is_skipped(module: str) -> bool:
        parts = module.split(".")
        prefixes = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        is_named = module.endswith(ends) or not starts.isdisjoint(prefixes)
        return is_named or any(regex.match(module) for regex in regexes)

    quantized = {weight.name: weight.module for weight in list_weights(model) if is_quantized(weight, base)}
    tensors = list_tensors(model, family=family.model_type, stacked=bool(FAMILIES[family.model_type].stacked_tensors))
    kept = {part.ours for part in tensors if part.ours in quantized and is_skipped(_name_module(part.name))}
    return tuple(module for weight, module in quantized.items() if weight in kept and weight.startswith("blocks."))


def _list_skipped(table: Mapping[str, Any], *, family: Family, name: str) -> Iterator[str]:
    """Yield the patterns of skipped modules, by the names of the text model in memory."""
    for key in SKIPPED:
        patterns = table.get(key) or []
        if not isinstance(patterns, list) or not all(isinstance(text, str) for text in patterns):
            raise UserError(f"{name}: quantization_config.{key} is no list of names of modules; correct it")
        for text in patterns:
            if not PATTERN.fullmatch(text):
                raise UserError(
                    f"{name}: quantization_config.{key} has {text[:80]!r}, which is no name of a module; names may "
                    "have up to three .*"
                )
            pattern = f"{text}."
            for published, ours in family.renamed.items():
                pattern = pattern.replace(published, ours)
            yield unwrap_name(pattern).removesuffix(".")


def _write_regex(pattern: str) -> str:
    """Return a pattern with ``*`` as a regular expression of the beginning of a name, up to the end of a module."""
    text = ".*".join(re.escape(part) for part in pattern.replace(".*", "*").split("*"))
    return rf"(?:{text})(?:(?<=\.)|(?=\.|$))"


def _name_module(tensor: str) -> str:
    """Return the module of a tensor; stacked experts are parameters of one."""
    return tensor.rpartition(".")[0]

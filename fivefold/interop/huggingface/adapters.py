"""Adapters of peft and quantized bases of bitsandbytes, by the keys of TRL, Axolotl and LLaMA-Factory.

Sources: trl/trainer/model_config.py; axolotl 0.19.0 axolotl/utils/schemas/peft.py and loaders/adapter.py; llamafactory
0.9.5 llamafactory/hparams/finetuning_args.py, model_args.py and model/adapter.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fivefold.adapter import ALL_LINEAR, TARGETS
from fivefold.interop.keys import Table, Values, part, to_list

ADAPTER = "job.adapter"
BASE = "job.adapter.base"


class AdapterKeys(NamedTuple):
    """The names and defaults of a trainer's adapter keys; ``switch``: the key that turns adapters on."""

    switch: str
    on: tuple[Any, ...]
    off: tuple[Any, ...]
    rank: tuple[str, int]
    alpha: tuple[str, float | None]  # None: twice the rank
    dropout: tuple[str, float]
    targets: str
    every: tuple[str, ...]  # values of ``targets`` that mean all linear layers
    rank_stabilized: str
    bits: str  # the key of a base in 4 bits, and its value
    four: Any
    nested: tuple[str, bool]  # double quantization
    others: tuple[str, ...]  # keys of variants that are not modelled, if they are on


TRL = AdapterKeys(
    "use_peft",
    (True,),
    (False, None),
    ("lora_r", 16),
    ("lora_alpha", 32),
    ("lora_dropout", 0.05),
    "lora_target_modules",
    ("all-linear",),
    "use_rslora",
    "load_in_4bit",
    True,
    ("use_bnb_nested_quant", False),
    ("use_dora", "lora_modules_to_save", "lora_target_parameters", "load_in_8bit"),
)
AXOLOTL = AdapterKeys(
    "adapter",
    ("lora", "qlora"),
    (None, ""),
    ("lora_r", 8),
    ("lora_alpha", None),
    ("lora_dropout", 0.0),
    "lora_target_modules",
    ("all-linear",),
    "peft_use_rslora",
    "load_in_4bit",
    True,
    ("bnb_config_kwargs.bnb_4bit_use_double_quant", True),
    (
        "peft_use_dora",
        "lora_modules_to_save",
        "lora_target_parameters",
        "lora_mlp_kernel",
        "lora_qkv_kernel",
        "lora_o_kernel",
        "lora_embedding_kernel",
        "peft_layers_to_transform",
        "peft_trainable_token_indices",
        "load_in_8bit",
    ),
)
LLAMAFACTORY = AdapterKeys(
    "finetuning_type",
    ("lora",),
    ("full",),
    ("lora_rank", 8),
    ("lora_alpha", None),
    ("lora_dropout", 0.0),
    "lora_target",
    ("all",),
    "use_rslora",
    "quantization_bit",
    4,
    ("double_quantization", True),
    ("use_dora", "additional_target"),
)
NAMED = {"axolotl": AXOLOTL, "llamafactory": LLAMAFACTORY}


def _table(names: AdapterKeys) -> Table:
    """Return the keys of a trainer's adapters that are read."""
    keys = {
        names.switch: part(ADAPTER, "full" if names is LLAMAFACTORY else None if names is AXOLOTL else False),
        names.rank[0]: part("job.adapter.rank", None),
        names.alpha[0]: part("job.adapter.alpha", None),
        names.dropout[0]: part("job.adapter.dropout", None),
        names.targets: part("job.adapter.targets", None),
        names.rank_stabilized: part("job.adapter.rank_stabilized", None),
        names.bits: part(BASE, None),
        names.nested[0]: part(BASE, None),
    }
    return keys | ({"lora_target_linear": part("job.adapter.targets", None)} if names is AXOLOTL else {})


TABLES: dict[str, Table] = {"trl": _table(TRL), "axolotl": _table(AXOLOTL), "llamafactory": _table(LLAMAFACTORY)}


def read_adapter(values: Values) -> dict[str, Any]:
    """Return the adapter of a config as a field of a job; doubt what is not modelled of it. No field if it has none."""
    names = NAMED.get(values.software, TRL)
    switch = values[names.switch]
    on = switch in names.on
    if not on and switch not in names.off:
        values.doubt(names.switch, "another method than LoRA or full fine-tuning; counted as the latter")
    in_four = bool(values[names.bits] == names.four)
    if values[names.bits] not in (None, False) and not (on and in_four):
        values.doubt(names.bits, f"weights in {'4 bits without an adapter' if in_four else 'few bits'}: not counted")
        in_four = False
    if switch == "qlora" and not in_four:
        values.doubt(names.switch, f"qlora without {names.bits}: true; counted as lora")
    if not on:
        return {}
    for key in names.others:
        if values.given.get(key) not in (None, False, "", [], {}):
            values.doubt(key, "a variant of adapters that is not modelled")
    rank = values.optional(names.rank[0]) or names.rank[1]
    alpha = values.number(names.alpha[0])
    dropout = values.number(names.dropout[0])
    nested = values[names.nested[0]]
    if in_four and not (names.nested[1] if nested is None else nested):
        key = names.nested[0] if values.is_set(names.nested[0]) else names.bits
        values.approximate(key, "scales in fp32, 0.05 bytes of a weight more; counted with double quantization")
    return {
        "job.adapter": {
            "rank": rank,
            "alpha": names.alpha[1] if alpha is None else alpha,
            "dropout": names.dropout[1] if dropout is None else dropout,
            "targets": _targets(values, names),
            "rank_stabilized": values[names.rank_stabilized] is True,
            "base": "nf4" if in_four else None,
        }
    }


def _targets(values: Values, names: AdapterKeys) -> tuple[str, ...]:
    """Return the layers with adapters; other names than those of Llama's linear layers are doubted."""
    if values.given.get("lora_target_linear") is True and names is AXOLOTL:
        return (ALL_LINEAR,)
    given = values[names.targets]
    words = [word.strip() for text in to_list(given) for word in str(text).split(",") if word.strip()]
    if not words:
        if names is LLAMAFACTORY:
            return (ALL_LINEAR,)
        values.approximate(names.switch, "no target modules: peft's own for the model, counted as q_proj and v_proj")
        return ("q_proj", "v_proj")
    if any(word in names.every for word in words):
        return (ALL_LINEAR,)
    known = tuple(word for word in words if word in TARGETS)
    if len(known) < len(words):
        others = ", ".join(word for word in words if word not in TARGETS)
        values.doubt(names.targets, f"{others}: not among {', '.join(TARGETS)}, which alone are counted")
    return known or (ALL_LINEAR,)

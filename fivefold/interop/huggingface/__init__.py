"""Trainers on transformers: TrainingArguments with accelerate's YAML (FSDP, DeepSpeed, DDP) or DeepSpeed's JSON.

keys · parse · to_job · emit   the four modules of a format, described in ``../format.py``
dialects                       names that Axolotl, LLaMA-Factory and ms-swift use
swift                          commands of ms-swift, and defaults that follow from other keys
shipped                        DeepSpeed configs that both ship and recipes name
effects · harmless             keys that change the step and are not counted; keys without effect
adapters                       PEFT adapters and quantized bases, of TRL, Axolotl, LLaMA-Factory and ms-swift
freeze                         frozen parts, of Axolotl and LLaMA-Factory
data                           their data sets, chat templates, packing and losses, as ``[data]`` of a run file
"""

from __future__ import annotations

from fivefold.interop.format import ConfigFormat
from fivefold.interop.huggingface.dialects import AXOLOTL, DIALECTS, LLAMAFACTORY, SWIFT
from fivefold.interop.huggingface.emit import (
    choose_stack,
    emit_accelerate,
    emit_axolotl,
    emit_deepspeed,
    emit_llamafactory,
    emit_trl,
)
from fivefold.interop.huggingface.keys import TABLE, VERSIONS
from fivefold.interop.huggingface.parse import is_huggingface, parse
from fivefold.interop.huggingface.to_job import to_job

MAIN_ARGUMENTS = ("max_length", "per_device_train_batch_size", "gradient_accumulation_steps")
MAIN_KEYS = frozenset(MAIN_ARGUMENTS) | {
    dialect.find_name(argument) for dialect in DIALECTS for argument in MAIN_ARGUMENTS
}
PLAIN_KEYS = {"trainer": TABLE, "trl": TABLE, "accelerate": TABLE}
KEYS = PLAIN_KEYS | {dialect.name: {**TABLE, **dialect.table} for dialect in DIALECTS}
FORMATS = (
    ConfigFormat(
        "accelerate",
        VERSIONS["accelerate"],
        "fsdp2",
        is_huggingface,
        parse,
        to_job,
        emit_accelerate,
        KEYS,
        MAIN_KEYS,
        order=3,
        sample_data="random tokens",
    ),
    ConfigFormat(
        "deepspeed",
        VERSIONS["deepspeed"],
        "deepspeed",
        is_huggingface,
        parse,
        to_job,
        emit_deepspeed,
        keys={"deepspeed": TABLE},
        main_keys=MAIN_KEYS,
        order=3,
        sample_data="random tokens",
    ),
    ConfigFormat(
        SWIFT.name,
        SWIFT.version,
        "",
        is_huggingface,
        parse,
        to_job,
        None,
        keys={SWIFT.name: KEYS[SWIFT.name]},
        main_keys=MAIN_KEYS,
        order=3,
    ),
    *(
        ConfigFormat(
            name,
            version,
            "",
            is_huggingface,
            parse,
            to_job,
            emit,
            keys={name: KEYS[name]},
            main_keys=MAIN_KEYS,
            order=3,
            choose_stack=choose_stack,
            sample_data="data.jsonl",
            fine_tuning_stacks=("ddp", "fsdp2", "deepspeed"),
        )
        for name, version, emit in (
            ("trl", VERSIONS["trl"], emit_trl),  # first: the one that is written for a stack
            (AXOLOTL.name, AXOLOTL.version, emit_axolotl),
            (LLAMAFACTORY.name, LLAMAFACTORY.version, emit_llamafactory),
        )
    ),
)

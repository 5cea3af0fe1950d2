"""Commands of ms-swift (``swift sft``), its presets of FSDP, and defaults that follow from its other keys.

Sources: ms-swift 4.6.0 swift/cli/main.py, swift/arguments/base_args/model_args.py, sft_args.py,
swift/trainers/arguments.py and swift/config/fsdp2.json.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fivefold.interop.shell.launch import parse_keys

METHODS = ("sft", "pt", "rlhf")
SCRIPT = re.compile(r"(?:.*/)?swift/cli/(?:_?megatron/)?(\w+)\.py")
FSDP2 = {
    "fsdp_version": 2,
    "reshard_after_forward": True,
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "cpu_ram_efficient_loading": True,
    "state_dict_type": "SHARDED_STATE_DICT",
    "activation_checkpointing": True,
}
# what ``swift pt`` and ``swift rlhf`` set otherwise (arguments/pretrain_args.py, rlhf_args.py)
METHOD_KEYS: Mapping[str, Mapping[str, Any]] = {
    "pt": {"use_chat_template": False, "loss_scale": "all"},
    "rlhf": {"rlhf_type": "dpo", "loss_scale": "last_round"},
}
BATCH = 16  # samples of a step where gradient_accumulation_steps is not given


def find_method(words: Sequence[str]) -> str | None:
    """Return by which method of ms-swift a command trains, ``sft`` of ``swift sft``; None for other programs."""
    if len(words) > 1 and words[0].rpartition("/")[2] == "swift":
        method = words[1]
    else:
        match = SCRIPT.fullmatch(words[0]) if words else None
        method = match[1] if match and "megatron" not in words[0] else ""
    return method if method in METHODS else None


def parse_arguments(words: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of a command; texts that are JSON are numbers, truth values and tables."""
    return {key.replace("-", "_"): _parse_literal(value) for key, value in parse_keys(words).items()}


def _parse_literal(value: object) -> Any:
    """Return the value of a word: JSON if it is some, else the word."""
    if isinstance(value, list):
        return [_parse_literal(word) for word in value]
    try:
        return json.loads(str(value).lower() if str(value) in ("True", "False") else str(value))
    except (ValueError, RecursionError):
        return None if value == "None" else value if value is True else str(value)


def count_ranks(environment: Mapping[str, Any]) -> int | None:
    """Return the ranks that ms-swift starts: those of torchrun, or one that sees GPUs; None if nothing says."""
    numbers = {name: str(environment.get(name, "")) for name in ("NPROC_PER_NODE", "NNODES")}
    if numbers["NPROC_PER_NODE"].isdecimal() and int(numbers["NPROC_PER_NODE"]):
        nodes = numbers["NNODES"] or "1"
        return int(numbers["NPROC_PER_NODE"]) * int(nodes) if nodes.isdecimal() and int(nodes) else None
    return 1 if list_visible(environment) and not any(numbers.values()) else None


def list_visible(environment: Mapping[str, Any]) -> list[str]:
    """Return the devices that a process sees."""
    devices = str(environment.get("CUDA_VISIBLE_DEVICES", ""))
    return [device for device in devices.split(",") if device.strip().isdecimal()]


def complete_keys(given: dict[str, Any], method: str | None, environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a config with those of its method, of a preset of FSDP, and of a process with several GPUs."""
    completed = {**METHOD_KEYS.get(method or "", {}), **given}
    if completed.get("fsdp") == "fsdp2":
        del completed["fsdp"]
        completed |= {"fsdp_config": FSDP2}
    is_alone = count_ranks(environment) == 1 and not environment.get("NPROC_PER_NODE")
    if is_alone and len(list_visible(environment)) > 1:  # swift/model/utils.py, get_default_device_map
        completed.setdefault("device_map", "auto")
    return completed


def compute_defaults(given: Mapping[str, Any], ranks: int | None) -> dict[str, Any]:
    """Return the defaults that follow from other keys and from the number of ranks.

    Mixed precision is that of the loaded weights: bf16 (of nearly all models), or fp16 for both other types.
    """
    loaded = str(given.get("torch_dtype") or "bfloat16").removeprefix("torch.").lower()
    is_bf16 = loaded not in ("float16", "float32", "fp16", "fp32")
    defaults: dict[str, Any] = {
        "learning_rate": 1e-5 if given.get("tuner_type") == "full" else 1e-4,
        "bf16": is_bf16,
        "fp16": not is_bf16,
    }
    samples = given.get("per_device_train_batch_size", 1)
    if ranks and isinstance(samples, int) and samples > 0:
        defaults["gradient_accumulation_steps"] = max(1, math.ceil(BATCH / samples / ranks))
    return defaults

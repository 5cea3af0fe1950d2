"""The DeepSpeed configs that Axolotl ships in ``deepspeed_configs/`` and that its recipes name without their content.

Source: axolotl 0.19.0, ``deepspeed_configs/*.json``. Scalars of fp16's loss scale, which cost nothing, are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FOLDER = "deepspeed_configs"
_COMMON = {
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
_AUTO = {**_COMMON, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
_BF16 = {**_COMMON, "bf16": {"enabled": True}}
_COMPILE = {"compile": {"disable": False, "backend": "inductor"}}
_UNTESTED = {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
_CPU, _PINNED = {"device": "cpu"}, {"device": "cpu", "pin_memory": True}
_ZERO1 = {"stage": 1, "overlap_comm": True}
_ZERO2 = {"stage": 2, "offload_optimizer": _CPU, "contiguous_gradients": True, "overlap_comm": True}
_ZERO3 = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 0,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "max_live_parameters": 0,
    "max_reuse_distance": 0,
    "gather_16bit_weights_on_model_save": True,
}

SHIPPED: Mapping[str, Mapping[str, Any]] = {
    "zero1.json": {**_AUTO, "zero_optimization": _ZERO1},
    "zero1_torch_compile.json": {**_AUTO, **_COMPILE, "zero_optimization": _ZERO1},
    "zero2.json": {**_AUTO, "zero_optimization": _ZERO2},
    "zero2_torch_compile.json": {**_AUTO, **_COMPILE, "zero_optimization": _ZERO2},
    "zero3.json": {**_AUTO, "zero_optimization": _ZERO3},
    "zero3_bf16.json": {**_BF16, "zero_optimization": _ZERO3},
    "zero3_bf16_cpuoffload_params.json": {
        **_BF16,
        **_UNTESTED,
        "zero_optimization": {**_ZERO3, "offload_param": _PINNED},
    },
    "zero3_bf16_cpuoffload_all.json": {
        **_BF16,
        **_UNTESTED,
        "zero_optimization": {**_ZERO3, "offload_optimizer": _PINNED, "offload_param": _PINNED},
    },
}


def find_shipped(name: str) -> Mapping[str, Any] | None:
    """Return the config that ``name`` (``deepspeed_configs/zero2.json``) is in Axolotl; None if it ships none."""
    folder, _, file = name.replace("\\", "/").removeprefix("./").rpartition("/")
    return SHIPPED.get(file) if folder == FOLDER else None

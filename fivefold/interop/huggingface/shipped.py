"""DeepSpeed configs that Axolotl, LLaMA-Factory and ms-swift ship: their recipes name them without their content.

Scalars of fp16's loss scale, which cost nothing, are left out. Sources: axolotl 0.19.0, ``deepspeed_configs/*.json``;
LLaMA-Factory at commit ff6d4d12, ``examples/deepspeed/*.json``; ms-swift 4.6.0, ``swift/config/*.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.interop.huggingface.dialects import AXOLOTL, LLAMAFACTORY, SWIFT, Dialect

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
_CPU = {"device": "cpu"}
_PINNED = {"device": "cpu", "pin_memory": True}
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
_AXOLOTL_CONFIGS: Mapping[str, Mapping[str, Any]] = {
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

_FACTORY_AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "fp16": {"enabled": "auto"},
    "bf16": {"enabled": "auto"},
}
_FACTORY_ZERO2 = {
    "stage": 2,
    "allgather_partitions": True,
    "allgather_bucket_size": 5e8,
    "overlap_comm": False,
    "reduce_scatter": True,
    "reduce_bucket_size": 5e8,
    "contiguous_gradients": True,
    "round_robin_gradients": True,
}
_FACTORY_ZERO3 = {
    "stage": 3,
    "overlap_comm": False,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
_FACTORY_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "ds_z0_config.json": {**_FACTORY_AUTO, "zero_optimization": {**_FACTORY_ZERO2, "stage": 0}},
    "ds_z2_config.json": {**_FACTORY_AUTO, "zero_optimization": _FACTORY_ZERO2},
    "ds_z2_offload_config.json": {
        **_FACTORY_AUTO,
        "zero_optimization": {**_FACTORY_ZERO2, "offload_optimizer": _PINNED},
    },
    "ds_z3_config.json": {**_FACTORY_AUTO, "zero_optimization": _FACTORY_ZERO3},
    "ds_z3_offload_config.json": {
        **_FACTORY_AUTO,
        "zero_optimization": {**_FACTORY_ZERO3, "offload_optimizer": _PINNED, "offload_param": _PINNED},
    },
}

_SWIFT_ZERO2 = {
    "stage": 2,
    "offload_optimizer": {"device": "none", "pin_memory": True},
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "overlap_comm": False,
    "reduce_scatter": True,
    "reduce_bucket_size": 2e8,
    "contiguous_gradients": True,
}
_SWIFT_ZERO3 = {
    **_FACTORY_ZERO3,
    "offload_optimizer": {"device": "none", "pin_memory": True},
    "offload_param": {"device": "none", "pin_memory": True},
    "zero_quantized_weights": False,
    "zero_quantized_gradients": False,
}
_SWIFT_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    name: {**_AUTO, "steps_per_print": 2000, "zero_optimization": zero}
    for name, zero in (
        ("zero0", {**_SWIFT_ZERO2, "stage": 0}),
        ("zero1", {**_SWIFT_ZERO2, "stage": 1}),
        ("zero2", _SWIFT_ZERO2),
        ("zero2_offload", {**_SWIFT_ZERO2, "offload_optimizer": _PINNED}),
        ("zero3", _SWIFT_ZERO3),
        ("zero3_offload", {**_SWIFT_ZERO3, "offload_optimizer": _PINNED, "offload_param": _PINNED}),
    )
}

_CONFIGS = {
    AXOLOTL.name: ("deepspeed_configs", _AXOLOTL_CONFIGS),
    LLAMAFACTORY.name: ("examples/deepspeed", _FACTORY_CONFIGS),
    SWIFT.name: ("", _SWIFT_CONFIGS),  # by name, not by file
}


def find_shipped(name: str, dialect: Dialect) -> Mapping[str, Any] | None:
    """Return the DeepSpeed config that a trainer ships as ``name``; None if it ships none of that name."""
    folder, configs = _CONFIGS.get(dialect.name, ("", {}))
    given_folder, _, file = name.replace("\\", "/").removeprefix("./").rpartition("/")
    return configs.get(file) if given_folder == folder else None

"""Fields of Megatron-Bridge's and NeMo 2's saved configs, and the arguments of Megatron that they correspond to.

Sources: megatron-bridge 0.3.1 megatron/bridge/training/config.py, mixed_precision.py, comm_overlap.py and
models/gpt_provider.py; nemo-toolkit 2.x nemo/lightning/pytorch/strategies/megatron_strategy.py; megatron-core 0.16.1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fivefold.interop.keys import Table, ignored_keys, unmodelled_key
from fivefold.interop.megatron.keys import CORE_FIELDS, TABLE

BRIDGE, NEMO = "0.3.1", "2.x"

# Names of recipes (megatron/bridge/training/mixed_precision.py), whose fields override those of the model and of DDP.
PRECISION_RECIPE = re.compile(
    r"(?:nemotron_h_|(?P<nano>nanov2_))?(?P<held>bf16|fp16)(?:_with_(?P<quantized>\w+))?_mixed"
)
QUANTIZED: dict[str, dict[str, Any]] = {
    "": {},
    "fp8_delayed_scaling": {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_param_gather": True},
    "fp8_current_scaling": {
        "fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_param_gather": True, "first_last_layers_bf16": True,
    },
    "fp8_subchannel_scaling": {"fp8": "hybrid", "fp8_recipe": "blockwise", "fp8_param_gather": False},
    "mxfp8": {
        "fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param_gather": True, "reuse_grad_buf_for_mxfp8_param_ag": True,
    },
    "nvfp4": {"fp4": "e2m1", "fp4_recipe": "nvfp4"},
}  # fmt: skip

# Sections of a ConfigContainer and of a saved NeMo 2 recipe whose fields change the cost.
SECTIONS = (
    "model",
    "train",
    "optimizer",
    "ddp",
    "scheduler",
    "comm_overlap",
    "mixed_precision",
    "dist",
    "peft",
    "rng",
    "dataset",
    "optim",
    "trainer",
    "data",
    "plugins",
)

KEYS_OF_SECTION = {  # section of a ConfigContainer → Megatron's arguments in it; the others are fields of its model
    "train": ("micro_batch_size", "global_batch_size", "rampup_batch_size", "train_iters", "train_samples"),
    "optimizer": (
        "optimizer", "lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad", "bf16",
        "fp16", "use_distributed_optimizer", "use_precision_aware_optimizer", "optimizer_cpu_offload",
    ),
    "ddp": (
        "overlap_grad_reduce", "overlap_param_gather", "use_megatron_fsdp", "data_parallel_sharding_strategy",
        "num_distributed_optimizer_instances", "grad_reduce_in_fp32", "average_in_collective",
    ),
    "scheduler": ("lr_decay_style", "lr_warmup_iters", "lr_wsd_decay_iters", "lr_wsd_decay_style", "lr_decay_iters"),
    "dist": ("use_tp_pp_dp_mapping",),
    "rng": ("seed",),
}  # fmt: skip

NAMES = {  # fields to arguments
    "num_moe_experts": "num_experts", "layernorm_epsilon": "norm_epsilon", "fp8": "fp8_format", "fp4": "fp4_format",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p", "fp8_param": "fp8_param_gather",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank", "gated_linear_unit": "swiglu",
    "sequence_length": "seq_length", "max_steps": "train_iters",
    "seq_len": "seq_length",
}  # fmt: skip

NEGATED_KEYS = {  # fields that are the negation of an argument
    "share_embeddings_and_output_weights": "untie_embeddings_and_output_weights",
    "add_bias_linear": "disable_bias_linear",
    "gradient_accumulation_fusion": "no_gradient_accumulation_fusion",
    "grad_reduce_in_fp32": "grad_reduce_in_bf16",
    "async_tensor_model_parallel_allreduce": "no_async_tensor_model_parallel_allreduce",
    "overlap_p2p_comm": "no_overlap_p2p_communication",
}  # fmt: skip

DEFAULTS = {  # of GPTModelProvider and DistributedDataParallelConfig, if they differ from those of the arguments
    "cross_entropy_loss_fusion": True,
    "grad_reduce_in_bf16": True,
    "untie_embeddings_and_output_weights": False,
    "q_lora_rank": 512,
    "kv_lora_rank": 512,
    "rotary_scaling_factor": 40.0,  # of YaRN, which MLATransformerConfig has unless this is 1
    "no_overlap_p2p_communication": True,  # of ModelParallelConfig; comm_overlap turns it off
}

DDP_OVERLAPS = ("overlap_grad_reduce", "overlap_param_gather")  # which comm_overlap and NeMo's callback turn on
OVERLAP_BUCKET_SIZE = 128 * 1024 * 1024  # elements of a bucket, which they set
OVERLAP_CALLBACK = "MegatronCommOverlapCallback"  # of NeMo 2; its fields are those of comm_overlap
CALLBACKS_WITHOUT_EFFECT = (  # of NeMo 2 and Lightning (nemo/lightning/pytorch/callbacks, nemo/utils)
    "DDPParityChecker", "DeltaTimingCallback", "EarlyStopping", "FLOPsMeasurementCallback",
    "GarbageCollectionCallback", "LearningRateMonitor", "ModelCheckpoint", "NsysCallback", "PreemptionCallback",
    "ProgressBar", "ProgressPrinter", "RichModelSummary", "RuntimeEstimator", "SpeedMonitor", "TimingCallback",
    "TQDMProgressBar",
)  # fmt: skip

RECIPE = {  # values of most of 0.3.1's recipes (megatron/bridge/recipes), which a file of overrides changes
    "bf16": True, "use_distributed_optimizer": True, "grad_reduce_in_bf16": False, "overlap_grad_reduce": True,
    "overlap_param_gather": True, "moe_grouped_gemm": True, "moe_token_dispatcher_type": "alltoall",
    "expert_tensor_parallel_size": 1, "sequence_parallel": True, "no_overlap_p2p_communication": False,
}  # fmt: skip

MODEL_KEYS = (  # keys that a model of the catalog sets in addition to its sizes
    "softmax_type",
    "window_size",
    "window_attn_skip_freq",
    "activation_func",
    "activation_func_clamp_value",
    "glu_linear_offset",
)


def replace_defaults(table: Table, defaults: Mapping[str, Any]) -> Table:
    """Return the table with other defaults."""
    return {name: key._replace(default=defaults.get(name, key.default)) for name, key in table.items()}


BRIDGE_AND_CORE_KEYS: Table = {
    **replace_defaults(TABLE, DEFAULTS),
    **CORE_FIELDS,
    "mixed_precision": unmodelled_key("a recipe of another precision", None),
    **ignored_keys("callbacks"),  # those with an effect are marked by the parser
}

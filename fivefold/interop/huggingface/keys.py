"""Keys of TrainingArguments (transformers 5.23.0), accelerate's YAML (1.15.0) and DeepSpeed's JSON (0.19.8).

Sources: transformers/training_args.py; trl/trainer/sft_config.py; accelerate/commands/config/config_args.py, cluster.py
and accelerate/utils/dataclasses.py; deepspeed/runtime/constants.py, config.py and zero/config.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fivefold.interop.huggingface import adapters, data, effects, harmless
from fivefold.interop.keys import Table, field, ignored_keys, part, unmodelled_key

VERSIONS = {
    "accelerate": "1.15.0, transformers 5.23.0",
    "deepspeed": "0.19.8, transformers 5.23.0",
    "trl": "1.16.0, transformers 5.23.0",
}

PRECISION = "job.precision"

ZERO = "layout.zero"

ARGUMENTS: Table = {
    "model_name_or_path": part("model, of the catalog or of a folder", None),
    "max_length": part("job.sequence", None),
    "per_device_train_batch_size": field("layout.mbs", 8),
    "gradient_accumulation_steps": part("job.global_batch: micro-batches of a step", 1),
    "max_steps": part("job.steps; -1: as many as the epochs have", -1),
    "optim": part("job.optimizer.kind", "adamw_torch_fused"),
    "learning_rate": field("job.learning_rate.peak", 5e-5),
    "lr_scheduler_type": part("job.learning_rate.kind", "linear"),
    **{
        f"lr_scheduler_kwargs.{name}": part("job.learning_rate: its floor, or the steps of its decay", None)
        for name in ("min_lr_rate", "min_lr", "min_lr_ratio", "num_decay_steps", "decay_type")
    },
    "warmup_steps": part("job.learning_rate.warmup_steps; below 1: a share of the steps", 0),
    "warmup_ratio": part("job.learning_rate.warmup_steps, as a share of the steps", None),
    "weight_decay": field("job.optimizer.weight_decay", 0.0),
    "adam_beta1": part("job.optimizer.betas", 0.9),
    "adam_beta2": part("job.optimizer.betas", 0.999),
    "adam_epsilon": field("job.optimizer.epsilon", 1e-8),
    "max_grad_norm": field("job.optimizer.clip", 1.0),
    "seed": field("job.seed", 42),
    "bf16": part(PRECISION, False),
    "fp16": part(PRECISION, False),
    "tf32": part(f"{PRECISION}, of fp32 matmuls", None),
    "gradient_checkpointing": part("layout.ac", False),
    "activation_checkpointing": part("layout.ac", None),
    "torch_compile": part("job.stack.compile", False),
    "use_liger_kernel": part("job.stack.kernels and job.stack.loss", False),
    "attn_implementation": part("job.stack.attention", "sdpa"),
    "packing": part("job.documents: sequences are filled", False),
    "padding_free": part("job.documents", False),
    "deepspeed": part(f"{ZERO}: a DeepSpeed config", None),
    "fsdp": part(f"{ZERO}: FSDP without accelerate's YAML", None),
    "fsdp_config.reshard_after_forward": part(f"{ZERO} and job.stack.reshard", True),
    "fsdp_config.version": part("job.stack: FSDP1 or FSDP2", 1),
    "pure_bf16": part(f"{PRECISION}: weights, gradients and optimizer in bf16", False),
    "cut_cross_entropy": part("job.stack.loss: never makes all logits", False),
    "plugins": part("job.stack.kernels and job.stack.loss, of Axolotl", None),
    "sequence_parallel_degree": part("layout.cp, of Axolotl", None),
    "auto_find_batch_size": unmodelled_key("a smaller batch where memory ends", False),
    "neftune_noise_alpha": unmodelled_key("noise on the embeddings", None),
    "ddp_bucket_cap_mb": unmodelled_key("buckets of another size", None),
    "torch_empty_cache_steps": unmodelled_key("the allocator is emptied between steps", None),
    "fsdp_config.activation_checkpointing": part("layout.ac", False),
    "torch_dtype": part("the type in which weights are loaded, and under DDP trained", None),
    "dtype": part("the type in which weights are loaded, and under DDP trained", None),
    **effects.TRAINER,
    **ignored_keys(*harmless.TRAINER.split()),
    **adapters.TABLES["trl"],
    **data.TABLES["trl"],
}

_OF_TRL = {"max_length": 1024, "gradient_checkpointing": True}  # base_config.py, sft_config.py, dpo_config.py
# Defaults of TRL's scripts that differ from those of TrainingArguments; bf16 is on, too, unless fp16 is.
TRL_DEFAULTS: dict[str, dict[str, Any]] = {
    "sft": {**_OF_TRL, "learning_rate": 2e-5},
    "dpo": {**_OF_TRL, "learning_rate": 1e-6, "loss_type": "sigmoid"},
}

# Keys of TRL's configs that TrainingArguments does not have.
TRL_SIGNS = frozenset(
    {
        "assistant_only_loss", "chat_template_path", "completion_only_loss", "dataset_text_field", "loss_type",
        "packing_strategy", "truncation_mode", "use_peft",
    }
)  # fmt: skip

FSDP = "accelerate.fsdp_config.fsdp_"

ACCELERATE: Table = {
    "accelerate.distributed_type": part("the stack: FSDP, DEEPSPEED, MULTI_GPU or NO", "NO"),
    "accelerate.num_processes": part("the number of ranks", None),
    "accelerate.mixed_precision": part(PRECISION, "no"),
    f"{FSDP}version": part("FSDP1 or FSDP2", 1),
    f"{FSDP}reshard_after_forward": part(f"{ZERO} and job.stack.reshard", True),
    f"{FSDP}sharding_strategy": part(f"{ZERO} and its shard group, of FSDP1", "FULL_SHARD"),
    f"{FSDP}offload_params": part("job.offload: weights, gradients and optimizer in host memory", False),
    f"{FSDP}activation_checkpointing": part("layout.ac", False),
    f"{FSDP}auto_wrap_policy": part("blocks are FSDP's units", "NO_WRAP"),
    f"{FSDP}backward_prefetch": unmodelled_key("another order of gathers", "BACKWARD_PRE"),
    f"{FSDP}forward_prefetch": unmodelled_key("gathers ahead in the forward", False),
    f"{FSDP}min_num_params": unmodelled_key("units of another size", None),
    "accelerate.parallelism_config.parallelism_config_dp_replicate_size": part("layout.dp and its shard group", 1),
    "accelerate.parallelism_config.parallelism_config_dp_shard_size": part("layout.dp and its shard group", 1),
    "accelerate.parallelism_config.parallelism_config_tp_size": field("layout.tp", 1),
    "accelerate.parallelism_config.parallelism_config_cp_size": field("layout.cp", 1),
    "accelerate.parallelism_config.parallelism_config_cp_backend": part("layout.cp_kind: DeepSpeed's is Ulysses", None),
    "accelerate.parallelism_config.parallelism_config_sp_size": part("layout.cp, Ulysses of DeepSpeed", 1),
    "accelerate.dynamo_config.dynamo_backend": part("job.stack.compile", "NO"),
    "accelerate.deepspeed_config.zero_stage": part(ZERO, 2),
    "accelerate.deepspeed_config.gradient_accumulation_steps": part("job.global_batch", 1),
    "accelerate.deepspeed_config.gradient_clipping": part("job.optimizer.clip", None),
    "accelerate.deepspeed_config.offload_optimizer_device": part("job.offload", "none"),
    "accelerate.deepspeed_config.offload_param_device": part("job.offload: weights in host memory", "none"),
    "accelerate.deepspeed_config.deepspeed_config_file": part("a DeepSpeed config", None),
    **effects.ACCELERATE,
    **ignored_keys(*(f"accelerate.{name}" for name in harmless.ACCELERATE.split())),
}

DS = "deepspeed."

DEEPSPEED: Table = {
    f"{DS}train_batch_size": part("job.global_batch", None),
    f"{DS}train_micro_batch_size_per_gpu": part("layout.mbs", None),
    f"{DS}gradient_accumulation_steps": part("job.global_batch", None),
    f"{DS}gradient_clipping": part("job.optimizer.clip", None),
    f"{DS}bf16.enabled": part(PRECISION, False),
    f"{DS}bf16.bf16_master_weights_and_grads": unmodelled_key("masters and gradients in bf16", False),
    f"{DS}bf16.bf16_optimizer_states": unmodelled_key("moments in bf16", False),
    f"{DS}fp16.enabled": part(PRECISION, False),
    f"{DS}fp16.fp16_master_weights_and_grads": unmodelled_key("masters and gradients in fp16", False),
    f"{DS}data_types.grad_accum_dtype": part(
        f"{PRECISION}: dtype of gradient accumulation; default: that of the weights", None
    ),
    f"{DS}communication_data_type": unmodelled_key("gradients travel in another width", None),
    f"{DS}zero_optimization.stage": part(ZERO, 0),
    f"{DS}zero_optimization.overlap_comm": part("job.stack.overlap; default: true under stage 3", None),
    f"{DS}zero_optimization.offload_optimizer.device": part("job.offload", "none"),
    f"{DS}zero_optimization.offload_param.device": part("job.offload: weights in host memory", "none"),
    f"{DS}zero_optimization.cpu_offload": part("job.offload, of old files", False),
    f"{DS}zero_optimization.cpu_offload_param": part("job.offload, of old files", False),
    f"{DS}zero_optimization.zero_hpz_partition_size": unmodelled_key("ZeRO++: a second copy within the node", 1),
    f"{DS}zero_optimization.zero_quantized_weights": unmodelled_key("ZeRO++: gathers in 8 bits", False),
    f"{DS}zero_optimization.zero_quantized_gradients": unmodelled_key("ZeRO++: reductions in 4 bits", False),
    f"{DS}zero_optimization.mics_shard_size": part("layout.shard_group", -1),
    f"{DS}zero_optimization.reduce_bucket_size": part("job.stack.reduce_bucket", 500_000_000),
    f"{DS}zero_optimization.stage3_prefetch_bucket_size": part("job.stack.prefetch_bucket_size", 50_000_000),
    f"{DS}zero_optimization.stage3_param_persistence_threshold": part("job.stack.param_persistence_threshold", 100_000),
    f"{DS}zero_optimization.stage3_max_live_parameters": part("job.stack.max_live_parameters", 1_000_000_000),
    f"{DS}zero_optimization.stage3_max_reuse_distance": part("job.stack.max_reuse_distance", 1_000_000_000),
    f"{DS}zero_optimization.sub_group_size": part("job.stack.update_group_size", 1_000_000_000),
    f"{DS}optimizer.type": part("job.optimizer.kind; default: the trainer's", None),
    f"{DS}optimizer.params.lr": part("job.learning_rate.peak", None),
    f"{DS}optimizer.params.betas": part("job.optimizer.betas", None),
    f"{DS}optimizer.params.eps": part("job.optimizer.epsilon", None),
    f"{DS}optimizer.params.weight_decay": part("job.optimizer.weight_decay", None),
    f"{DS}tensor_parallel.autotp_size": part("layout.tp", 1),
    f"{DS}sequence_parallel_size": part("layout.cp, Ulysses", 1),
    f"{DS}fp8.enabled": unmodelled_key("fp8 by DeepSpeed", False),
    **effects.DEEPSPEED,
    **ignored_keys(*(f"{DS}{name}" for name in harmless.DEEPSPEED.split())),
}

TABLE: Table = {**ARGUMENTS, **ACCELERATE, **DEEPSPEED}

PARALLEL = "accelerate.parallelism_config.parallelism_config_"

PREFIX = "deepspeed.zero_optimization."

DERIVED_FROM_WIDTH: dict[str, Callable[[int], int]] = {
    f"{PREFIX}reduce_bucket_size": lambda width: width * width,
    f"{PREFIX}stage3_prefetch_bucket_size": lambda width: int(0.9 * width * width),
    f"{PREFIX}stage3_param_persistence_threshold": lambda width: 10 * width,
}

# DeepSpeed's keys for which "auto" is a value: transformers (integrations/deepspeed.py, trainer_config_process and
# trainer_config_finalize) and accelerate (DeepSpeedPlugin) fill them with the trainer's, DeepSpeed itself no other.
FILLED_BY_TRAINER = frozenset(
    f"deepspeed.{key}"
    for key in (
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "train_batch_size",
        "gradient_clipping",
        *(f"optimizer.params.{name}" for name in ("lr", "betas", "eps", "weight_decay")),
        *(f"scheduler.params.{name}" for name in ("warmup_min_lr", "warmup_max_lr")),
        *(f"scheduler.params.{name}" for name in ("warmup_num_steps", "total_num_steps")),
        "fp16.enabled",
        "bf16.enabled",
        *(
            f"zero_optimization.offload_{part}.{name}"
            for part in ("optimizer", "param")
            for name in ("device", "nvme_path")
        ),
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    )
)

STAGE_3 = {
    "stage3_prefetch_bucket_size": "prefetch_bucket_size",
    "stage3_param_persistence_threshold": "param_persistence_threshold",
    "stage3_max_live_parameters": "max_live_parameters",
    "stage3_max_reuse_distance": "max_reuse_distance",
}
ALL_ELEMENTS = 10**12  # more than any group has

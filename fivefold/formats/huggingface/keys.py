"""Keys of TrainingArguments (transformers 5.23.0), accelerate's YAML (1.15.0) and DeepSpeed's JSON (0.19.8).

Sources: transformers/training_args.py; trl/trainer/sft_config.py; accelerate/commands/config/config_args.py, cluster.py
and accelerate/utils/dataclasses.py; deepspeed/runtime/constants.py, config.py and zero/config.py.
"""

from __future__ import annotations

from fivefold.formats.keys import Table, field, foreign, idle, part

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
    "warmup_steps": part("job.learning_rate.warmup_steps", 0),
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
    "use_peft": foreign("adapters, not the weights, are trained", False),
    "lora_r": foreign("adapters, not the weights, are trained", None),
    "load_in_4bit": foreign("weights in 4 bits", False),
    "load_in_8bit": foreign("weights in 8 bits", False),
    "auto_find_batch_size": foreign("a smaller batch where memory ends", False),
    "neftune_noise_alpha": foreign("noise on the embeddings", None),
    "ddp_bucket_cap_mb": foreign("buckets of another size", None),
    "torch_empty_cache_steps": foreign("the allocator is emptied between steps", None),
    "eval_strategy": foreign("steps of evaluation between those of training", "no"),
}

FSDP = "accelerate.fsdp_config."
ACCELERATE: Table = {
    "accelerate.distributed_type": part("the stack: FSDP, DEEPSPEED, MULTI_GPU or NO", "NO"),
    "accelerate.num_processes": part("the number of ranks", None),
    "accelerate.mixed_precision": part(PRECISION, "no"),
    f"{FSDP}fsdp_version": part("FSDP1 or FSDP2", 1),
    f"{FSDP}fsdp_reshard_after_forward": part(f"{ZERO} and job.stack.reshard", True),
    f"{FSDP}fsdp_sharding_strategy": part(f"{ZERO} and its shard group, of FSDP1", "FULL_SHARD"),
    f"{FSDP}fsdp_offload_params": foreign("weights, gradients and optimizer in host memory: not counted", False),
    f"{FSDP}fsdp_activation_checkpointing": part("layout.ac", False),
    f"{FSDP}fsdp_auto_wrap_policy": part("blocks are FSDP's units", "NO_WRAP"),
    f"{FSDP}fsdp_backward_prefetch": foreign("another order of gathers", "BACKWARD_PRE"),
    f"{FSDP}fsdp_forward_prefetch": foreign("gathers ahead in the forward", False),
    f"{FSDP}fsdp_min_num_params": foreign("units of another size", None),
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
    "accelerate.deepspeed_config.offload_param_device": foreign("weights in host memory", "none"),
    "accelerate.deepspeed_config.deepspeed_config_file": part("a DeepSpeed config", None),
    "accelerate.fp8_config": foreign("fp8 by another library", None),
    **idle(
        "accelerate.parallelism_config.*",
        "accelerate.*",
        "accelerate.fsdp_config.*",
        "accelerate.deepspeed_config.*",
        "accelerate.fp8_config.*",
    ),
}

DS = "deepspeed."
DEEPSPEED: Table = {
    f"{DS}train_batch_size": part("job.global_batch", None),
    f"{DS}train_micro_batch_size_per_gpu": part("layout.mbs", None),
    f"{DS}gradient_accumulation_steps": part("job.global_batch", None),
    f"{DS}gradient_clipping": part("job.optimizer.clip", None),
    f"{DS}bf16.enabled": part(PRECISION, False),
    f"{DS}bf16.bf16_master_weights_and_grads": foreign("masters and gradients in bf16", False),
    f"{DS}bf16.bf16_optimizer_states": foreign("moments in bf16", False),
    f"{DS}fp16.enabled": part(PRECISION, False),
    f"{DS}fp16.fp16_master_weights_and_grads": foreign("masters and gradients in fp16", False),
    f"{DS}fp16.auto_cast": idle("x")["x"],
    f"{DS}data_types.grad_accum_dtype": part(
        f"{PRECISION}: of sums of gradients; without it that of the weights", None
    ),
    f"{DS}communication_data_type": foreign("gradients travel in another width", None),
    f"{DS}zero_optimization.stage": part(ZERO, 0),
    f"{DS}zero_optimization.overlap_comm": part("job.stack.overlap; without it under stage 3", None),
    f"{DS}zero_optimization.offload_optimizer.device": part("job.offload", "none"),
    f"{DS}zero_optimization.offload_param.device": foreign("weights in host memory", "none"),
    f"{DS}zero_optimization.cpu_offload": part("job.offload, of old files", False),
    f"{DS}zero_optimization.zero_hpz_partition_size": foreign("ZeRO++: a second copy within the node", 1),
    f"{DS}zero_optimization.zero_quantized_weights": foreign("ZeRO++: gathers in 8 bits", False),
    f"{DS}zero_optimization.zero_quantized_gradients": foreign("ZeRO++: reductions in 4 bits", False),
    f"{DS}zero_optimization.mics_shard_size": part("layout.shard_group", -1),
    f"{DS}zero_optimization.reduce_bucket_size": part("job.stack.reduce_bucket", 500_000_000),
    f"{DS}zero_optimization.stage3_prefetch_bucket_size": part("job.stack.fetch_ahead", 50_000_000),
    f"{DS}zero_optimization.stage3_param_persistence_threshold": part("job.stack.fetch_small", 100_000),
    f"{DS}zero_optimization.stage3_max_live_parameters": part("job.stack.fetch_live", 1_000_000_000),
    f"{DS}zero_optimization.stage3_max_reuse_distance": part("job.stack.fetch_reuse", 1_000_000_000),
    f"{DS}zero_optimization.sub_group_size": foreign("the update in parts", 1_000_000_000),
    f"{DS}optimizer.type": part("job.optimizer.kind; without it as the trainer says", None),
    f"{DS}optimizer.params.lr": part("job.learning_rate.peak", None),
    f"{DS}optimizer.params.betas": part("job.optimizer.betas", None),
    f"{DS}optimizer.params.eps": part("job.optimizer.epsilon", None),
    f"{DS}optimizer.params.weight_decay": part("job.optimizer.weight_decay", None),
    f"{DS}tensor_parallel.autotp_size": part("layout.tp", 1),
    f"{DS}sequence_parallel_size": part("layout.cp, Ulysses", 1),
    f"{DS}fp8.enabled": foreign("fp8 by DeepSpeed", False),
    f"{DS}compression_training": foreign("compression", None),
    f"{DS}sparse_attention": foreign("sparse attention", None),
    f"{DS}moe": foreign("experts by DeepSpeed", None),
    **idle(f"{DS}zero_optimization.*", f"{DS}fp16.*", f"{DS}bf16.*", f"{DS}scheduler.*", f"{DS}optimizer.*"),
    **idle(
        f"{DS}steps_per_print",
        f"{DS}_comment",
        f"{DS}fp8.*",
        f"{DS}wall_clock_breakdown",
        f"{DS}zero_allow_untested_optimizer",
        f"{DS}flops_profiler.*",
    ),
    **idle(f"{DS}activation_checkpointing.*", f"{DS}tensorboard.*", f"{DS}wandb.*", f"{DS}csv_monitor.*", f"{DS}amp.*"),
    **idle(f"{DS}comms_logger.*", f"{DS}prescale_gradients", f"{DS}gradient_predivide_factor", f"{DS}monitor_config.*"),
    **idle(f"{DS}checkpoint.*", f"{DS}elasticity.*", f"{DS}dump_state", f"{DS}memory_breakdown", f"{DS}data_types.*"),
    **idle(
        f"{DS}zero_force_ds_cpu_optimizer",
        f"{DS}comms_config.*",
        f"{DS}tensor_parallel.*",
        f"{DS}zero_optimization.log_trace_cache_warnings",
    ),
}

# Of TrainingArguments and the scripts around it, by the start of the name.
IDLE_STARTS = (
    "output_dir", "logging", "save_", "log", "report", "run_name", "eval", "do_", "push", "hub", "dataloader",
    "dataset", "ddp_", "data", "preproc", "overwrite", "include", "load_best", "metric", "greater", "remove_un",
    "label", "group_by", "resume", "disable_tqdm", "full_det", "skip_", "num_train_epochs", "warmup_ratio",
    "per_device_eval", "prediction", "average_tokens", "optim_", "gradient_checkpointing_kwargs",
    "lr_scheduler_kwargs", "trust_remote", "torch_dtype", "torch_compile_", "fsdp_config", "use_cache", "project",
    "trackio", "wandb", "stream", "chat_template", "jit", "debug", "tokenizer", "use_fast", "config_name",
    "cache_dir", "token", "low_cpu", "validation", "train_file", "max_eval", "max_train", "text_field", "completion",
    "assistant", "local_rank", "accelerator_config", "ignore_data", "restore", "early_stop", "no_cuda", "use_cpu",
    "dtype", "model_revision", "num_proc", "shuffle", "val_", "test_", "plot", "seed_", "ddp", "liger",
    "parallelism_config", "train_sampling", "length_col", "batch_eval", "enable_jit", "bf16_full", "fp16_full",
    "activation_checkpointing_kwargs", "special_tokens", "adapter", "lora_", "hf_", "mlflow", "comet", "swanlab",
    "env", "fsdp_transformer_layer_cls_to_wrap", "lazy_preprocess",
)  # fmt: skip

TABLE: Table = {**ARGUMENTS, **ACCELERATE, **DEEPSPEED}

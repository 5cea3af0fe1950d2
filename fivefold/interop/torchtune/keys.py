"""torchtune's keys with the defaults of its recipes, and of the components that they build.

Sources: torchtune 0.6.1 (package index): recipes/*.py, torchtune/models, modules/loss/ce_chunked_output_loss.py,
rlhf/loss/dpo.py, training/lr_schedulers.py. The main branch (pytorch/torchtune@bd2a0fc) has further degrees, which are
named, validation between the steps, and more models.
"""

from __future__ import annotations

from fivefold.interop.keys import Table, approximate_keys, field, ignored_keys, part, unmodelled_key, unmodelled_keys

VERSION = "0.6.1"

ADAPTER = "job.adapter"

ADAPTER_ARGUMENTS = {
    "model.lora_attn_modules": f"{ADAPTER}.targets",
    "model.apply_lora_to_mlp": f"{ADAPTER}.targets",
    "model.lora_rank": f"{ADAPTER}.rank",
    "model.lora_alpha": f"{ADAPTER}.alpha",
    "model.lora_dropout": f"{ADAPTER}.dropout",
    "model.use_dora": f"{ADAPTER}.kind",
    "model.quantize_base": f"{ADAPTER}.base",
}

TABLE: Table = {
    "recipe": part("layout, job.objective: the recipe that tune run starts", None),
    "model._component_": part("model, job.adapter: the builder", None),
    **{key: part(means, None) for key, means in ADAPTER_ARGUMENTS.items()},
    "model.apply_lora_to_output": unmodelled_key("an adapter on the head", False),
    "model.attn_dropout": unmodelled_key("dropout of attention", 0.0),
    **unmodelled_keys(
        "a model of images and text", "model.decoder_trainable", "model.encoder_trainable", "model.fusion_trainable",
        "model.image_size",
    ),
    "tokenizer.max_seq_len": part("job.sequence", None),
    "dataset": part("job.objective", None),
    "dataset._component_": part("job.objective", None),
    "dataset.packed": part("job.sequence: samples of up to this length are joined", False),
    "batch_size": part("layout.mbs", None),
    "gradient_accumulation_steps": part("job.global_batch", 1),
    "epochs": part("job.steps: those of an epoch times the epochs", 1),
    "max_steps_per_epoch": part("job.steps", None),
    "seed": part("job.seed", None),
    "dtype": part("job.precision", "bf16"),
    "optimizer._component_": part("job.optimizer.kind", "torch.optim.AdamW"),
    "optimizer.lr": field("job.learning_rate.peak", None),
    "optimizer.weight_decay": field("job.optimizer.weight_decay", 0.01),
    "optimizer.eps": field("job.optimizer.epsilon", 1e-8),
    "optimizer.betas": part("job.optimizer.betas", None),
    **approximate_keys("the kernels of the update, which are counted as fused", "optimizer.fused", default=True),
    "optimizer.amsgrad": unmodelled_key("another state of each weight", False),
    "optimizer_in_bwd": unmodelled_key("weights are updated within the backward", False),
    "lr_scheduler._component_": part("job.learning_rate.kind", None),
    "lr_scheduler.num_warmup_steps": part("job.learning_rate.warmup_steps", 0),
    "lr_scheduler.num_cycles": part("job.learning_rate.kind: 0 is constant after the warm-up", 0.5),
    "loss._component_": part("job.stack.loss", None),
    "loss.beta": part("job.dpo_beta", None),
    **approximate_keys("another loss of pairs of the same cost", "loss.label_smoothing", default=0),
    **approximate_keys("chunks of the loss of another size", "loss.num_output_chunks", default=8),
    "clip_grad_norm": part("job.optimizer.clip", None),
    "compile": part("job.stack.compile", False),
    "device": unmodelled_key("a device other than GPUs", "cuda"),
    "enable_activation_checkpointing": part("layout.ac", False),
    "ac_mode": part("layout.ac", None),
    "ac_option": part("layout.ac", None),
    "enable_activation_offloading": part("job.offload", False),
    "fsdp_cpu_offload": part("job.offload", False),
    "fsdp_reshard_after_forward": part("job.stack.reshard", True),
    "custom_sharded_layers": part("job.stack.backward_all_gather: units of embedding and head", None),
    "tensor_parallel_dim": part("layout.tp", 1),
    "tensor_parallel_plan._component_": part("layout.tp", None),
    "tensor_parallel_plan": unmodelled_key("a plan without a component", None),
    "data_parallel_shard_dim": unmodelled_key("ranks that share one copy, of the main branch", -1),
    "data_parallel_replicate_dim": unmodelled_key("several copies of the shards, of the main branch", 1),
    "context_parallel_dim": unmodelled_key("context parallelism, of the main branch", 1),
    "resize_token_embeddings": unmodelled_key("a vocabulary of the tokenizer's size, of the main branch", False),
    "enable_loss_parallel": unmodelled_key("a loss on shards of the vocabulary", False),
    "collate_fn": unmodelled_key("samples padded otherwise", "torchtune.data.padded_collate_sft"),
    **approximate_keys("deterministic kernels", "cudnn_deterministic_mode"),
    **approximate_keys("the profiler's own time and memory", "profiler.enabled", default=False),
    **ignored_keys(
        "output_dir", "shuffle", "resume_from_checkpoint", "save_adapter_weights_only", "log_every_n_steps",
        "log_peak_memory_stats", "log_level", "low_cpu_ram", "enable_async_checkpointing", "memory_efficient_fsdp_wrap",
        "loss.ignore_index", "loss", "optimizer.foreach", "metric_logger", "profiler", "tokenizer", "checkpointer",
        "tokenizer.*", "dataset.*", "checkpointer.*", "ref_checkpointer.*", "metric_logger.*", "profiler.*", "fsdp.*",
        "run_val_every_n_steps", "batch_size_val", "dataset_val", "dataset_val.*", "save_every_n_steps",
    ),
}  # fmt: skip

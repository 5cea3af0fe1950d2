"""nanotron's keys with their defaults: those of 0.4, and those that only its main branch has.

Sources: nanotron 0.4 nanotron/config/config.py, parallelism_config.py, models_config.py; huggingface/nanotron@19f88fb:
src/nanotron/config/parallelism_config.py, config.py (context_parallel_size, recompute_layer, optimizer_factory).
"""

from __future__ import annotations

from fivefold.interop.keys import Table, approximate_keys, field, ignored_keys, part, unmodelled_key

VERSION = "0.4"

OPTIMIZER, F = "optimizer.", "optimizer.optimizer_factory."

R = "optimizer.learning_rate_scheduler."

MODEL = "model.model_config."

MODEL_FIELDS = (
    "hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads",
    "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "rope_scaling", "tie_word_embeddings", "vocab_size",
    "rope_theta", "attention_bias",
)  # fmt: skip

MAIN = (
    "parallelism.context_parallel_size",
    "parallelism.recompute_layer",
    f"{MODEL}rope_theta",
    f"{MODEL}attention_bias",
)

FACTORY = ("adam_eps", "adam_beta1", "adam_beta2", "torch_adam_is_fused")  # under optimizer in 0.4

TOKENS = ("tokens.val_check_interval", "tokens.limit_val_batches", "tokens.limit_test_batches")

WITHOUT_EFFECT = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "pretraining_tp",
    "use_cache",
    "is_llama_config",
    "is_qwen2_config",
    "initializer_range",
    "rope_interleaved",
    "interleaved_rotary",
    "z_loss_coefficient",
)

TABLE: Table = {
    **{f"{MODEL}{name}": part(f"model: {name} of a Hugging Face config", None) for name in MODEL_FIELDS},
    f"{MODEL}rope_scaling.*": part("model: rope_scaling of a Hugging Face config", None),
    f"{MODEL}z_loss_enabled": unmodelled_key("another loss", False),
    f"{MODEL}_use_doc_masking": unmodelled_key("attention within documents", False),
    f"{MODEL}flex_attention_mask": unmodelled_key("another mask", None),
    **approximate_keys(
        "another kernel", f"{MODEL}_fused_rms_norm", f"{MODEL}_fused_rotary_emb", f"{MODEL}_use_qkv_packed"
    ),
    **approximate_keys("experts, of which those of --model are counted", f"{MODEL}moe_config.*"),
    "model.dtype": part("job.precision", "bfloat16"),
    "model.make_vocab_size_divisible_by": field("job.stack.vocab_multiple", 1),
    "parallelism.dp": field("layout.dp", None),
    "parallelism.tp": field("layout.tp", None),
    "parallelism.pp": field("layout.pp", None),
    "parallelism.context_parallel_size": field("layout.cp", 1),
    "parallelism.expert_parallel_size": field("layout.ep", 1),
    "parallelism.pp_engine": field("layout.schedule", "afab", {"1f1b": "1f1b", "afab": "gpipe"}),
    "parallelism.tp_mode": part("layout.sp: REDUCE_SCATTER is sequence parallelism", "ALL_REDUCE"),
    "parallelism.tp_linear_async_communication": field("job.stack.async_tp", False),
    "parallelism.recompute_layer": part("layout.ac", False),
    "parallelism.recompute_granularity": part("layout.ac, of old files", None),
    "parallelism.tp_recompute_allgather": unmodelled_key("inputs gathered again in the backward: counted as so", True),
    "tokens.sequence_length": field("job.sequence", None),
    "tokens.micro_batch_size": field("layout.mbs", None),
    "tokens.batch_accumulation_per_replica": part("job.global_batch: micro-batches of a replica", None),
    "tokens.train_steps": field("job.steps", None),
    f"{OPTIMIZER}zero_stage": field("layout.zero", 0),
    f"{OPTIMIZER}weight_decay": field("job.optimizer.weight_decay", 0.0),
    f"{OPTIMIZER}clip_grad": field("job.optimizer.clip", 0.0),
    f"{OPTIMIZER}accumulate_grad_in_fp32": part("job.precision: sums of gradients and masters", True),
    f"{F}name": part("job.optimizer.kind", "adamW"),
    f"{F}adam_eps": field("job.optimizer.epsilon", 1e-8),
    f"{F}adam_beta1": part("job.optimizer.betas", 0.9),
    f"{F}adam_beta2": part("job.optimizer.betas", 0.999),
    f"{F}torch_adam_is_fused": unmodelled_key("the optimizer's kernels: counted as fused", True),
    f"{R}learning_rate": field("job.learning_rate.peak", None),
    f"{R}lr_warmup_steps": field("job.learning_rate.warmup_steps", 0),
    f"{R}lr_decay_style": part("job.learning_rate.kind", None),
    f"{R}lr_decay_steps": part("job.learning_rate.decay_steps", None),
    f"{R}lr_decay_starting_step": part("job.learning_rate: when the decay begins; default: after warm-up", None),
    f"{R}min_decay_lr": part("job.learning_rate.floor", None),
    "general.seed": part("job.seed", None),
    "optimizer.weight_decay_exclude_named_params": ignored_keys("x")["x"],
    "parallelism.moe_layer_recompute": unmodelled_key("experts run again in the backward", False),
    "doremi.*": unmodelled_key("the weights of domains are learnt next to another model", None),
    f"{MODEL}moe_config": unmodelled_key("experts: say the model by --model", None),
    f"{MODEL}_attn_implementation": unmodelled_key("another attention kernel", "flash_attention_2"),
    f"{MODEL}sliding_window_size": unmodelled_key("attention within a window", None),
    f"{MODEL}no_rope_layer": unmodelled_key("layers without rotary positions", None),
    "model.ddp_bucket_cap_mb": unmodelled_key("buckets of another size, whose memory is not counted", 25),
    **approximate_keys("checks of every step", "general.ignore_sanity_checks", default=True),
    **ignored_keys("general.*", "checkpoints.*", "data.*", "data_stages", "logging.*", "lighteval.*", "profiler.*"),
    **ignored_keys("model.init_method.*", f"{R}*", *TOKENS, "s3_upload.*", "metrics_logging.*", "profiler"),
    "metrics_logging": ignored_keys("x")["x"],
    **ignored_keys("tokenizer.*", "lighteval", "s3_upload", "data_stages.*", "logging", "data", "tokenizer",
                   "checkpoints"),
    **ignored_keys(*(f"{MODEL}{name}" for name in WITHOUT_EFFECT)),
}  # fmt: skip

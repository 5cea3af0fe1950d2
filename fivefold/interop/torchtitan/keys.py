"""torchtitan's keys that both versions have, and those of its Python configs (0.3.0), with the defaults of 0.3.0.

Sources: torchtitan 0.3.0 torchtitan/config/configs.py, trainer.py, components/, distributed/activation_checkpoint.py,
distributed/pipeline_parallel.py, parallel_dims.py, models/*/__init__.py.
"""

from __future__ import annotations

from fivefold.interop.keys import Table, approximate_keys, field, ignored_keys, part, unmodelled_key

VERSION = "0.3.0"

# PyTorch's names: torch/distributed/pipelining/schedules.py, get_schedule_class, which ignores case.
SCHEDULES = {
    "1F1B": "1f1b",
    "GPipe": "gpipe",
    "Interleaved1F1B": "interleaved",
    "ZBVZeroBubble": "zbv",
    "DualPipeV": "dualpipev",
}

LOOPED = ("Interleaved1F1B", "ZBVZeroBubble", "DualPipeV", "LoopedBFS", "InterleavedZeroBubble")

ZERO = "layout.zero and its shard group"

STAGES = "layout.v and layout.stages"

BATCH = "layout.mbs and job.global_batch"

RATE = "job.learning_rate"

PRECISION = "job.precision"

AC = "layout.ac"

COMM = tuple(
    f"comm.{name}"
    for name in (
        "init_timeout_seconds", "train_timeout_seconds", "trace_buf_size", "save_traces_folder",
        "save_traces_file_prefix",
    )
)  # fmt: skip

SHARED: Table = {
    "training.seq_len": field("job.sequence", 2048),
    "training.local_batch_size": part(f"{BATCH}: sequences of a replica in one accumulation step", 8),
    "training.global_batch_size": part("job.global_batch; -1: local_batch_size of every replica", -1),
    "training.steps": field("job.steps", 10_000),
    "training.max_norm": field("job.optimizer.clip", 1.0),
    "training.dtype": part(f"{PRECISION}: of weights and optimizer", "float32"),
    "training.mixed_precision_param": part(f"{PRECISION}: of gathered weights and matmuls", "bfloat16"),
    "training.mixed_precision_reduce": unmodelled_key("gradients reduced in 16 bits: counted as fp32", "float32"),
    "training.enable_cpu_offload": unmodelled_key(
        "weights, gradients and optimizer in host memory: not counted", False
    ),
    "parallelism.data_parallel_replicate_degree": part(f"layout.dp and {ZERO}", 1),
    "parallelism.data_parallel_shard_degree": part(f"layout.dp and {ZERO}; -1: all ranks that are left", -1),
    "parallelism.fsdp_reshard_after_forward": part("layout.zero and job.stack.reshard", "default"),
    "parallelism.tensor_parallel_degree": field("layout.tp", 1),
    "parallelism.context_parallel_degree": field("layout.cp", 1),
    "parallelism.pipeline_parallel_degree": field("layout.pp", 1),
    "parallelism.expert_parallel_degree": field("layout.ep", 1),
    "parallelism.pipeline_parallel_schedule": part("layout.schedule", "1F1B"),
    "parallelism.pipeline_parallel_microbatch_size": part("layout.mbs, with a pipeline", 1),
    "parallelism.pipeline_parallel_first_stage_less_layers": part(STAGES, 1),
    "parallelism.pipeline_parallel_last_stage_less_layers": part(STAGES, 1),
    "parallelism.pipeline_parallel_layers_per_stage": part(STAGES, None),
    "parallelism.module_fqns_per_model_part": part(STAGES, None),
    "parallelism.pipeline_parallel_schedule_csv": unmodelled_key("a schedule of one's own: give it to --schedule", ""),
    "parallelism.context_parallel_load_balancer": unmodelled_key(
        "how a sequence is cut: counted as headtail", "headtail"
    ),
    "lr_scheduler.warmup_steps": field("job.learning_rate.warmup_steps", 200),
    "lr_scheduler.decay_ratio": part(RATE, None),
    "lr_scheduler.decay_type": part(RATE, "linear"),
    "lr_scheduler.min_lr_factor": field("job.learning_rate.floor", 0.0),
    "compile.enable": part("job.stack.compile and job.stack.kernels", False),
    "compile.components": part(
        "job.stack.compile_loss, and whether blocks are compiled with the loss", ["model", "loss"]
    ),
    "debug.seed": part("job.seed; None: any", None),
    "debug.moe_force_load_balance": part("job.imbalance: every expert gets as many tokens, as is counted", False),
    "debug.batch_invariant": unmodelled_key("kernels of a fixed order of summation", False),
    "comm.mode": unmodelled_key("messages that are not sent", "default"),
    **approximate_keys("another backend of the compiler", "compile.backend", default="inductor"),
    "debug.detect_anomaly": unmodelled_key("autograd's anomaly detection, which slows every operation", False),
    "debug.deterministic": unmodelled_key("deterministic kernels, which may be slower", False),
    **ignored_keys(
        "training.gc_freq", "training.gc_debug", "lr_scheduler.total_steps", "debug.deterministic_warn_only"
    ),
    **ignored_keys("metrics.*", "checkpoint.*", *COMM),
    **approximate_keys("debug information, which slows recomputation", "activation_checkpoint.debug", default=False),
    **ignored_keys("activation_checkpoint.preserve_rng_state", "activation_checkpoint.determinism_check"),
}

PYTHON_ONLY = (
    "activation_checkpoint.visualize_memory_budget_pareto",
    "debug.enable_structured_logging", "debug.print_config", "debug.save_config_file", "debug.spmd_typechecking",
    "comm",
)  # fmt: skip

PYTHON: Table = {
    "model_spec": part("model: its family, as the module of model_registry", "llama3"),
    "model_spec.flavor": part("model: its size", None),
    "model_spec.attn_backend": field(
        "job.stack.attention", "flex", {"flex": "flash2", "varlen": "flash2", "flex_flash": "flash"}
    ),
    "model_spec.converters": part(PRECISION, []),
    "model_spec.num_mtp_layers": part("model.mtp", 0),
    "model_spec.moe_comm_backend": part("job.stack.dispatcher", "standard"),
    "model_spec.non_blocking_capacity_factor": unmodelled_key("tokens over a capacity are dropped", None),
    "model_spec.tp_gemm_backend": part("job.stack.overlap: tp communication overlaps compute", "default"),
    **SHARED,
    "training.disable_cuda_graphs": part("job.stack.cuda_graphs", False),
    "parallelism.enable_sequence_parallel": field("layout.sp", True),
    "parallelism.enable_fsdp_symm_mem": unmodelled_key("gathers through symmetric memory", False),
    "compile.enable_async_tensor_parallel": part("job.stack.overlap: tp communication overlaps compute", False),
    "activation_checkpoint": part(f"{AC}: FullAC, SelectiveAC, or None", "SelectiveAC"),
    "activation_checkpoint.memory_budget": part("what the compiler may keep, under MemoryBudgetAC", 0.5),
    "loss": field(
        "job.stack.loss",
        "CrossEntropyLoss",
        {"CrossEntropyLoss": "plain", "ChunkedLossWrapper": "chunked", "MTPLoss": "plain"},
    ),
    "optimizer.lr": field("job.learning_rate.peak", 8e-4),
    "optimizer.betas": field("job.optimizer.betas", (0.9, 0.95)),
    "optimizer.eps": field("job.optimizer.epsilon", 1e-8),
    "optimizer.weight_decay": field("job.optimizer.weight_decay", 0.1),
    "optimizer.implementation": unmodelled_key("the optimizer's kernels: counted as fused", "fused"),
    "optimizer.param_groups": unmodelled_key("an optimizer for some weights: counted as AdamW for all", None),
    "optimizer.optimizer_factory_kwargs_by_name": unmodelled_key("another optimizer", None),
    "activation_checkpoint.force_recompute_mm_shapes_by_fqns": unmodelled_key(
        "matmuls that are recomputed: counted as every second one, and the router's", ["moe.router.gate"]
    ),
    "loss.num_chunks": approximate_keys("another number of chunks of the loss", "x", default=8)["x"],
    "override": unmodelled_key("replaces parts of the model by others", None),
    **ignored_keys(*PYTHON_ONLY, "loss.*"),
    **approximate_keys("another way to cut a model over ranks", "parallelism.spmd_backend", default="spmd_types"),
    **ignored_keys("profiler.*", "dataloader.*", "tokenizer.*", "hf_assets_path", "dump_folder"),
    **ignored_keys("parallelism.context_parallel_ptrr_mask_key", "metrics", "checkpoint", "dataloader", "tokenizer"),
    **ignored_keys(
        "validator",
        "validator.*",
        "optimizer",
        "lr_scheduler",
        "training",
        "parallelism",
        "compile",
        "debug",
        "profiler",
    ),
}

# A Llama of other sizes is written in full: model_spec=replace(model_registry("8B"), model=Llama3Model.Config(…)).
SIZES = {
    "layers.n_layers": "layers", "dim": "width", "layers.n_heads": "heads", "layers.n_kv_heads": "kv_heads",
    "layers.rope.theta": "rope_theta",
    "layers.hidden_dim": "ffn", "vocab_size": "vocab", "enable_weight_tying": "tied_embeddings",
}  # fmt: skip

MODEL_SPEC = "model_spec.model"

INNER = ("tok_embeddings", "norm", "lm_head", "layers")

TABLE: Table = {
    **PYTHON,
    **{
        f"{MODEL_SPEC}.{key}": part(f"model.{field}, of a Llama that is given by its sizes, not by a flavor", None)
        for key, field in SIZES.items()
    },
    **ignored_keys(MODEL_SPEC, *(f"{MODEL_SPEC}.{key}" for key in INNER), *(f"{MODEL_SPEC}.{key}.*" for key in INNER)),
}

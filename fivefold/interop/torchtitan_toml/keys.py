"""The keys of torchtitan's TOML files (0.2.2), each with that version's default.

Sources: torchtitan 0.2.2 torchtitan/config/job_config.py, distributed/pipeline_parallel.py, parallel_dims.py, train.py.
"""

from __future__ import annotations

from fivefold.interop.keys import Table, approximate_keys, field, ignored_keys, part, unmodelled_key, unmodelled_keys
from fivefold.interop.torchtitan.keys import AC, PRECISION, SHARED

VERSION = "0.2.2"

RENAMED_KEYS = {  # names before 0.1 → names of 0.2
    "training.batch_size": "training.local_batch_size",
    "training.compile": "compile.enable",
    "float8.recipe_name": "quantize.linear.float8.recipe_name",
    "float8.enable_fsdp_float8_all_gather": "quantize.linear.float8.enable_fsdp_float8_all_gather",
    "float8.filter_fqns": "quantize.linear.float8.filter_fqns",
    "float8.moe_fqns": "quantize.grouped_mm.float8.fqns",
    "float8.emulate": "quantize.linear.float8.emulate",
    "float8.precompute_float8_dynamic_scale_for_fsdp": (
        "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp"
    ),
}

TOML: Table = {
    "model.name": part("model: its family", "llama3"),
    "model.flavor": part("model: its size", "debugmodel"),
    "model.converters": part(PRECISION, []),
    **SHARED,
    "parallelism.enable_async_tensor_parallel": part("job.stack.overlap: tp communication overlaps compute", False),
    "parallelism.expert_tensor_parallel_degree": part("layout.etp, of experts with ep > 1", 1),
    "parallelism.disable_loss_parallel": unmodelled_key("full logits on every tensor-parallel rank", False),
    "parallelism.pipeline_parallel_expert_parallel_overlap": part("job.stack.pairs, under DualPipeV with ep", True),
    "parallelism.context_parallel_rotate_method": unmodelled_key("how keys travel: counted as a ring", "allgather"),
    "activation_checkpoint.mode": part(AC, "selective"),
    "activation_checkpoint.selective_ac_option": part(f"{AC}: every n-th layer, or by operation", "2"),
    "activation_checkpoint.early_stop": field("job.stack.early_stop", False),
    "activation_checkpoint.memory_budget": part("what the compiler may keep, under mode memory_budget", 0.5),
    "optimizer.name": part("job.optimizer.kind", "AdamW"),
    "optimizer.lr": field("job.learning_rate.peak", 8e-4),
    "optimizer.beta1": part("job.optimizer.betas", 0.9),
    "optimizer.beta2": part("job.optimizer.betas", 0.95),
    "optimizer.eps": field("job.optimizer.epsilon", 1e-8),
    "optimizer.weight_decay": field("job.optimizer.weight_decay", 0.1),
    "optimizer.implementation": unmodelled_key("the optimizer's kernels: counted as fused", "fused"),
    "optimizer.early_step_in_backward": unmodelled_key("weights are updated within the backward", False),
    "quantize.linear.float8.recipe_name": part(f"{PRECISION}, of the converter float8", None),
    "quantize.linear.float8.enable_fsdp_float8_all_gather": part(f"{PRECISION}: weights gathered in fp8", False),
    "quantize.linear.float8.filter_fqns": part(f"{PRECISION}: what stays in 16 bits", []),
    "quantize.linear.mx.recipe_name": part(f"{PRECISION}, of the converter mx", "mxfp8_cublas"),
    "quantize.linear.mx.filter_fqns": part(f"{PRECISION}: what stays in 16 bits", ["output"]),
    "quantize.grouped_mm.float8.fqns": part(f"{PRECISION}: whether experts are in fp8", []),
    "quantize.grouped_mm.mx.fqns": part(f"{PRECISION}: whether experts are in MX fp8", []),
    "fault_tolerance.enable": unmodelled_key("TorchFT replicas in addition to those of the layout", False),
    **ignored_keys("job.*", "profiling.*", "memory_estimation.*", "fault_tolerance.*", "training.dataset"),
    **ignored_keys(
        "model.hf_assets_path", "model.tokenizer_path", "model.print_after_conversion", "training.dataset_path"
    ),
    **ignored_keys("training.dataloader.*", "activation_checkpoint.visualize_memory_budget_pareto"),
    **unmodelled_keys(
        "matmuls that are recomputed: counted as every second one, and the router's",
        "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns",
        default=["moe.router.gate"],
    ),
    **ignored_keys("validation.*", "training.data.*"),
    **unmodelled_keys("code of one's own", "experimental.custom_import", "experimental.custom_args_module"),
    **unmodelled_keys("code of one's own", "job.custom_config_module"),
    **unmodelled_keys("fp8 on a device without it", "quantize.linear.float8.emulate", default=False),
    **unmodelled_keys(
        "another library of the dispatcher", "parallelism.expert_parallel_comm_backend", default="standard"
    ),
    **approximate_keys("another recipe of experts", "quantize.grouped_mm.mx.recipe_name", default="mxfp8"),
    **approximate_keys("another kernel of casts", "quantize.linear.mx.mxfp8_dim1_cast_kernel_choice", default="triton"),
    **approximate_keys(
        "scales that are computed at once", "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp"
    ),
}

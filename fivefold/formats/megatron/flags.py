"""Megatron's arguments without effect on memory, work, traffic and time, and other names of those with one."""

from __future__ import annotations

from typing import Any

from fivefold.formats.keys import Key

STARTS = (
    "data_", "log_", "wandb_", "tensorboard_", "save", "load", "eval_", "ckpt_", "dist_ckpt", "checkpoint_", "exit_",
    "train_data", "valid_data", "test_data", "profile", "rerun_", "timing_", "no_save_", "no_load_", "init_method",
    "loss_scale", "lr_", "rotary_s", "rope_", "use_rope_scaling", "manual_gc", "tiktoken", "rope", "mscale", "beta_",
    "initial_loss", "min_loss", "hysteresis", "dataloader", "num_workers", "split", "distributed_", "tokenizer_",
    "straggler", "async_save", "ft_", "inference_", "retro_", "bert_", "vision_", "one_logger", "enable_ft",
    "fp8_amax", "fp8_margin", "fp8_interval", "moe_z_", "moe_per_layer", "moe_router_dtype", "moe_router_bias_u",
    "moe_permute_fusion", "moe_router_fusion", "moe_deepep_num", "moe_hybridep_num", "moe_pad_expert",
    "moe_token_drop", "moe_input_jitter", "moe_router_padding", "mcore_", "muon_", "cuda_graph_w", "hf_", "finetune",
    "ddp_", "weight_decay_", "start_weight", "end_weight", "adlr_", "merge_file", "vocab_file", "vocab_extra",
    "use_checkpoint", "override_opt", "check_", "no_check", "no_mmap", "skip_", "mock_data", "eod_", "reset_position",
    "no_create_attention", "create_att", "use_mcore", "seed_", "rank", "world_size", "local_rank", "lazy_",
    "model_par", "te_rng", "non_persistent", "use_persi", "auto_detect", "position_embedding_i", "suggested_comm",
    "overlap_p2p_communication_warmup", "tp_comm_bootstrap", "moe_flex_dispatcher", "decoupled_", "apply_query_key",
    "attention_dropout_", "extra_", "spec", "variable_seq", "encoder_num_layers", "encoder_seq_length",
    "use_cpu_init", "no_initialization", "cross_entropy_fusion_impl", "deterministic_mode", "empty_unused",
    "high_priority", "disable_symmetric", "head_lr", "job_name", "node_rank", "clone_scatter", "barrier_with",
    "no_persist_layer", "app_tag", "nccl_comm", "sft", "legacy", "accumulate_grad", "no_bias_dropout_fusion",
    "attention_softmax_in_fp32", "moe_apply_probs", "keep_fp8", "recompute_loss", "first_layer", "onnx", "patch_",
    "no_position_embedding", "calculate_per", "tp_comm_overlap_cfg", "use_fused_weighted", "enable_experimental",
    "use_pytorch", "bias", "te_", "no_ckpt_", "logging_", "abort_on", "kill_switch", "deepspeed_config",
    "deepspeed_act", "zero_force", "add_position_embedding", "delay_grad_reduce", "delay_param_gather",
    "use_legacy_models", "data_impl",
)  # fmt: skip
ALIAS = {
    "tp_size": "tensor_model_parallel_size", "use_custom_fsdp": "use_megatron_fsdp", "fp8": "fp8_format",
    "fp4": "fp4_format", "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "num_moe_experts": "num_experts", "layernorm_epsilon": "norm_epsilon",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "max_sequence_length": "seq_length", "batch_size": "micro_batch_size",
    "moe_enable_flex": "moe_enable_deepep",
}  # fmt: skip
NEGATED = {  # as an ``args`` of a checkpoint has them: what the flag turns off
    "add_bias_linear": "disable_bias_linear", "gradient_accumulation_fusion": "no_gradient_accumulation_fusion",
    "masked_softmax_fusion": "no_masked_softmax_fusion", "bias_swiglu_fusion": "no_bias_swiglu_fusion",
    "bias_gelu_fusion": "no_bias_gelu_fusion", "apply_rope_fusion": "no_rope_fusion",
    "overlap_p2p_comm": "no_overlap_p2p_communication",
    "async_tensor_model_parallel_allreduce": "no_async_tensor_model_parallel_allreduce",
}  # fmt: skip


def is_idle(name: str) -> bool:
    """Whether an argument changes nothing that a step costs."""
    return name.startswith(STARTS)


def named(given: dict[str, Any], table: dict[str, Key]) -> dict[str, Any]:
    """Arguments by their names in ``args``: no dashes, no aliases, nothing negated, none without effect."""
    found: dict[str, Any] = {}
    for key, value in given.items():
        name = key.rpartition(".")[2].lstrip("-").replace("-", "_")
        name = ALIAS.get(name, name)
        if name in NEGATED and isinstance(value, bool):
            name, value = NEGATED[name], not value
        if name in ("position_embedding_type", "cp_comm_type") and isinstance(value, list) and len(value) == 1:
            value = value[0]
        if name in table or not is_idle(name):
            found[name] = value
    return found

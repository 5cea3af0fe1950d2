"""Fields of Megatron-Bridge's and NeMo 2's saved configs: as which of Megatron's arguments each is read and written.

Sources: megatron-bridge 0.3.1 megatron/bridge/training/config.py, mixed_precision.py, comm_overlap.py and
models/gpt_provider.py; nemo-toolkit 2.x nemo/lightning/pytorch/strategies/megatron_strategy.py; megatron-core 0.16.1.
"""

from __future__ import annotations

from fivefold.formats.keys import Table, foreign, idle

# Sections whose fields cost something, of a ConfigContainer and of a saved NeMo 2 recipe.
SECTIONS = (
    "model", "train", "optimizer", "ddp", "scheduler", "comm_overlap", "mixed_precision", "dist", "peft", "rng",
    "dataset", "optim", "trainer", "data", "plugins",
)  # fmt: skip
PLACES = {  # of Megatron's arguments, in a ConfigContainer; the others are fields of its model
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
NOT = {  # fields that say the contrary of an argument
    "share_embeddings_and_output_weights": "untie_embeddings_and_output_weights",
    "add_bias_linear": "disable_bias_linear",
    "gradient_accumulation_fusion": "no_gradient_accumulation_fusion",
    "grad_reduce_in_fp32": "grad_reduce_in_bf16",
    "async_tensor_model_parallel_allreduce": "no_async_tensor_model_parallel_allreduce",
}  # fmt: skip
DEFAULTS = {  # GPTModelProvider's and DistributedDataParallelConfig's, where they are not those of the arguments
    "cross_entropy_loss_fusion": True, "grad_reduce_in_bf16": True, "untie_embeddings_and_output_weights": False,
    "q_lora_rank": 512, "kv_lora_rank": 512,
}  # fmt: skip
RECIPE = {  # of the most of 0.3.1's recipes (megatron/bridge/recipes), over which a file of overrides goes
    "bf16": True, "use_distributed_optimizer": True, "grad_reduce_in_bf16": False, "overlap_grad_reduce": True,
    "overlap_param_gather": True, "moe_grouped_gemm": True, "moe_token_dispatcher_type": "alltoall",
    "expert_tensor_parallel_size": 1, "sequence_parallel": True,
}  # fmt: skip
OF_MODEL = (  # what the catalog's model says besides its sizes
    "softmax_type", "window_size", "window_attn_skip_freq", "activation_func_clamp_value", "glu_linear_offset",
)  # fmt: skip
MORE: Table = {
    "use_mup": foreign("another parametrisation of widths", False),
    "mtp_use_repeated_layer": foreign("one layer predicts further tokens again and again", False),
    "fused_residual_rmsnorm": foreign("norms and residual adds in one kernel", False),
    "mla_down_proj_fusion": foreign("the down projections of latent attention in one matmul", False),
    "megatron_fsdp_main_params_dtype": foreign("masters of Megatron-FSDP", "float32"),
    "megatron_fsdp_main_grads_dtype": foreign("gradients of Megatron-FSDP", None),
    "megatron_fsdp_grad_comm_dtype": foreign("gradients of Megatron-FSDP on the wire", None),
    "softmax_scale": foreign("another scale of the scores", None),
    "rotary_interleaved": foreign("another order of rotary pairs", False),
    "qk_l2_norm": foreign("another norm of queries and keys", False),
    "glu_linear_offset": foreign("another gate", 0.0),
    "activation_func_clamp_value": foreign("a clamped gate", None),
    "activation_func_fp8_input_store": foreign("inputs of activations kept in fp8", False),
    "attention_output_gate": foreign("a gate on attention's output", False),
    "fp8_dot_product_attention": foreign("attention in fp8", False),
    "fp8_multi_head_attention": foreign("attention in fp8", False),
    "fp8_wgrad": foreign("weights' gradients in 16 bits", True),
    "moe_shared_expert_gate": foreign("a gate on shared experts", False),
    "moe_router_force_load_balancing": foreign("every expert gets as many tokens: counted with imbalance=1", False),
    "moe_layer_recompute": foreign("experts run again in the backward", False),
    "use_kitchen": foreign("kernels of another library", False),
    "batch_invariant_mode": foreign("kernels of a fixed order of summation", False),
    "heterogeneous_block_specs": foreign("layers that differ", False),
    "use_transformer_engine_op_fuser": foreign("fused operations of Transformer Engine", False),
    "defer_embedding_wgrad_compute": foreign("the head's gradient put off", False),
    "cpu_offloading": foreign("activations of some layers in host memory", False),
    "overlap_param_gather_with_optimizer_step": foreign("gathers beside the update", False),
    "outer_dp_sharding_strategy": foreign("sharding over several data centres", "no_shard"),
    "num_microbatches_with_partial_activation_checkpoints": foreign("some micro-batches kept whole", None),
    "peft": foreign("adapters, not the weights, are trained", None),
    "scatter_gather_tensors_in_pipeline": foreign("every rank sends the whole stream", True),
    **idle(
        "cpu_offloading_activations", "cpu_offloading_weights", "cpu_offloading_double_buffering", "gated_linear_unit",
        "cpu_offloading_retain_pinned_cpu_buffers", "test_mode",
        "nccl_all_reduce_for_prefill", "use_te_rng_tracker", "iterations_to_skip", "lion_beta1", "lion_beta2",
        "fsdp_all_gather_in_start_param_sync", "fsdp_db_use_persist_buf_on_alloc_fail", "align_grad_reduce",
        "param_name_patterns_for_fp32_local_accumulation", "enable_megatron_core_experimental",
        "use_decentralized_pg", "add_extra_token_to_sequence", "allow_ambiguous_pad_tokens", "defer_npy_index_mmap",
        "drop_last", "fast_cache_load", "mid_level_dataset_surplus", "mock", "sequence_parallel_size",
        "disable_bf16_reduced_precision_matmul", "persist_layer_norm", "memory_efficient_layer_norm",
        "fp32", "fused_single_qkv_rope", "fp8_quantizer_factory", "fp4_quantizer_factory", "fp4_recipe", "fp4_param",
        "devices", "tp_only_amax_red", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16",
        "use_te_activation_func", "num_nodes", "moe_router_topk_limited_devices", "moe_enable_routing_replay",
        "disable_parameter_transpose_cache", "flash_decode", "symmetric_ar_type", "mrope_section",
        "use_mamba_mem_eff_path", "mlp_chunks_for_prefill", "quant_recipe", "offload_modules",
        "min_offloaded_tensor_size", "original_max_position_embeddings", "cache_mla_latents", "timers",
        "params_dtype", "pipeline_dtype", "autocast_dtype", "enable_autocast", "autocast_enabled", "pipeline",
        "align_param_gather", "deallocate_pipeline_outputs", "bucket_size", "average_in_collective",
        "preserve_fp32_weights", "fsdp_double_buffer", "gradient_reduce_div_fusion", "apply_wd_to_qk_layernorm",
        "store_param_remainders", "sgd_momentum", "parallel_output", "fp16_lm_cross_entropy",
        "seq_len_interpolation_factor", "scatter_embedding_sequence_parallel", "should_pad_vocab",
        "use_transformer_engine_full_layer_spec", "transformer_layer_spec", "mtp_enabled", "restore_modelopt_state",
        "use_arbitrary_attention_mask", "perform_initialization", "mtp_standalone", "moe_extended_tp",
        "wgrad_deferral_limit", "pin_cpu_grads", "pin_cpu_params", "reuse_grad_buf_for_mxfp8_param_ag",
        "pad_buckets_for_high_nccl_busbw", "qk_clip", "qk_clip_alpha", "qk_clip_threshold", "config_logger_dir",
        "cuda_graph_use_single_mempool", "use_sharp", "data_sharding", "cuda_graph_retain_backward_graph",
        "kitchen_attention_backend", "use_kitchen_attention", "hybrid_context_parallel", "max_seqlen_per_dp_cp_rank",
        "use_inference_optimized_layers", "hetereogenous_dist_checkpoint", "fsdp_manual_registration",
        "overlap_p2p_comm_warmup_flush", "use_ring_exchange_p2p", "batch_p2p_comm", "batch_p2p_sync",
        "reduce_scatter_with_fp32_accumulation", "overlap_cpu_optimizer_d2h_h2d",
        "use_torch_optimizer_for_cpu_offload", "pipeline_model_parallel_comm_backend", "precision",
        "ep_overlap_early_attn_memory_release", "output_layer_init_method", "activation_func",
        "embedding_init_method", "embedding_init_method_std", "init_model_with_meta_device",
        "no_weight_decay_cond_type", "decrease_batch_size_if_needed", "pin_memory", "persistent_workers",
        "random_seed", "path_to_cache", "blend", "sequence", "use_gloo_process_groups", "external_gpu_device_mapping",
        "disable_jit_fuser", "data_parallel_random_init", "train_sync_interval", "accelerator", "val_check_interval",
        "limit_val_batches", "limit_test_batches", "max_epochs", "use_distributed_sampler", "callbacks",
        "enable_checkpointing", "accumulate_grad_batches", "restore_config", "resume_if_exists", "paths",
        "warmup_steps", "constant_steps", "monitor", "interval", "frequency", "gradient_clip_val", "ckpt_async_save",
        "params", "scale_lr_cond", "no_weight_decay_cond", "lr_mult", "strategy", "tokenizer", "config",
        "lr_scheduler", "offset",
    ),
}  # fmt: skip
# Of fields without effect, or of models that are none of ours.
STARTS = (
    "tp_comm_bulk", "tp_comm_overlap_", "tp_comm_split", "tp_comm_atomic", "dsa_", "linear_", "mamba_", "mup_", "yarn_",
    "flight_recorder_", "_",
)  # fmt: skip

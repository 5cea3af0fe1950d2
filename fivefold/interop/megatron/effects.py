"""Megatron's arguments that change the cost of a step, or select a variant, and that are not modelled.

Arguments with an effect only if another one is on are listed among those without effect. Sources: as in keys.py.
"""

from __future__ import annotations

from fivefold.interop.keys import Table, approximate_keys, unmodelled_keys

MODEL: Table = {
    **unmodelled_keys("a clamped gate", "activation_func_clamp_value"),
    **unmodelled_keys("a gate on attention's output", "attention_output_gate", default=False),
    **unmodelled_keys("another gate", "glu_linear_offset", default=0.0),
    **unmodelled_keys("another norm of queries and keys", "qk_l2_norm", default=False),
    **unmodelled_keys("scores are clipped", "qk_clip", default=False),
    **unmodelled_keys(
        "layers that differ", "heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json"
    ),
    **unmodelled_keys("state-space layers", "hybrid_attention_ratio", "hybrid_mlp_ratio", default=0.0),
    **unmodelled_keys("a layer of one's own", "spec"),
    **unmodelled_keys("an encoder and a decoder", "decoder_num_layers", "decoder_seq_length"),
    **unmodelled_keys("images", "vision_pretraining", default=False),
    **unmodelled_keys("retrieved text in every layer", "retro_add_retriever", default=False),
    **approximate_keys("the vocabulary grows; not counted", "vocab_extra_ids", "extra_vocab_size", default=0),
    **unmodelled_keys("reinforcement learning", "perform_rl_step", default=False),
    **unmodelled_keys("arguments of a checkpoint or a file, which is not read", "use_checkpoint_args", default=False),
    **unmodelled_keys("arguments of a checkpoint or a file, which is not read", "use_mp_args_from_checkpoint_args"),
    **unmodelled_keys("arguments of a checkpoint or a file, which is not read", "yaml_cfg"),
    **unmodelled_keys("layers of before Megatron-Core", "use_legacy_models", default=False),
    **unmodelled_keys("a gate on shared experts", "moe_shared_expert_gate", default=False),
    **unmodelled_keys("experts cut otherwise over tp", "moe_extended_tp", default=False),
    **unmodelled_keys("experts run again in the backward", "moe_layer_recompute", default=False),
    **unmodelled_keys("inputs of experts padded to their capacity", "moe_pad_expert_input_to_capacity", default=False),
    **unmodelled_keys("prediction of further tokens on a stage of its own", "mtp_standalone", default=False),
    **approximate_keys("another order of rotary pairs", "rotary_interleaved", default=False),
    **approximate_keys("scores in fp32, as the attention kernel has them", "attention_softmax_in_fp32", default=False),
    **approximate_keys(
        "scores in fp32, as the attention kernel has them", "apply_query_key_layer_scaling", default=False
    ),
    **approximate_keys("the router in another width", "moe_router_dtype"),
    **approximate_keys(
        "the router's and the permutation's kernels", "moe_permute_fusion", "moe_router_fusion", default=False
    ),
    **approximate_keys("a few more tokens for each expert", "moe_router_padding_for_fp8", default=False),
    **approximate_keys("a few more tokens for each expert", "moe_router_padding_for_quantization", default=False),
    **approximate_keys("experts' inputs are scaled first", "moe_apply_probs_on_input", default=False),
    **approximate_keys("multiprocessors that send", "moe_deepep_num_sms", default=20),
    **approximate_keys("multiprocessors that send", "moe_hybridep_num_sms", default=16),
    **approximate_keys("another library of the dispatcher", "moe_flex_dispatcher_backend", default="deepep"),
    **approximate_keys("routing is recorded", "moe_enable_routing_replay", default=False),
    **approximate_keys("sequences of varying length; counted as full", "sft", "variable_seq_lengths", default=False),
}

LAYOUT: Table = {
    **unmodelled_keys("a degree under its name of before: write --tensor-model-parallel-size", "model_parallel_size"),
    **unmodelled_keys("context parallelism by length", "hybrid_context_parallel", default=False),
    **unmodelled_keys("another order of the interleaved schedule", "microbatch_group_size_per_vp_stage"),
    **unmodelled_keys("pipeline messages that do not overlap compute", "overlap_p2p_comm_warmup_flush", default=False),
    **unmodelled_keys("every rank sends the full stream", "no_scatter_gather_tensors_in_pipeline", default=False),
    **unmodelled_keys("messages by another library", "pipeline_model_parallel_comm_backend", default="nccl"),
    **unmodelled_keys("the head's gradient deferred", "defer_embedding_wgrad_compute", default=False),
    **unmodelled_keys("gathers during the update", "overlap_param_gather_with_optimizer_step", default=False),
    **unmodelled_keys("memory is freed early", "ep_overlap_early_attn_memory_release", default=False),
    **unmodelled_keys("sharding over several data centres", "outer_dp_sharding_strategy", default="no_shard"),
    **unmodelled_keys("sharding over several data centres", "enable_full_sharding_in_hsdp", default=False),
    **unmodelled_keys("two buffers of Megatron-FSDP", "fsdp_double_buffer", default=False),
    **unmodelled_keys("batches that are not cut over ranks", "no_data_sharding", default=False),
    **unmodelled_keys("a number of buckets, whatever their size", "ddp_num_buckets"),
    **unmodelled_keys("other messages for gradients", "ddp_reduce_scatter_with_fp32_accumulation", default=False),
    **unmodelled_keys("reductions in the switch", "use_sharp", default=False),
    **unmodelled_keys("reductions in the switch", "sharp_enabled_group"),
    **unmodelled_keys("other messages of tensor parallelism", "symmetric_ar_type"),
    **unmodelled_keys("messages by another library", "distributed_backend", default="nccl"),
    **unmodelled_keys("tokens go to experts of fewer ranks", "moe_router_topk_limited_devices"),
    **approximate_keys("waits for the device after a pipeline's messages", "batch_p2p_sync", default=True),
    **approximate_keys("gathers of Megatron-FSDP begin later", "fsdp_all_gather_in_start_param_sync", default=True),
    **approximate_keys("a file of DeepSpeed's options, which is not read", "deepspeed_config"),
    **unmodelled_keys("messages that are not sent", "fake_process_group", default=False),
    **approximate_keys("buckets of round sizes", "ddp_pad_buckets_for_high_nccl_busbw", default=False),
    **approximate_keys(
        "stages reduce, or gather, each for itself", "no_align_grad_reduce", "no_align_param_gather", default=False
    ),
    **approximate_keys("the mean is computed by a kernel of its own", "no_gradient_reduce_div_fusion", default=False),
    **approximate_keys(
        "registered buffers", "fsdp_manual_registration", "disable_symmetric_registration", default=False
    ),
    **approximate_keys("NCCL's settings", "nccl_communicator_config_path", "high_priority_stream_groups"),
    **approximate_keys("another call of NCCL", "use_ring_exchange_p2p", "create_all_gather_group", default=False),
    **approximate_keys(
        "how messages of tensor parallelism hide", "tp_comm_bulk_dgrad", "tp_comm_bulk_wgrad", default=True
    ),
    **approximate_keys(
        "how messages of tensor parallelism hide", "tp_comm_overlap_ag", "tp_comm_overlap_rs", default=True
    ),
    **approximate_keys("how messages of tensor parallelism hide", "tp_comm_split_ag", "tp_comm_split_rs", default=True),
    **approximate_keys("how messages of tensor parallelism hide", "tp_comm_overlap_rs_dgrad", default=False),
    **approximate_keys("how messages of tensor parallelism hide", "tp_comm_overlap_cfg"),
    **approximate_keys("the embedding's output is copied", "clone_scatter_output_in_embedding", default=True),
}

JOB: Table = {
    **unmodelled_keys("weights' gradients in 16 bits", "fp8_wgrad", default=True),
    **unmodelled_keys(
        "quantization by another library", "fp8_quantizer_factory", "fp4_quantizer_factory", "quant_recipe"
    ),
    **unmodelled_keys("quantization by another library", "te_precision_config_file", "kitchen_config_file"),
    **unmodelled_keys("quantization by another library", "kitchen_recipe_number"),
    **unmodelled_keys("quantization by another library", "use_kitchen_attention", default=False),
    **unmodelled_keys("another recipe of fp4", "fp4_recipe", default="nvfp4"),
    **unmodelled_keys("weights held in fp4", "fp4_param", default=False),
    **unmodelled_keys("transposed weights are kept", "keep_fp8_transpose_cache", default=False),
    **unmodelled_keys("gathers into the gradients' buffer", "reuse_grad_buf_for_mxfp8_param_ag", default=False),
    **unmodelled_keys("logits in fp16", "fp16_lm_cross_entropy", default=False),
    **unmodelled_keys(
        "some gradients are summed in fp32", "param_name_patterns_for_fp32_local_accumulation", default=None
    ),
    **approximate_keys("weights in fp8 are transposed anew", "disable_parameter_transpose_cache", default=False),
    **unmodelled_keys("the update during copies", "overlap_cpu_optimizer_d2h_h2d", default=False),
    **unmodelled_keys("another number of Muon's steps", "muon_num_ns_steps", default=5),
    **unmodelled_keys("Muon's steps on other matrices", "muon_tp_mode", default="blockwise"),
    **unmodelled_keys("Muon's steps on other matrices", "muon_no_split_qkv", default=False),
    **unmodelled_keys("the optimizer's states", "sgd_momentum", default=0.9),
    **approximate_keys("the precision of Muon's matmuls", "muon_fp32_matmul_prec", default="medium"),
    **approximate_keys("another optimizer on the host", "use_torch_optimizer_for_cpu_offload", default=False),
    **approximate_keys("memory of the host that is not pinned", "no_pin_cpu_grads", "no_pin_cpu_params", default=False),
    **approximate_keys("a batch that changes once", "phase_transition_iterations"),
    **approximate_keys("a batch that changes once", "decrease_batch_size_if_needed", default=False),
}

STACK: Table = {
    **unmodelled_keys("deterministic kernels, which may be slower", "deterministic_mode", default=False),
    **unmodelled_keys("deterministic kernels, which may be slower", "batch_invariant_mode", default=False),
    **unmodelled_keys("operations that are not fused", "disable_jit_fuser", "no_bias_dropout_fusion", default=False),
    **unmodelled_keys("another attention kernel", "use_flash_attn_triton", default=False),
    **approximate_keys("timers that wait for the device", "timing_log_level", default=0),
    **approximate_keys("norms of Apex that keep less", "memory_efficient_layer_norm", default=False),
    **approximate_keys("a fused kernel of rotary positions", "fused_single_qkv_rope", default=False),
    **approximate_keys(
        "the allocator gives unused memory back before the update, and takes it again: not counted",
        "empty_unused_memory_level",
        default=0,
    ),
    **approximate_keys("another kernel of norms", "no_persist_layer_norm", default=False),
    **approximate_keys("another kernel of activations", "use_te_activation_func", default=False),
    **approximate_keys("another kernel of activations", "use_fused_weighted_squared_relu", default=False),
    **approximate_keys("matmuls that sum in fp32", "disable_bf16_reduced_precision_matmul", default=False),
    **approximate_keys("numbers for the log, each step", "log_params_norm", "log_num_zeros_in_grad", default=False),
    **approximate_keys("numbers for the log, each step", "log_max_attention_logit", default=False),
    **approximate_keys("waits for the device now and then", "train_sync_interval"),
    **approximate_keys("stages reduce, or gather, later", "delay_grad_reduce", "delay_param_gather", default=False),
    **approximate_keys("DeepSpeed's own recomputation", "deepspeed_activation_checkpointing", default=False),
}

TABLE: Table = {**MODEL, **LAYOUT, **JOB, **STACK}

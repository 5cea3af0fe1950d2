"""Keys of trainers on transformers that change the cost of a step, or select a variant, and that are not modelled.

Keys with an effect only if another one is on (``lora_alpha`` with ``adapter``) are listed among those without effect.
Sources: as in keys.py and dialects.py.
"""

from __future__ import annotations

from fivefold.interop.keys import Key, Table, approximate_keys, part, unmodelled_keys

OBJECTIVE = "an objective other than the next token"
ADAPTERS = "adapters, not the weights, are trained"
PARTLY_FROZEN = "some weights are frozen"
KERNELS = "other kernels"
EXPERTS = "other kernels of experts"
QUANTIZED = "weights in few bits"
OPTIMIZER = "another optimizer, or other states of one"
ROUTER_LOSS = "the routers' balancing loss: its few operations are not counted"
VOCABULARY = "the vocabulary grows; counted as the model's own"

TRAINER: Table = {
    "activation_offloading": part("job.offload", False),
    **unmodelled_keys("the loss smooths labels, and keeps more of the logits", "label_smoothing_factor", default=0.0),
    **unmodelled_keys("some of Liger's kernels, not all", "liger_kernel_config"),
    **unmodelled_keys("messages by another library", "ddp_backend", default="nccl"),
    **unmodelled_keys("another optimizer for some weights", "optim_args", "optim_target_modules"),
    **unmodelled_keys("deterministic kernels, which may be slower", "full_determinism", default=False),
    **unmodelled_keys("autograd's checks, which slow every operation", "debug", default=""),
    **unmodelled_keys("no GPU", "use_cpu", "no_cuda", default=False),
    **unmodelled_keys("copies of keys and values in every layer", "use_cache", default=False),
    **unmodelled_keys("a model other than model_name_or_path", "config_name"),
    **unmodelled_keys("a second copy of the weights, which follows them", "sync_ref_model", default=False),
    **unmodelled_keys("matmuls of another type", "bnb_4bit_compute_dtype", default="bfloat16"),
    **unmodelled_keys("a model that differs from its config", "model_init_kwargs.*", "model_init_kwargs"),
    **unmodelled_keys(
        "a degree of parallelism, which accelerate's own file is read for", "parallelism_config.*", "parallelism_config"
    ),
    **unmodelled_keys("a file of FSDP's options, which is not read", "fsdp_config"),
    **unmodelled_keys("gradients sent in every micro-batch", "accelerator_config.gradient_accumulation_kwargs.*"),
    **unmodelled_keys("a micro-batch that all ranks share", "accelerator_config.split_batches", default=False),
    **unmodelled_keys("a file of accelerate's options, which is not read", "accelerator_config"),
    **unmodelled_keys("units of another size", "fsdp_config.min_num_params", default=0),
    **unmodelled_keys("gathers ahead in the forward", "fsdp_config.forward_prefetch", default=False),
    **unmodelled_keys("another order of gathers", "fsdp_config.backward_prefetch", default="backward_pre"),
    **unmodelled_keys("more gathers under way", "fsdp_config.limit_all_gathers", default=True),
    **unmodelled_keys("PyTorch XLA", "fsdp_config.xla", default=False),
    **approximate_keys("another mode of the compiler", "torch_compile_mode", "torch_compile_options"),
    **approximate_keys("another backend of the compiler", "torch_compile_backend", default="inductor"),
    **approximate_keys("a walk over the graph for unused weights", "ddp_find_unused_parameters", default=False),
    **approximate_keys("the graph of weights is known beforehand", "ddp_static_graph", default=False),
    **approximate_keys("one small message a step", "include_num_input_tokens_seen", default="no"),
    **approximate_keys("batches of similar lengths; sequences are counted as full", "group_by_length", default=False),
    "train_sampling_strategy": Key(
        "near", "batches of similar lengths; sequences are counted as full", "random", {"sequential": "random"}
    ),
    **approximate_keys(ROUTER_LOSS, "router_aux_loss_coef", "moe_aux_loss_coef", default=0.0),
    **approximate_keys(VOCABULARY, "pad_token", "eos_token", "add_tokens", "add_special_tokens", "special_tokens.*"),
}

FSDP = "accelerate.fsdp_config."
PARALLEL = "accelerate.parallelism_config.parallelism_config_"
ACCELERATE: Table = {
    **unmodelled_keys("training by Megatron-LM", "accelerate.megatron_lm_config.*", "accelerate.megatron_lm_config"),
    **unmodelled_keys("no GPU", "accelerate.use_cpu", "accelerate.tpu_use_cluster", default=False),
    **unmodelled_keys("more gathers under way", f"{FSDP}fsdp_limit_all_gathers", default=True),
    **unmodelled_keys("some weights are on every rank", f"{FSDP}fsdp_ignored_modules"),
    **unmodelled_keys("other types of weights and messages", f"{FSDP}fsdp_mixed_precision_policy"),
    **unmodelled_keys("kept activations in host memory", f"{FSDP}fsdp_activation_checkpointing_offload", default=False),
    **approximate_keys(
        "another mode of the compiler",
        "accelerate.dynamo_config.dynamo_mode",
        "accelerate.dynamo_config.dynamo_use_dynamic",
        "accelerate.dynamo_config.dynamo_use_fullgraph",
        "accelerate.dynamo_config.dynamo_use_regional_compilation",
        default="default",
    ),
    **approximate_keys(
        "the experts of a layer are gathered at once", "accelerate.deepspeed_config.deepspeed_moe_layer_cls_names"
    ),
    **approximate_keys("another attention kernel with context parallelism", f"{PARALLEL}cp_attn_implementation"),
    **approximate_keys("another attention kernel with context parallelism", f"{PARALLEL}sp_attn_implementation"),
    **approximate_keys("sequences of varying length; counted as full", f"{PARALLEL}cp_seq_length_is_variable"),
    **approximate_keys("sequences of varying length; counted as full", f"{PARALLEL}sp_seq_length_is_variable"),
    **approximate_keys(
        "the width of Ulysses' messages", "accelerate.deepspeed_config.seq_parallel_communication_data_type"
    ),
    **approximate_keys("how keys travel; counted as a ring", f"{PARALLEL}cp_comm_strategy", default="alltoall"),
}

DS = "deepspeed."
Z = f"{DS}zero_optimization."
AC = f"{DS}activation_checkpointing."
DEEPSPEED: Table = {
    **unmodelled_keys("buckets of gathers of another size", f"{Z}allgather_bucket_size", default=500_000_000),
    **unmodelled_keys("gradients are all-reduced", f"{Z}reduce_scatter", default=True),
    **unmodelled_keys("weights are broadcast", f"{Z}allgather_partitions", default=True),
    **unmodelled_keys("gradients stay where they are made", f"{Z}contiguous_gradients", default=True),
    **unmodelled_keys("other messages for weights", f"{Z}use_all_reduce_for_fetch_params", default=False),
    **unmodelled_keys("other messages for weights", f"{Z}stage3_use_all_reduce_for_fetch_params", default=False),
    **unmodelled_keys("gathers one after another", f"{Z}allgather_sequential", default=False),
    **unmodelled_keys("gathers one after another", f"{Z}stage3_allgather_sequential", default=False),
    **unmodelled_keys("units of another size", f"{Z}module_granularity_threshold", default=0),
    **unmodelled_keys("units of another size", f"{Z}stage3_module_granularity_threshold", default=0),
    **unmodelled_keys("units of another size", f"{Z}leaf_module", f"{Z}leaf_module.*"),
    **unmodelled_keys("weights that stay gathered", f"{Z}model_persistence_threshold"),
    **unmodelled_keys("weights that stay gathered", f"{Z}stage3_model_persistence_threshold"),
    **unmodelled_keys("a part of the optimizer in host memory", f"{Z}offload_optimizer.ratio", default=1.0),
    **unmodelled_keys(
        "an optimizer update that overlaps compute", f"{Z}offload_optimizer.super_offload", default=False
    ),
    **unmodelled_keys("an optimizer update that overlaps compute", f"{Z}zenflow", f"{Z}zenflow.*"),
    **unmodelled_keys("reads and writes during the update", f"{Z}offload_optimizer.pipeline_read", default=False),
    **unmodelled_keys("reads and writes during the update", f"{Z}offload_optimizer.pipeline_write", default=False),
    **unmodelled_keys("linear layers that keep more", f"{Z}memory_efficient_linear", default=True),
    **unmodelled_keys("ZeRO-1 as it was", f"{Z}legacy_stage1", default=False),
    **unmodelled_keys("gathers in 8 bits", f"{Z}zero_quantized_nontrainable_weights", default=False),
    **unmodelled_keys("checks of every gather", f"{Z}enable_sanity_checks", default=False),
    **unmodelled_keys("moments held elsewhere", f"{Z}save_muon_momentum_buffer_in_memory", default=False),
    # neither DeepSpeed's engine nor transformers 5.23.0, accelerate, trl, axolotl and llamafactory call that module
    **approximate_keys(
        "is for models that call deepspeed.checkpointing, which those of transformers do not",
        f"{AC}partition_activations",
        f"{AC}cpu_checkpointing",
        f"{AC}contiguous_memory_optimization",
        f"{AC}synchronize_checkpoint_boundary",
        default=False,
    ),
    **unmodelled_keys("mixed precision by Apex", f"{DS}amp.enabled", default=False),
    **unmodelled_keys("mixed precision by autocast", f"{DS}torch_autocast.enabled", default=False),
    **unmodelled_keys(
        "weights, or buffers, of another type", f"{DS}data_types.param_dtype", f"{DS}data_types.buffer_dtype"
    ),
    **unmodelled_keys("some modules in fp32", f"{DS}data_types.keep_in_fp32_modules", default="auto"),
    **unmodelled_keys("DeepCompile", f"{DS}compile.deepcompile", default=False),
    **unmodelled_keys("fewer layers as training goes on", f"{DS}progressive_layer_drop.enabled"),
    **unmodelled_keys("shorter sequences at first", f"{DS}curriculum_learning.enabled"),
    **unmodelled_keys("shorter sequences at first", f"{DS}data_efficiency.enabled"),
    **unmodelled_keys(QUANTIZED, f"{DS}weight_quantization.*", f"{DS}weight_quantization", f"{DS}quantize_training.*"),
    **unmodelled_keys("compression", f"{DS}compression_training.*", f"{DS}compression_training"),
    **unmodelled_keys("sparse attention", f"{DS}sparse_attention.*", f"{DS}sparse_attention"),
    **unmodelled_keys("experts over several ranks", f"{DS}expert_parallel.*", f"{DS}expert_parallel", f"{DS}moe.*"),
    **unmodelled_keys("fp8 by DeepSpeed", f"{DS}float8.*", f"{DS}float8"),
    **unmodelled_keys("gradients of the embedding by rows", f"{DS}sparse_gradients", default=False),
    **unmodelled_keys("eigenvalues are computed", f"{DS}eigenvalue.enabled"),
    **unmodelled_keys("another batch", f"{DS}elasticity.enabled", f"{DS}autotuning.enabled"),
    **unmodelled_keys("generation between steps", f"{DS}hybrid_engine.enabled", default=False),
    **unmodelled_keys("a pipeline", f"{DS}pipeline.*", f"{DS}pipeline"),
    **unmodelled_keys("CUDA graphs", f"{DS}graph_harvesting", default=False),
    **unmodelled_keys("other messages", f"{DS}disable_allgather", default=False),
    **unmodelled_keys("messages of another width", f"{DS}seq_parallel_communication_data_type", default="fp32"),
    **unmodelled_keys("messages that overlap compute", f"{DS}tensor_parallel.tp_overlap_comm", default=False),
    **unmodelled_keys("the head cut over tp", f"{DS}tensor_parallel.vocab_parallel_lm_head", default=False),
    **unmodelled_keys(
        "another plan of what is cut",
        f"{DS}tensor_parallel.partition_config.*",
        f"{DS}tensor_parallel.partition_config",
    ),
    **unmodelled_keys("another plan of what is cut", f"{DS}tensor_parallel.injection_policy_tuple"),
    **unmodelled_keys(KERNELS, f"{DS}tensor_parallel.replace_with_kernel_inject", default=False),
    **unmodelled_keys("weights in host memory", f"{DS}tensor_parallel.keep_module_on_host", default=False),
    **unmodelled_keys(
        "gradients of each micro-batch go into fp32 at once", f"{DS}bf16.immediate_grad_update", default=False
    ),
    **approximate_keys("buckets are reduced by several ranks", f"{Z}use_multi_rank_bucket_allreduce", default=True),
    **approximate_keys("gradients are spread over ranks in turn", f"{Z}round_robin_gradients", default=False),
    **approximate_keys("timers of messages that wait for the device", f"{DS}comms_logger.enabled", default=False),
    **approximate_keys("timers that wait for the device", f"{DS}wall_clock_breakdown", default=False),
    **approximate_keys("timers that wait for the device", f"{DS}flops_profiler.enabled", default=False),
}

AXOLOTL: Table = {
    **unmodelled_keys(
        OBJECTIVE, "reward_model", "process_reward_model", "num_labels", "diffusion", "diffusion.*", "ebft"
    ),
    **unmodelled_keys(OBJECTIVE, "ebft.*", "use_eaft", "kd_trainer", "kd_online_server_base_url", "nemo_gym_enabled"),
    **unmodelled_keys("noise on the embeddings", "noisy_embedding_alpha"),
    **unmodelled_keys(ADAPTERS, "relora", "relora_steps", "mora", "mora.*", "spectrum_top_fraction"),
    **unmodelled_keys(
        PARTLY_FROZEN, "freeze_mm_modules", "dense_mixer", "dense_mixer.*", "llmcompressor", "llmcompressor.*"
    ),
    **unmodelled_keys(QUANTIZED, "gptq", "qat", "qat.*", "quantize_moe_experts"),
    **unmodelled_keys(QUANTIZED, "nonexpert_quantization", "dsv4_fp8_nonexpert_mode", "dsv4_fp4_grouped_mode"),
    **unmodelled_keys(QUANTIZED, "gemma4_fp8_nonexpert", "gemma4_nf4_nonexpert", "nvfp4_merge_aware", "use_onebitllms"),
    **unmodelled_keys(
        EXPERTS, "expert_backend", "use_scattermoe", "use_sonicmoe", "moe_grouped_backend", "moe_bnb_fast"
    ),
    **unmodelled_keys(EXPERTS, "moe_dequant_chunk_size", "llama4_linearized_experts", "dsv4_bf16_all"),
    **unmodelled_keys(KERNELS, "use_kernels", "use_dsv4_kernels", "use_glm_dsa_kernels", "dsv4_fp8_lora_kernel"),
    **unmodelled_keys(KERNELS, "dsv4_shared_mlp_lora_kernel", "unsloth_lora_mlp", "unsloth_lora_qkv", "unsloth_lora_o"),
    **unmodelled_keys(KERNELS, "unsloth_cross_entropy_loss", "unsloth_rms_norm", "unsloth_rope", "flash_attn_fuse_mlp"),
    **unmodelled_keys(KERNELS, "flash_attn_rms_norm", "flash_attn_cross_entropy", "flash_attn_fuse_qkv", "device_map"),
    **unmodelled_keys("some of Liger's kernels, not all", "liger_rope", "liger_rms_norm", "liger_rms_norm_gated"),
    **unmodelled_keys("some of Liger's kernels, not all", "liger_layer_norm", "liger_swiglu", "liger_glu_activation"),
    **unmodelled_keys("some of Liger's kernels, not all", "liger_cross_entropy", "liger_kernel_impl"),
    **unmodelled_keys("another attention", "s2_attention", "sage_attention", "xformers_attention", "flash_optimum"),
    **unmodelled_keys(
        "another attention", "flash_attn_d512", "large_head_attention", "sdpa_varlen", "fused_attn_kernel"
    ),
    **unmodelled_keys("another attention", "scaling_softmax", "gemma4_hybrid_attn_impl"),
    **unmodelled_keys("other activations are kept", "selective_checkpointing", "selective_checkpointing.*"),
    **unmodelled_keys("layers, or embeddings, in host memory", "layer_offloading", "ple_cpu_offload"),
    **unmodelled_keys("the allocator is emptied between steps", "gc_steps", "gc_collect_steps"),
    **unmodelled_keys(
        "weights or norms of another type", "bfloat16", "float16", "float32", "fp32_norms", "fp32_norm_classes"
    ),
    **unmodelled_keys("weights or norms of another type", "embeddings_skip_upcast"),
    **unmodelled_keys("layers spread over GPUs one after another", "max_memory", "gpu_memory_limit"),
    **unmodelled_keys("DeepCompile", "deepcompile"),
    **unmodelled_keys("another vocabulary", "shrink_embeddings"),
    **unmodelled_keys("adapters in 16 bits", "peft_autocast_adapter_dtype", default=True),
    **approximate_keys("up to 31 entries of the vocabulary more: not counted", "resize_token_embeddings_to_32x"),
    **approximate_keys(ROUTER_LOSS, "model_config.output_router_logits"),
    **unmodelled_keys("modules, or matmuls, of another type", "bnb_config_kwargs.*", "bnb_config_kwargs"),
    **unmodelled_keys("matmuls of another type", "bnb_config_kwargs.bnb_4bit_compute_dtype", default="bfloat16"),
    **approximate_keys("the rate is at its minimum before the end; read as a cosine", "cosine_constant_lr_ratio"),
    **unmodelled_keys("another model", "overrides_of_model_config.*", "model_config.*", "overrides_of_model_kwargs.*"),
    **unmodelled_keys("another model", "model_kwargs.*", "cls_model_config", "overrides_of_model_config"),
    **unmodelled_keys("another model", "overrides_of_model_kwargs", "model_config", "model_kwargs"),
    **unmodelled_keys(
        "is neither true nor false", "flash_attention", "sdp_attention", "eager_attention", "flex_attention"
    ),
    **unmodelled_keys("is neither true nor false", "liger_fused_linear_cross_entropy"),
    **unmodelled_keys("another trainer", "trainer_cls", "hatchery", "hatchery.*", "recipe"),
    **unmodelled_keys("averages of gradients are kept", "grokfast_alpha", "grokfast_lamb"),
    **unmodelled_keys("sequences of another length", "max_packed_sequence_len"),
    **approximate_keys("how keys travel; counted as a ring", "ring_attn_func", "heads_k_stride"),
    **approximate_keys("sequences of a micro-batch without padding; counted as full", "batch_flattening"),
    **approximate_keys(VOCABULARY, "tokens"),
}

LLAMAFACTORY: Table = {
    "quantization_method": Key("foreign", QUANTIZED, "bnb", {"bitsandbytes": "bnb"}),  # its older name
    **unmodelled_keys("layers spread over GPUs one after another", "quantization_device_map", "device_map"),
    **unmodelled_keys(OPTIMIZER, "use_adam_mini"),
    **unmodelled_keys(ADAPTERS, "use_llama_pro"),
    **unmodelled_keys("other activations are kept", "use_unsloth_gc"),
    **unmodelled_keys("another trainer", "use_mca", "use_kt", "use_hyper_parallel"),
    **unmodelled_keys("another attention", "shift_attn"),
    **unmodelled_keys("another loss", "use_asft_loss", "use_dft_loss", "use_eaft_loss"),
    **unmodelled_keys("norms, or logits, of another type", "upcast_layernorm", "upcast_lmhead_output"),
    **unmodelled_keys("is neither true nor false", "neat_packing", "disable_gradient_checkpointing"),
    **unmodelled_keys("images", "freeze_multi_modal_projector", default=True),
    **unmodelled_keys(PARTLY_FROZEN, "freeze_language_model"),
    **approximate_keys(VOCABULARY, "resize_vocab", "new_special_tokens_config"),
    **approximate_keys("the profiler, which slows the steps that it records", "enable_torch_profiler", default=False),
}

SWIFT: Table = {
    "quant_method": Key("foreign", QUANTIZED, "bnb"),
    "lora_dtype": Key("foreign", "adapters in 16 bits", "float32"),
    **unmodelled_keys("biases are trained too", "lora_bias", default="none"),
    **unmodelled_keys(KERNELS, "tuner_backend", default="peft"),
    **unmodelled_keys(EXPERTS, "experts_impl", default="grouped_mm"),
    **unmodelled_keys("another trainer", "use_swift_lora", default=False),
    **unmodelled_keys(OPTIMIZER, "optimizer"),
    **unmodelled_keys(OPTIMIZER, "use_galore", default=False),
    **unmodelled_keys(PARTLY_FROZEN, "lisa_activated_layers", default=0),
    **unmodelled_keys(PARTLY_FROZEN, "freeze_parameters_ratio", default=0.0),
    **unmodelled_keys(PARTLY_FROZEN, "freeze_parameters", "freeze_parameters_regex"),
    **unmodelled_keys(PARTLY_FROZEN, "trainable_parameters", "trainable_parameters_regex"),
    **unmodelled_keys(PARTLY_FROZEN, "freeze_llm", default=False),
    **unmodelled_keys("a tower of images, or its projector, is trained", "freeze_vit", "freeze_aligner", default=True),
    **unmodelled_keys("layers spread over GPUs one after another", "device_map", "device_map.*", "max_memory"),
    **unmodelled_keys("layers spread over GPUs one after another", "max_memory.*"),
    **unmodelled_keys("another head, and another loss", "task_type", default="causal_lm"),
    **unmodelled_keys("another loss", "enable_dft_loss", default=False),
    **unmodelled_keys("another objective, next to it", "chord_sft_dataset"),
    **approximate_keys("losses of each channel, which are logged", "enable_channel_loss", default=False),
    **approximate_keys(VOCABULARY, "new_special_tokens"),
    **approximate_keys("code of your own, which is not read", "external_plugins", "custom_register_path"),
    **approximate_keys("the head runs only over what is trained; counted over full sequences", "use_logits_to_keep"),
}

"""Megatron's arguments that change the cost of a step, each with its default; names with underscores, as in ``args``.

Sources: NVIDIA/Megatron-LM core_v0.16.1 megatron/training/arguments.py, and in the package megatron-core 0.16.1, under
megatron/core: transformer/transformer_config.py, model_parallel_config.py, optimizer/optimizer_config.py and
distributed/distributed_data_parallel_config.py.
"""

from __future__ import annotations

from fivefold.interop.keys import Table, approximate_keys, field, ignored_keys, part, unmodelled_key
from fivefold.interop.megatron import effects
from fivefold.model.activations import ActivationName
from fivefold.model.norms import NormName

HARMLESS_ARGUMENTS = """
abort_on_nan abort_on_unmet_fused_kernel_constraints adlr_autoresume adlr_autoresume_interval
allow_ambiguous_pad_tokens app_tag_run_name app_tag_run_version apply_wd_to_qk_layernorm async_save
attention_dropout_rng auto_detect_ckpt_format barrier_with_L1_time barrier_with_level_1_timing bert_*
biencoder_* block_data_path cache_mla_latents calc_ft_timeouts calculate_per_token_loss check_* ckpt_*
classes_fraction config_logger_dir consumed_train_samples consumed_valid_samples cuda_graph_warmup_steps data_*
dataloader_* ddp_average_in_collective decode_only_cuda_graphs decoupled_lr decoupled_min_lr dino_*
disable_chunked_prefill disable_gloo_process_groups disable_msc disable_straggler_on_startup dist_ckpt_*
distrib_optim_fully_reshardable_mem_efficient distributed_timeout_minutes distributed_timeout_seconds_after_init dsa_*
dump_param_to_param_group_map embedding_init_method_std embedding_path enable_chunked_prefill enable_experimental
enable_ft_package end_weight_decay eod_mask_loss error_injection_rate error_injection_type eval_* evidence_data_path
exit_* filter_warnings fim_* finetune flash_decode fp8_amax_* fp8_interval fp8_margin ft_* full_validation grpo_*
head_lr_mult hf_* hysteresis ict_* img_h img_w indexer_batch_size indexer_log_interval inference_* init_method_*
init_model_with_meta_device initial_loss_scale inprocess_* iter_per_epoch iterations_to_skip job_name kill_switch_path
kitchen_attention_backend langrl_* lazy_mpu_init legacy_tokenizer linear_* load load_* local_rank log_* logging_level
loss_scale loss_scale_window lr_* mamba_* manual_gc manual_gc_eval manual_gc_interval mask_factor mask_prob mask_type
max_seqlen_per_dp_cp_rank max_tokens_to_oom memory_keys memory_snapshot_path merge_file mid_level_dataset_surplus
min_loss_scale min_offloaded_tensor_size mlp_chunks_for_prefill mock_data modules_to_filter moe_input_jitter_eps
moe_pad_experts_for_cuda_graph_inference moe_per_layer_logging moe_router_bias_update_rate moe_token_drop_policy
moe_upcycling_* moe_use_upcycling moe_z_* mrope_section multiple_validation_sets muon_*
nccl_all_reduce_for_prefill no_barrier_with_level_1_timing no_check_* no_ckpt_fully_parallel_save
no_create_attention_mask_in_dataloader no_load_* no_mmap_bin_files no_one_logger no_save_* no_weight_decay_cond_type
non_persistent_* num_channels num_classes num_dataset_builder_threads num_layers_at_end_in_bf16
num_layers_at_start_in_bf16 num_workers object_storage_cache_path offload_modules one_logger_* onnx_safe
output_bert_embeddings override_opt_param_scheduler patch_dim patch_size per_dataset_sequences_path
per_split_data_args_path perform_initialization pretrained_checkpoint profile profile_* qk_clip_alpha
qk_clip_threshold query_in_block_prob rank record_memory_history refit_method relative_attention_max_distance
relative_attention_num_buckets replication replication_* rerun_* reset_position_ids result_rejected_tracker_filename
retriever_report_topk_accuracies retriever_score_scaling rl_* rope_*
rotary_seq_len_interpolation_factor run_workload_inspector_server runtime_time_unit sample_rate save save_*
seed_everything set_level_for_all_loggers sft_tokenizer_prompt_format short_seq_prob skip_train split
start_weight_decay straggler_* strict_fsdp_dtensor_load suggested_communication_unit_size swin_backbone_type
te_rng_tracker tensorboard_* test_* throughput_window_size tiktoken_* timing_log_option titles_data_path tokenizer_*
torch_fsdp2_no_reshard_after_forward tp_comm_bootstrap_backend train_data_* trust_remote_code
use_checkpoint_opt_param_scheduler use_cpu_initialization use_dist_ckpt use_legacy_static_engine
use_mamba_mem_eff_path use_mcore_models use_nsys_profiler use_one_sent_docs use_persistent_* use_pytorch_profiler
use_rope_scaling use_tokenizer_model_from_checkpoint_args valid_* vision_* vocab_file wandb_* warmup wd_incr_steps
weight_decay_* wgrad_deferral_limit world_size wsd_decay_steps zero_force_ds_cpu_optimizer
"""
# Fields of sections, and sections, of the configs that Megatron-Bridge and NeMo 2 save.
HARMLESS_FIELDS = """
_* accelerator add_extra_token_to_sequence align_param_gather allow_ambiguous_pad_tokens apply_wd_to_qk_layernorm
autocast_dtype batch_p2p_comm blend cache_mla_latents checkpoint ckpt_async_save config config_logger_dir
constant_steps cpu_offloading_activations cpu_offloading_double_buffering cpu_offloading_retain_pinned_cpu_buffers
cpu_offloading_weights cuda_graph_retain_backward_graph data_parallel_random_init dataset_kwargs dataset_root
decoupled_weight_decay defer_npy_index_mmap devices do_test do_validation drop_last embedding_init_method
embedding_init_method_std enable_checkpointing enable_megatron_core_experimental env_vars external_gpu_device_mapping
fast_cache_load finalize_model_grads_func flash_decode flight_recorder_* fp32 frequency
fsdp_db_use_persist_buf_on_alloc_fail ft gated_linear_unit grad_scale_func grad_sync_func gradient_clip_val
hetereogenous_dist_checkpoint init_method init_model_with_meta_device inprocess_restart interval iterations_to_skip
kitchen_attention_backend lazy_init limit_test_batches limit_val_batches lion_beta1 lion_beta2 log logger lr_mult
lr_scheduler max_epochs max_seqlen_per_dp_cp_rank max_train_samples memmap_workers mid_level_dataset_surplus
min_offloaded_tensor_size mlp_chunks_for_prefill mock moe_token_dropping monitor mrope_section mtp_enabled mup_*
nccl_all_reduce_for_prefill no_sync_func no_weight_decay_cond no_weight_decay_cond_type nsys_profile
num_layers_at_end_in_bf16 num_layers_at_start_in_bf16 num_nodes nvrx_straggler offload_modules offset
optimizer_config_override_provider output_layer_init_method param_sync_func params
params_dtype path_to_cache paths perform_initialization persistent_workers pin_memory pipeline pipeline_dtype
precision preserve_fp32_weights profiling qk_clip_alpha qk_clip_threshold random_seed rerun_state_machine
restore_config resume resume_if_exists scale_lr_cond seq_len_interpolation_factor sequence should_pad_vocab
skip_getting_attention_mask_from_dataset straggler strategy tensor_inspect test_mode timers tokenizer tp_only_amax_red
use_decentralized_pg use_distributed_sampler use_gloo_process_groups use_mamba_mem_eff_path use_te_rng_tracker
val_check_interval validation version warmup_steps yarn_*
"""
VERSION = "core_v0.16.1"

ALIAS = {
    "tp_size": "tensor_model_parallel_size", "use_custom_fsdp": "use_megatron_fsdp", "fp8": "fp8_format",
    "fp4": "fp4_format", "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "num_moe_experts": "num_experts", "layernorm_epsilon": "norm_epsilon",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "max_sequence_length": "seq_length", "batch_size": "micro_batch_size",
    "moe_enable_flex": "moe_enable_deepep", "bucket_size": "ddp_bucket_size",
    "pad_buckets_for_high_nccl_busbw": "ddp_pad_buckets_for_high_nccl_busbw",
    "reduce_scatter_with_fp32_accumulation": "ddp_reduce_scatter_with_fp32_accumulation",
    "average_in_collective": "ddp_average_in_collective",
}  # fmt: skip

NEGATED = {  # names in the ``args`` of a checkpoint → the flag that turns them off
    "add_bias_linear": "disable_bias_linear", "gradient_accumulation_fusion": "no_gradient_accumulation_fusion",
    "masked_softmax_fusion": "no_masked_softmax_fusion", "bias_swiglu_fusion": "no_bias_swiglu_fusion",
    "bias_gelu_fusion": "no_bias_gelu_fusion", "apply_rope_fusion": "no_rope_fusion",
    "overlap_p2p_comm": "no_overlap_p2p_communication",
    "async_tensor_model_parallel_allreduce": "no_async_tensor_model_parallel_allreduce",
    "bias_dropout_fusion": "no_bias_dropout_fusion", "persist_layer_norm": "no_persist_layer_norm",
    "add_position_embedding": "no_position_embedding", "align_grad_reduce": "no_align_grad_reduce",
    "gradient_reduce_div_fusion": "no_gradient_reduce_div_fusion", "data_sharding": "no_data_sharding",
    "scatter_gather_tensors_in_pipeline": "no_scatter_gather_tensors_in_pipeline",
    "pin_cpu_grads": "no_pin_cpu_grads", "pin_cpu_params": "no_pin_cpu_params", "muon_split_qkv": "muon_no_split_qkv",
}  # fmt: skip

FFN = "model.ffn; default: 4·hidden, with swiglu ⅔ of that"

NORM: dict[str, NormName] = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
# Options that name the activation of a feed-forward without a gate; the default is gelu. With a gate (--swiglu), it is
# silu.
ACTIVATIONS: dict[str, ActivationName] = {"squared_relu": "relu2", "openai_gelu": "gelu_tanh"}

PIPE = "layout.v and layout.stages"

AC = "layout.ac"

PRECISION = "job.precision"

MODEL: Table = {
    "num_layers": field("model.layers", None),
    "encoder_num_layers": part("model.layers, where it says the same", None),
    "no_position_embedding": part("model.position: that it is not learned", False),
    "hidden_size": field("model.width", None),
    "ffn_hidden_size": part(FFN, None),
    "num_attention_heads": field("model.heads", None),
    "kv_channels": part("model.head_dim; default: hidden / heads", None),
    "group_query_attention": part("model.kv_heads: true if there are fewer than heads", False),
    "num_query_groups": part("model.kv_heads", 1),
    "max_position_embeddings": field("model.positions", None),
    "position_embedding_type": field(
        "model.position",
        "learned_absolute",
        {"learned_absolute": "learned", "rope": "rope", "yarn": "rope", "none": "none"},
    ),
    "use_rotary_position_embeddings": part("model.position", False),
    "rotary_base": field("model.rope_theta", 10_000),
    "rotary_percent": field("model.rope_fraction", 1.0),
    "normalization": field("model.norm", "LayerNorm", NORM),
    "norm_epsilon": field("model.norm_epsilon", 1e-5),
    "apply_layernorm_1p": field("model.norm_plus_one", False),
    "swiglu": part("model.mlp and model.activation", False),
    "squared_relu": part("model.activation", False),
    "openai_gelu": part("model.activation", False),
    "quick_geglu": unmodelled_key("an activation that no model here has", False),
    "disable_bias_linear": part("biases of all linear layers", False),
    "add_qkv_bias": part("model.qkv_bias", False),
    "qk_layernorm": field("model.qk_norm", False, {True: "head", False: "none"}),
    "untie_embeddings_and_output_weights": field("model.tied_embeddings", False, {True: False, False: True}),
    "pad_vocab_size_to": part("model.vocab, as padded, of Megatron-DeepSpeed", None),
    "vocab_size": part("model.vocab; default: that of the tokenizer", None),
    "padded_vocab_size": part("model.vocab, as padded", None),
    "tokenizer_model": part("model.vocab, if the tokenizer is known", None),
    "tokenizer_type": part("model.vocab, if the tokenizer is known", None),
    "make_vocab_size_divisible_by": field("job.stack.vocab_multiple", 128),
    "hidden_dropout": field("model.dropout", 0.1),
    "attention_dropout": field("model.attention_dropout", 0.1),
    "multi_latent_attention": part("model.mla", False),
    "q_lora_rank": part("model.mla.q_rank", None),
    "kv_lora_rank": part("model.mla.kv_rank", 32),
    "qk_head_dim": part("model.mla.nope_dim", 128),
    "qk_pos_emb_head_dim": part("model.mla.rope_dim", 64),
    "v_head_dim": part("model.mla.v_dim", 128),
    "rotary_scaling_factor": part("model.rope_scaling.factor and model.attention_scale, of latent attention", 1.0),
    "mscale": part("model.rope_scaling.mscale, of latent attention", 1.0),
    "mscale_all_dim": part("model.attention_scale, of latent attention", 0.0),
    "original_max_position_embeddings": part("model.rope_scaling.original_positions, of latent attention", 4096),
    "beta_fast": part("model.rope_scaling.beta_fast, of latent attention", 32.0),
    "beta_slow": part("model.rope_scaling.beta_slow, of latent attention", 1.0),
    "num_experts": part("model.moe.experts", None),
    "moe_layer_freq": part("model.moe.dense_layers: which layers have experts", "1"),
    "moe_ffn_hidden_size": part("model.moe.ffn; default: ffn_hidden_size", None),
    "moe_shared_expert_intermediate_size": part("model.moe.shared_ffn, of all shared experts", None),
    "moe_latent_size": part("model.moe.latent_width", None),
    "moe_router_topk": part("model.moe.topk", 2),
    "moe_router_score_function": part("model.moe.score", "softmax"),
    "moe_router_pre_softmax": part("model.moe.normalized", False),
    "moe_router_num_groups": part("model.moe.groups", None),
    "moe_router_group_topk": part("model.moe.topk_groups", None),
    "moe_router_topk_scaling_factor": part("model.moe.scaling", None),
    "moe_router_enable_expert_bias": part("model.moe.balance", False),
    "moe_router_load_balancing_type": part("model.moe.balance", "aux_loss"),
    "moe_aux_loss_coeff": part("model.moe.aux_coefficient", 0.0),
    "moe_expert_capacity_factor": part("model.moe.capacity", None),
    "moe_router_force_load_balancing": part("job.imbalance: every expert gets as many tokens, as is counted", False),
    "mtp_num_layers": part("model.mtp.depth", None),
    "mtp_loss_scaling_factor": part("model.mtp.coefficient", 0.1),
    "window_size": unmodelled_key("attention within a window", None),
    "window_attn_skip_freq": unmodelled_key("attention within a window", None),
    "softmax_type": unmodelled_key("attention with sinks", "vanilla"),
    "is_hybrid_model": unmodelled_key("state-space layers", False),
    "hybrid_override_pattern": unmodelled_key("state-space layers", None),
    "hybrid_layer_pattern": unmodelled_key("state-space layers", None),
    "linear_attention_freq": unmodelled_key("linear attention", None),
    "experimental_attention_variant": unmodelled_key("another attention", None),
    "embed_layernorm": unmodelled_key("a norm of the embeddings", False),
    "fp32_residual_connection": unmodelled_key("the stream in fp32", False),
    "apply_residual_connection_post_layernorm": unmodelled_key("residuals taken after the norm", False),
    "no_rope_freq": unmodelled_key("layers without rotary positions", None),
}

LAYOUT: Table = {
    "tensor_model_parallel_size": field("layout.tp", 1),
    "pipeline_model_parallel_size": field("layout.pp", 1),
    "context_parallel_size": field("layout.cp", 1),
    "expert_model_parallel_size": field("layout.ep", 1),
    "expert_tensor_parallel_size": part("layout.etp; default: tp", None),
    "sequence_parallel": part("layout.sp", False),
    "num_layers_per_virtual_pipeline_stage": part(PIPE, None),
    "num_virtual_stages_per_pipeline_rank": part(PIPE, None),
    "decoder_first_pipeline_num_layers": part(PIPE, None),
    "decoder_last_pipeline_num_layers": part(PIPE, None),
    "account_for_embedding_in_pipeline_split": part(PIPE, False),
    "account_for_loss_in_pipeline_split": part(PIPE, False),
    "pipeline_model_parallel_layout": part(PIPE, None),
    "use_distributed_optimizer": part("layout.zero", False),
    "use_megatron_fsdp": part("layout.zero", False),
    "data_parallel_sharding_strategy": part("layout.zero, with use_megatron_fsdp", "no_shard"),
    "num_distributed_optimizer_instances": part("layout.shard_group", 1),
    "use_tp_pp_dp_mapping": part("layout.order", False),
    "cp_comm_type": part("layout.cp_kind", "p2p"),
    "micro_batch_size": field("layout.mbs", None),
    "recompute_granularity": part(AC, None),
    "recompute_method": part(AC, None),
    "recompute_num_layers": part(AC, None),
    "recompute_modules": part(AC, ["core_attn"]),
    "recompute_activations": part(AC, False),
    "checkpoint_activations": part(f"{AC}, of old scripts: full", False),
    "deepspeed": part("layout.zero, of Megatron-DeepSpeed", False),
    "zero_stage": part("layout.zero, of Megatron-DeepSpeed, whose bf16 optimizer is sharded even at stage 0", 0),
    "pp_partition_method": part(f"{PIPE}, of Megatron-DeepSpeed", None),
    "distribute_saved_activations": unmodelled_key("kept inputs are cut over tp", False),
    "hierarchical_context_parallel_sizes": unmodelled_key("context parallelism of two kinds", None),
    "use_torch_fsdp2": unmodelled_key("PyTorch's FSDP2 instead of Megatron's", False),
    "standalone_embedding_stage": unmodelled_key("the embedding as a stage of its own", False),
    "microbatch_group_size_per_virtual_pipeline_stage": unmodelled_key(
        "another order of the interleaved schedule", None
    ),
}

JOB: Table = {
    "seq_length": field("job.sequence", None),
    "encoder_seq_length": part("job.sequence, where it says the same", None),
    "global_batch_size": part("job.global_batch; default: micro_batch_size of every replica", None),
    "rampup_batch_size": part("job.ramp", None),
    "train_iters": part("job.steps", None),
    "train_samples": part("job.steps", None),
    "seed": field("job.seed", 1234),
    "optimizer": field(
        "job.optimizer.kind", "adam", {"adam": "adamw", "sgd": "sgd", "muon": "muon", "dist_muon": "muon"}
    ),
    "adam_beta1": part("job.optimizer.betas", 0.9),
    "adam_beta2": part("job.optimizer.betas", 0.999),
    "adam_eps": field("job.optimizer.epsilon", 1e-8),
    "weight_decay": field("job.optimizer.weight_decay", 0.01),
    "clip_grad": field("job.optimizer.clip", 1.0),
    "lr": field("job.learning_rate.peak", None),
    "min_lr": part("job.learning_rate.floor", 0.0),
    "lr_decay_style": part("job.learning_rate.kind", "linear"),
    "lr_warmup_iters": part("job.learning_rate.warmup_steps", 0),
    "lr_wsd_decay_iters": part("job.learning_rate.decay_steps", None),
    "bf16": part(PRECISION, False),
    "fp16": part(PRECISION, False),
    "grad_reduce_in_bf16": part(f"{PRECISION}: of sums of gradients", False),
    "accumulate_allreduce_grads_in_fp32": part(f"{PRECISION}: of sums of gradients; bf16 always has it", False),
    "fp8_format": part(PRECISION, None),
    "fp8_recipe": part(PRECISION, "delayed"),
    "fp8_param_gather": part(f"{PRECISION}: weights held and gathered in fp8", False),
    "fp4_format": part(PRECISION, None),
    "use_precision_aware_optimizer": part(f"{PRECISION}: of the optimizer's states", False),
    "main_grads_dtype": part(PRECISION, "fp32"),
    "main_params_dtype": part(PRECISION, "fp32"),
    "exp_avg_dtype": part(PRECISION, "fp32"),
    "exp_avg_sq_dtype": part(PRECISION, "fp32"),
    "first_last_layers_bf16": unmodelled_key("first and last layers in bf16: counted in fp8", False),
    "optimizer_cpu_offload": part("job.offload", False),
    "optimizer_offload_fraction": unmodelled_key("a part of the optimizer in host memory: counted as all", 1.0),
    "cpu_offloading_num_layers": unmodelled_key("activations of some layers in host memory", 0),
    "fine_grained_activation_offloading": unmodelled_key("activations of some modules in host memory", False),
    "reset_attention_mask": part("job.documents", False),
    "lora_rank": unmodelled_key("adapters, not the weights, are trained", None),
    "qlora": unmodelled_key("adapters, not the weights, are trained", False),
}

STACK: Table = {
    "overlap_grad_reduce": part("job.stack.overlap: dp communication overlaps compute", False),
    "overlap_param_gather": part("job.stack.param_all_gather: overlapped with the forward", False),
    "ddp_bucket_size": part("job.stack.ddp_bucket_size: elements, whatever the number of ranks", None),
    "tp_comm_overlap": part("job.stack.overlap: tp communication overlaps compute", False),
    "overlap_moe_expert_parallel_comm": part(
        "job.stack.overlap and job.stack.pairs: ep communication overlaps compute", False
    ),
    "no_overlap_p2p_communication": part("job.stack.p2p_overlap", False),
    "no_async_tensor_model_parallel_allreduce": field("job.stack.async_tp", False, {True: False, False: True}),
    "cross_entropy_loss_fusion": part("job.stack.loss", False),
    "cross_entropy_fusion_impl": part("job.stack.loss, if it is fused", "native"),
    "transformer_impl": part("job.stack.attention", "transformer_engine"),
    "use_flash_attn": part("job.stack.attention", False),
    "attention_backend": part("job.stack.attention", "auto"),
    "no_gradient_accumulation_fusion": part("job.stack.wgrad_accumulation", False),
    "moe_token_dispatcher_type": part("job.stack.dispatcher", "allgather"),
    "moe_enable_deepep": part("job.stack.dispatcher", False),
    "moe_grouped_gemm": part("experts in one grouped matmul, as they are counted", False),
    "moe_use_legacy_grouped_gemm": unmodelled_key("an older kernel for experts", False),
    "cuda_graph_impl": part("job.stack.cuda_graphs", "none"),
    "cuda_graph_scope": part("job.stack.cuda_graphs", "full"),
    "enable_cuda_graph": part("job.stack.cuda_graphs", False),
    "external_cuda_graph": part("job.stack.cuda_graphs", False),
    "delay_wgrad_compute": unmodelled_key("weights' gradients deferred", False),
    "moe_shared_expert_overlap": unmodelled_key("shared experts during messages", False),
    "no_masked_softmax_fusion": unmodelled_key("softmax in several kernels, of unfused attention", False),
    "no_bias_swiglu_fusion": unmodelled_key("SwiGLU in several kernels", False),
    "no_bias_gelu_fusion": unmodelled_key("GELU in several kernels", False),
    "no_rope_fusion": unmodelled_key("rotary positions in several kernels", False),
    "use_nccl_ub": unmodelled_key("NCCL's user buffers", False),
    "nccl_ub": unmodelled_key("NCCL's user buffers", False),
}

# Fields of Megatron-Core, Megatron-Bridge and NeMo 2 in YAML files that are not arguments.
CORE_FIELDS: Table = {
    "use_mup": unmodelled_key("another parametrisation of widths", False),
    "mtp_use_repeated_layer": unmodelled_key("one layer predicts further tokens again and again", False),
    "fused_residual_rmsnorm": unmodelled_key("norms and residual adds in one kernel", False),
    "mla_down_proj_fusion": unmodelled_key("the down projections of latent attention in one matmul", False),
    "megatron_fsdp_main_params_dtype": unmodelled_key("masters of Megatron-FSDP", "float32"),
    "megatron_fsdp_main_grads_dtype": unmodelled_key("gradients of Megatron-FSDP", None),
    "megatron_fsdp_grad_comm_dtype": unmodelled_key("gradients of Megatron-FSDP on the wire", None),
    "softmax_scale": unmodelled_key("another scale of the scores", None),
    "activation_func_fp8_input_store": unmodelled_key("inputs of activations kept in fp8", False),
    "fp8_dot_product_attention": field("job.stack.fp8_attention", False),
    "fp8_multi_head_attention": unmodelled_key("attention in fp8, next to matmuls that read and write fp8", False),
    "use_kitchen": unmodelled_key("kernels of another library", False),
    "heterogeneous_block_specs": unmodelled_key("layers that differ", False),
    "use_transformer_engine_op_fuser": unmodelled_key("fused operations of Transformer Engine", False),
    "cpu_offloading": unmodelled_key("activations of some layers in host memory", False),
    "num_microbatches_with_partial_activation_checkpoints": unmodelled_key("micro-batches without recomputation", None),
    "peft": unmodelled_key("adapters, not the weights, are trained", None),
    "accumulate_grad_batches": unmodelled_key("more micro-batches than the strategy says", 1),
    "deallocate_pipeline_outputs": unmodelled_key("outputs of a stage that stay", True),
    "use_transformer_engine_full_layer_spec": unmodelled_key("layers of Transformer Engine", False),
    "restore_modelopt_state": unmodelled_key("a model that was changed", False),
    "activation_func": unmodelled_key("another activation", None),
    "transformer_layer_spec": unmodelled_key("a layer of one's own", None),
    "scatter_embedding_sequence_parallel": unmodelled_key("every rank has the embedding's full output", True),
    "parallel_output": unmodelled_key("logits are gathered", True),
    "use_inference_optimized_layers": unmodelled_key("layers for inference", False),
    **approximate_keys("variables of the environment", "ENV_VARS", "env.*"),
    **approximate_keys("packed sequences; counted as one", "packed_sequence_specs"),
    **approximate_keys(
        "how messages of tensor parallelism hide", "tp_comm_atomic_ag", "tp_comm_atomic_rs", default=False
    ),
    **approximate_keys("how messages of tensor parallelism hide", "tp_comm_overlap_disable_qkv", default=False),
    **approximate_keys("how messages of tensor parallelism hide", "tp_comm_overlap_disable_fc1", default=False),
    **approximate_keys("matmuls under autocast", "enable_autocast", "autocast_enabled", default=False),
    **approximate_keys("a mask that is given", "use_arbitrary_attention_mask", default=False),
    **approximate_keys("memory of CUDA graphs", "cuda_graph_use_single_mempool", default=False),
    **approximate_keys(
        "16 bits of the masters apart, of the precision-aware optimizer", "store_param_remainders", default=True
    ),
    **approximate_keys("activation and bias in several kernels", "bias_activation_fusion", default=True),
    **ignored_keys(*HARMLESS_FIELDS.split()),
}

TABLE: Table = {**MODEL, **LAYOUT, **JOB, **STACK, **effects.TABLE, **ignored_keys(*HARMLESS_ARGUMENTS.split())}

"""What a saved recipe of NeMo 2 leaves to its classes: a file has only the fields that differ from their defaults.

Source: nemo-toolkit 2.4.0, nemo/collections/llm/gpt (models and data), nemo/lightning/pytorch (strategy, plugins,
callbacks, optim); megatron-core 0.13.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.interop.keys import Table, approximate_keys, ignored_keys, to_list, unmodelled_key, unmodelled_keys
from fivefold.interop.megatron_bridge.keys import BRIDGE_AND_CORE_KEYS, OVERLAP_BUCKET_SIZE, replace_defaults

DATA = "nemo.collections.llm.gpt.data."  # modules of data with the defaults of DATA_DEFAULTS
DATA_DEFAULTS = {"micro_batch_size": 4, "global_batch_size": 8, "seq_length": 2048}

DEFAULTS = {  # of GPTConfig and ModelParallelConfig, if they differ from Megatron-Bridge's
    "ddp_bucket_size": OVERLAP_BUCKET_SIZE,  # of MegatronCommOverlapCallback
    "lr_decay_style": "constant",
}

PRECISIONS = {  # of MegatronMixedPrecision, whose fields override those of the model and of DDP
    **{name: {"bf16": True, "fp16": False} for name in ("bf16", "bf16-mixed")},
    **{name: {"bf16": False, "fp16": True} for name in ("16", "16-mixed", "fp16", "fp16-mixed")},
    **{name: {"bf16": False, "fp16": False} for name in ("32", "fp32")},
}

SCHEDULERS = {  # nemo/lightning/pytorch/optim/lr_scheduler.py
    "CosineAnnealingScheduler": "cosine",
    "WarmupAnnealingScheduler": "linear",
    "WarmupPolicyScheduler": "constant",
    "WarmupHoldPolicyScheduler": "constant",
}

NAMES = {"warmup_steps": "lr_warmup_iters"}  # fields that Megatron-Bridge does not have → arguments

IDLE = """
barebones benchmark bias_dropout_add_fusion checkpoint_io cluster_environment cycle d_model dataset_cls decay_rate
default_root_dir enable_model_summary enable_progress_bar fast_dev_run find_unused_parameters fp16_*
generation_config gradient_clip_algorithm high_freq_factor hold_ratio hold_steps index_mapping_dir
init_model_parallel limit_predict_batches limit_train_batches low_freq_factor max_time merges_file min_epochs
min_steps num_sanity_val_steps num_test_samples num_train_samples num_val_samples old_context_len optim
overfit_batches parallel_devices power progress_interval reload_dataloaders_every_n_epochs replace_progress_bar
scale_factor setup_optimizers sync_batchnorm warmup_ratio
"""

NEMO_KEYS: Table = {
    **replace_defaults(BRIDGE_AND_CORE_KEYS, DEFAULTS),
    **unmodelled_keys("layers of an encoder", "encoder_tensor_model_parallel_size", default=0),
    **unmodelled_keys("layers of an encoder", "encoder_pipeline_model_parallel_size", default=0),
    **unmodelled_keys("layers of an encoder", "pipeline_model_parallel_split_rank"),
    **unmodelled_keys("logits that are capped", "attn_logit_softcapping", "final_logit_softcapping"),
    **unmodelled_keys("another scale of the scores", "query_pre_attn_scalar"),
    **unmodelled_keys("adapters, or another change of the model", "model_transform", "model_context_managers"),
    **unmodelled_keys("a forward step of one's own", "forward_step_fn"),
    **unmodelled_keys("deterministic kernels, which may be slower", "deterministic", default=False),
    **unmodelled_keys("checks of every gradient", "detect_anomaly", default=False),
    **unmodelled_keys("another plugin", "plugins"),
    **unmodelled_keys("transposed weights are kept", "keep_fp8_transpose_cache_when_using_custom_fsdp", default=False),
    "fp8_params": BRIDGE_AND_CORE_KEYS["fp8_param_gather"],
    "ddp": unmodelled_key("PyTorch's DDP instead of Megatron's", "megatron"),
    "fsdp": unmodelled_key("PyTorch's FSDP2 instead of Megatron's", None),
    **approximate_keys("the profiler, which slows the steps that it records", "profiler"),
    **approximate_keys("timers that wait for the device", "megatron_log_level", default=0),
    **approximate_keys("a mask, which the data loader makes", "create_attention_mask", default=False),
    **approximate_keys("another schedule of the learning rate", "lr_scheduler"),
    **ignored_keys(*IDLE.split()),
}

GATED = {"normalization": "RMSNorm", "gated_linear_unit": True, "position_embedding_type": "rope",
         "add_bias_linear": False, "hidden_dropout": 0.0, "attention_dropout": 0.0,
         "share_embeddings_and_output_weights": False}  # fmt: skip


def _set_sizes(layers: int, width: int, heads: int, ffn: int, **others: Any) -> dict[str, Any]:
    return {"num_layers": layers, "hidden_size": width, "num_attention_heads": heads, "ffn_hidden_size": ffn, **others}


# Class of a model's config → the class whose fields it takes over, and its own. Fields without cost are left out.
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "GPTConfig": ("", {}),
    "GPTConfig126M": ("GPTConfig", _set_sizes(12, 768, 12, 3072)),
    "GPTConfig5B": ("GPTConfig", _set_sizes(24, 4096, 32, 16384)),
    "GPTConfig7B": ("GPTConfig", _set_sizes(32, 4096, 32, 10880)),
    "GPTConfig20B": ("GPTConfig", _set_sizes(44, 6144, 48, 24576)),
    "GPTConfig40B": ("GPTConfig", _set_sizes(48, 8192, 64, 32768)),
    "GPTConfig175B": ("GPTConfig", _set_sizes(
        96, 12288, 96, 49152, hidden_dropout=0.0, attention_dropout=0.0, layernorm_zero_centered_gamma=True)),
    "LlamaConfig": ("GPTConfig", GATED),
    "Llama2Config7B": ("LlamaConfig", _set_sizes(32, 4096, 32, 11008, num_query_groups=32)),
    "Llama2Config13B": ("LlamaConfig", _set_sizes(40, 5120, 40, 13824, num_query_groups=40)),
    "Llama2Config70B": ("LlamaConfig", _set_sizes(80, 8192, 64, 28672, num_query_groups=8)),
    "Llama3Config": ("LlamaConfig", {"num_query_groups": 8}),
    "Llama31Config": ("Llama3Config", {}),
    "Llama3Config8B": ("Llama3Config", _set_sizes(32, 4096, 32, 14336, rotary_base=500_000)),
    "Llama3Config70B": ("Llama3Config", _set_sizes(80, 8192, 64, 28672, rotary_base=500_000)),
    "Llama31Config8B": ("Llama31Config", _set_sizes(32, 4096, 32, 14336, rotary_base=500_000)),
    "Llama31Config70B": ("Llama31Config", _set_sizes(80, 8192, 64, 28672, rotary_base=500_000)),
    "Llama31Config405B": ("Llama31Config", _set_sizes(126, 16384, 128, 53248, rotary_base=500_000)),
    "Llama32Config1B": ("Llama31Config", _set_sizes(
        16, 2048, 32, 8192, rotary_base=500_000, share_embeddings_and_output_weights=True)),
    "Llama32Config3B": ("Llama31Config", _set_sizes(
        28, 3072, 24, 8192, rotary_base=500_000, share_embeddings_and_output_weights=True)),
    "CodeLlamaConfig7B": ("Llama2Config7B", {"rotary_base": 1_000_000}),
    "CodeLlamaConfig13B": ("Llama2Config13B", {"rotary_base": 1_000_000}),
    "CodeLlamaConfig34B": ("LlamaConfig", _set_sizes(48, 8192, 64, 22016, num_query_groups=8, rotary_base=1_000_000)),
    "CodeLlamaConfig70B": ("Llama2Config70B", {}),
    "MistralConfig7B": ("GPTConfig", {**GATED, **_set_sizes(
        32, 4096, 32, 14336, num_query_groups=8, window_size=[4096, 0], cp_comm_type="a2a")}),
    "MistralNeMoConfig12B": ("MistralConfig7B", {
        "num_layers": 40, "hidden_size": 5120, "kv_channels": 128, "window_size": None, "cp_comm_type": None,
        "rotary_base": 1_000_000}),
    "MistralNeMoConfig123B": ("MistralConfig7B", _set_sizes(
        88, 12288, 96, 28672, kv_channels=128, window_size=None, cp_comm_type=None, rotary_base=1_000_000)),
    "MixtralConfig": ("GPTConfig", {**GATED, **_set_sizes(
        32, 4096, 32, 14336, num_query_groups=8, num_moe_experts=8, moe_aux_loss_coeff=0.01, moe_router_topk=2,
        moe_token_dispatcher_type="alltoall", rotary_base=1_000_000, bf16=True)}),
    "MixtralConfig8x3B": ("MixtralConfig", _set_sizes(32, 2560, 32, 8960)),
    "MixtralConfig8x7B": ("MixtralConfig", {}),
    "MixtralConfig8x22B": ("MixtralConfig", _set_sizes(56, 6144, 48, 16384)),
    "Qwen2Config": ("GPTConfig", {
        **GATED, "add_qkv_bias": True, "vocab_size": 151_936, "layernorm_epsilon": 1e-6, "rotary_base": 1_000_000}),
    "Qwen2Config500M": ("Qwen2Config", _set_sizes(24, 896, 14, 4864, num_query_groups=2)),
    "Qwen25Config500M": ("Qwen2Config500M", {}),
    "Qwen2Config1P5B": ("Qwen2Config", _set_sizes(28, 1536, 12, 8960, num_query_groups=2)),
    "Qwen25Config1P5B": ("Qwen2Config1P5B", {}),
    "Qwen2Config7B": ("Qwen2Config", _set_sizes(28, 3584, 28, 18944, num_query_groups=4, vocab_size=152_064)),
    "Qwen25Config7B": ("Qwen2Config7B", {}),
    "Qwen25Config14B": ("Qwen2Config", _set_sizes(
        48, 5120, 40, 13824, num_query_groups=8, vocab_size=152_064, layernorm_epsilon=1e-5)),
    "Qwen25Config32B": ("Qwen2Config", _set_sizes(
        64, 5120, 40, 27648, num_query_groups=8, vocab_size=152_064, layernorm_epsilon=1e-5)),
    "Qwen2Config72B": ("Qwen2Config", _set_sizes(
        80, 8192, 64, 29568, num_query_groups=8, vocab_size=152_064, layernorm_epsilon=1e-5)),
    "Qwen25Config72B": ("Qwen2Config72B", {}),
    "Qwen3Config": ("Qwen2Config", {
        "add_qkv_bias": False, "qk_layernorm": True, "kv_channels": 128, "num_query_groups": 8,
        "max_position_embeddings": 40_960}),
    "Qwen3MoEConfig": ("Qwen3Config", {
        "num_moe_experts": 128, "moe_aux_loss_coeff": 0.001, "moe_router_topk": 8, "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall"}),
    "Qwen3Config600M": ("Qwen3Config", _set_sizes(28, 1024, 16, 3072, share_embeddings_and_output_weights=True)),
    "Qwen3Config1P7B": ("Qwen3Config", _set_sizes(28, 2048, 16, 6144, share_embeddings_and_output_weights=True)),
    "Qwen3Config4B": ("Qwen3Config", _set_sizes(36, 2560, 32, 9728, share_embeddings_and_output_weights=True)),
    "Qwen3Config8B": ("Qwen3Config", _set_sizes(36, 4096, 32, 12288)),
    "Qwen3Config14B": ("Qwen3Config", _set_sizes(40, 5120, 40, 17408)),
    "Qwen3Config32B": ("Qwen3Config", _set_sizes(64, 5120, 64, 25600)),
    "Qwen3Config30B_A3B": ("Qwen3MoEConfig", _set_sizes(
        48, 2048, 32, 6144, num_query_groups=4, moe_ffn_hidden_size=768)),
    "Qwen3Config235B_A22B": ("Qwen3MoEConfig", _set_sizes(
        94, 4096, 64, 12288, num_query_groups=4, moe_ffn_hidden_size=1536)),
    "DeepSeekConfig": ("GPTConfig", {
        **GATED, "multi_latent_attention": True, "num_attention_heads": 128, "kv_channels": 128,
        "make_vocab_size_divisible_by": 3200, "qk_layernorm": True, "moe_grouped_gemm": True,
        "moe_router_pre_softmax": True, "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "seq_aux_loss", "moe_shared_expert_overlap": True, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128,
        "rotary_scaling_factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0, "layernorm_epsilon": 1e-6, "bf16": True}),
    "DeepSeekV2Config": ("DeepSeekConfig", _set_sizes(
        60, 5120, 128, 12288, num_moe_experts=160, moe_ffn_hidden_size=1536,
        moe_shared_expert_intermediate_size=3072, moe_layer_freq=[0] + [1] * 59, moe_router_topk=6,
        moe_router_num_groups=8, moe_router_group_topk=3, moe_router_topk_scaling_factor=16.0,
        moe_aux_loss_coeff=0.001, mscale=0.707, mscale_all_dim=0.707)),
    "DeepSeekV2LiteConfig": ("DeepSeekV2Config", _set_sizes(
        27, 2048, 16, 10944, kv_channels=16, q_lora_rank=None, num_moe_experts=64, moe_ffn_hidden_size=1408,
        moe_shared_expert_intermediate_size=2816, moe_layer_freq=[0] + [1] * 26, moe_router_num_groups=1,
        moe_router_group_topk=1, moe_router_topk_scaling_factor=1.0)),
    "DeepSeekV3Config": ("DeepSeekConfig", _set_sizes(
        61, 7168, 128, 18432, num_moe_experts=256, moe_ffn_hidden_size=2048,
        moe_shared_expert_intermediate_size=2048, moe_layer_freq=[0] * 3 + [1] * 58, moe_router_topk=8,
        moe_router_num_groups=8, moe_router_group_topk=4, moe_router_topk_scaling_factor=2.5,
        moe_aux_loss_coeff=0.0001, make_vocab_size_divisible_by=1280, moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True)),
    "NemotronConfig": ("GPTConfig", {**_set_sizes(32, 3072, 24, 9216, num_query_groups=8, kv_channels=128),
        "activation_func": "squared_relu", "position_embedding_type": "rope",
        "share_embeddings_and_output_weights": False, "add_bias_linear": False, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "rotary_percent": 0.5, "layernorm_zero_centered_gamma": True,
        "gated_linear_unit": False}),
    "Nemotron3Config4B": ("NemotronConfig", {}),
    "Nemotron3Config8B": ("NemotronConfig", _set_sizes(32, 4096, 32, 16384, num_query_groups=None, kv_channels=None)),
    "Nemotron3Config22B": ("NemotronConfig", _set_sizes(40, 6144, 48, 24576, num_query_groups=None, kv_channels=None)),
    "Nemotron4Config15B": ("NemotronConfig", _set_sizes(32, 6144, 48, 24576, kv_channels=None)),
    "Nemotron4Config340B": ("NemotronConfig", _set_sizes(96, 18432, 96, 73728, kv_channels=None)),
}  # fmt: skip


def find_class_fields(name: str) -> dict[str, Any] | None:
    """Return the defaults of a class of NeMo's model configs, with those that it takes over; None if it is unknown."""
    fields: dict[str, Any] = {}
    while name:
        if name not in CLASSES:
            return None
        name, own = CLASSES[name]
        fields = own | fields
    return fields


def get_target_name(section: Any) -> str:
    """Return the last part of a section's ``_target_``: the name of a class or function."""
    return str(section.get("_target_", "")).rpartition(".")[2] if isinstance(section, Mapping) else ""


def find_config_class(sections: Mapping[str, Any]) -> str:
    """Return the name of the class of the model's config."""
    model = sections.get("model")
    return get_target_name(model.get("config")) if isinstance(model, Mapping) else ""


def read_trainer(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that the trainer's precision and strategy and the schedule of the learning rate stand for."""
    trainer, optim = (sections.get(name) for name in ("trainer", "optim"))
    trainer = trainer if isinstance(trainer, Mapping) else {}
    fields: dict[str, Any] = {}
    for plugin in to_list(trainer.get("plugins")):
        if get_target_name(plugin) == "MegatronMixedPrecision":
            fields |= {"grad_reduce_in_fp32": True, **PRECISIONS.get(str(plugin.get("precision")), {}), **plugin}
            if plugin.get("fp8_params") is not None:  # its older name
                fields["fp8_param_gather"] = fields["fp8_params"]
        else:
            fields["plugins"] = get_target_name(plugin) or plugin
    fields = {key: value for key, value in fields.items() if key not in ("_target_", "_partial_", "_call_")}
    strategy = trainer.get("strategy")
    strategy = strategy if isinstance(strategy, Mapping) else {}
    if strategy.get("fsdp") == "megatron":
        fields |= {"use_megatron_fsdp": True, "fsdp": None}
    if isinstance(strategy.get("ddp"), Mapping):
        fields["ddp"] = None
    if scheduler := get_target_name(optim.get("lr_scheduler") if isinstance(optim, Mapping) else None):
        fields["lr_decay_style"] = SCHEDULERS.get(scheduler, "constant")
        fields["lr_scheduler"] = None if scheduler in SCHEDULERS else scheduler
    return fields


def has_lightning_precision(sections: Mapping[str, Any]) -> bool:
    """Return whether the trainer has a precision of Lightning's own, which is autocast."""
    trainer = sections.get("trainer")
    return isinstance(trainer, Mapping) and trainer.get("precision") not in (None, 32, "32", "32-true")


def read_data_defaults(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the batch and the sequence that NeMo's modules of data have unless they are given."""
    data = sections.get("data")
    target = str(data.get("_target_", "")) if isinstance(data, Mapping) else ""
    return dict(DATA_DEFAULTS) if target.startswith(DATA) else {}

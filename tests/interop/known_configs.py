"""Configs of other software in which their keys act: fine-tuning, experts, pipelines, fp8, and values of keys.

``CONFIGS`` holds keys over the base config of ``drawn_keys.py``; ``VALUES`` words that a key takes, by its last name;
``SWITCHES`` keys that take the effect from others: ``CONFIGS`` has their values, and they are not drawn;
``OVERRIDDEN`` pairs of keys of which one alone is read; ``WITHOUT_EFFECT`` keys that are read, and change an answer in
no config: each with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.interop.megatron_bridge.keys import KEYS_OF_SECTION, NAMES

Config = Mapping[str, Any]
LORA = {"adapter": "lora", "lora_r": 16, "lora_alpha": 32, "lora_target_linear": True}
FSDP = {"fsdp_version": 2, "fsdp_config.reshard_after_forward": True}
CHAT = {"datasets": [{"path": "d.jsonl", "ds_type": "json", "type": "chat_template"}]}
PIPELINE = {"pipeline_model_parallel_size": 4}
EXPERTS = {
    "num_experts": 8,
    "expert_model_parallel_size": 2,
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
}
RATE = {"lr": 1e-4, "train_iters": 1000, "lr_decay_style": "cosine"}
MEGATRON: list[dict[str, Any]] = [
    {},
    PIPELINE,
    {**PIPELINE, "num_virtual_stages_per_pipeline_rank": 2},
    {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "use_distributed_optimizer": True},
    {**EXPERTS, "moe_grouped_gemm": True, "moe_token_dispatcher_type": "alltoall"},
    {**EXPERTS, "moe_router_score_function": "sigmoid", "moe_router_topk": 4},
    {"multi_latent_attention": True, "q_lora_rank": 512, "position_embedding_type": "rope"},
    {"multi_latent_attention": True, "rotary_scaling_factor": 40.0, "position_embedding_type": "rope"},
    {"fp8_format": "hybrid", "use_distributed_optimizer": True},
    {"use_distributed_optimizer": True, "use_precision_aware_optimizer": True},
    {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"},
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 4},
    {"recompute_granularity": "selective"},
    {"group_query_attention": True, "num_query_groups": 8, "mtp_num_layers": 1},
    RATE,
    {"disable_bias_linear": True},
    {"position_embedding_type": "rope"},
    {"transformer_impl": "local"},
    {**EXPERTS, "moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 4},
    {"cuda_graph_impl": "local"},
]


def to_bridge(config: Config) -> dict[str, Any]:
    """Return Megatron's arguments as fields of a ConfigContainer's sections."""
    fields = {argument: field for field, argument in NAMES.items() if field != "seq_len"}
    sections = {argument: section for section, arguments in KEYS_OF_SECTION.items() for argument in arguments}
    return {f"{sections.get(key, 'model')}.{fields.get(key, key)}": value for key, value in config.items()}


def to_nemo(config: Config) -> dict[str, Any]:
    """Return Megatron's arguments as fields of a recipe of NeMo 2."""
    fields = {argument: field for field, argument in NAMES.items() if field not in ("seq_len", "max_steps")}
    fields |= {"train_iters": "max_steps", "fp8_format": "fp8"}
    sections = dict.fromkeys(
        ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
         "expert_model_parallel_size", "sequence_parallel", "num_virtual_stages_per_pipeline_rank"),
        "trainer.strategy",
    )  # fmt: skip
    sections |= dict.fromkeys(("lr", "use_distributed_optimizer", "use_precision_aware_optimizer"), "optim.config") | {
        "train_iters": "trainer",
        "fp8_format": "trainer.plugins",
        "data_parallel_sharding_strategy": "trainer.strategy.ddp",
    }
    named = {f"{sections.get(key, 'model.config')}.{fields.get(key, key)}": value for key, value in config.items()}
    if named.pop("model.config.use_megatron_fsdp", False):
        named["trainer.strategy.fsdp"] = "megatron"
    without = {"model.config.lr_decay_style", "model.config.disable_bias_linear", "model.config.transformer_impl"}
    negated = {"model.config.add_bias_linear": False} if config.get("disable_bias_linear") else {}
    return {key: value for key, value in named.items() if key not in without} | negated


LLAMA = {"model.config": {
    "_target_": "nemo.collections.llm.gpt.model.llama.Llama3Config8B", "num_attention_heads": 32}}  # fmt: skip
DEEPSEEK = {"model.config": {
    "_target_": "nemo.collections.llm.gpt.model.deepseek.DeepSeekV2LiteConfig", "vocab_size": 102_400,
    "moe_shared_expert_overlap": False}}  # fmt: skip

CONFIGS: dict[str, list[Config]] = {
    "axolotl": [
        {},
        LORA,
        {"adapter": "lora", "lora_r": 16, "lora_target_modules": ["v_proj"]},
        {"sample_packing": True},
        {**LORA, "adapter": "qlora", "load_in_4bit": True},
        FSDP,
        {"rl": "dpo"},
        {"deepspeed": "deepspeed_configs/zero3.json"},
        {"bf16": False},
        {**CHAT, "val_set_size": 0.1, "chat_template": "jinja"},
    ],
    "llamafactory": [
        {},
        {"finetuning_type": "lora"},
        {"finetuning_type": "lora", "quantization_bit": 4},
        {"finetuning_type": "freeze"},
        {"stage": "dpo"},
        {"bf16": False},
        {"packing": True},
    ],
    "ms-swift": [
        {},
        {"tuner_type": "lora"},
        {"tuner_type": "lora", "quant_method": "bnb", "quant_bits": 4},
        {"packing": True, "attn_impl": "flash_attn"},
        {"rlhf_type": "dpo"},
        {"deepspeed": None},
        {"deepspeed": "zero3", "max_steps": 1000},
        {"use_chat_template": False},
        {"bf16": False, "gradient_checkpointing": False},
        {"deepspeed": None, "tuner_type": "lora", "quant_method": "bnb", "quant_bits": 4},
    ],
    "trainer": [
        {},
        {"use_peft": True},
        {"use_peft": True, "load_in_4bit": True},
        {"bf16": False},
        {"max_steps": 1000, "warmup_steps": 10, "lr_scheduler_type": "cosine"},
    ],
    "trl": [
        {},
        {"use_peft": True},
        {"use_peft": True, "load_in_4bit": True},
        {"gradient_checkpointing": False, "packing": True},
        {"bf16": False},
    ],
    "accelerate": [
        {},
        {"accelerate.distributed_type": "DEEPSPEED", "accelerate.deepspeed_config.gradient_accumulation_steps": 4},
        {"accelerate.fsdp_config.fsdp_version": 1},
        {"accelerate.parallelism_config.parallelism_config_cp_size": 2},
    ],
    "deepspeed": [
        {},
        {"deepspeed.optimizer.type": "AdamW"},
        {"deepspeed.zero_optimization.stage": 3},
        {"deepspeed.zero_optimization.offload_optimizer.device": "cpu"},
    ],
    "megatron": MEGATRON,
    "bridge": [to_bridge(config) for config in MEGATRON],
    "nemo": [*(to_nemo(config) for config in MEGATRON), LLAMA, DEEPSEEK,
             {"trainer.strategy.pipeline_model_parallel_size": 4, "optim.config.use_distributed_optimizer": True,
              "callbacks.MegatronCommOverlapCallback.tp_comm_overlap": False}],
    "torchtitan-0.2": [
        {},
        {"parallelism.pipeline_parallel_degree": 4},
        {"parallelism.pipeline_parallel_degree": 4, "parallelism.pipeline_parallel_schedule": "Interleaved1F1B"},
        {"compile.enable": True},
        {"parallelism.pipeline_parallel_degree": 2, "parallelism.tensor_parallel_degree": 2},
        {"model.name": "deepseek_v3", "model.flavor": "16B", "parallelism.expert_parallel_degree": 4},
        {"model.name": "deepseek_v3", "model.flavor": "16B", "parallelism.expert_parallel_degree": 2,
         "parallelism.pipeline_parallel_degree": 2, "parallelism.pipeline_parallel_schedule": "DualPipeV"},
        {"model.converters": ["quantize.linear.float8"]},
        {"model.converters": ["quantize.linear.mx"]},
        {"model.name": "deepseek_v3", "model.flavor": "16B", "model.converters": ["quantize.grouped_mm.float8"]},
        {"model.name": "deepseek_v3", "model.flavor": "16B", "model.converters": ["quantize.grouped_mm.mx"]},
        {"activation_checkpoint.mode": "selective"},
        {"lr_scheduler.decay_type": "cosine", "lr_scheduler.warmup_steps": 10},
    ],
    "torchtitan": [
        {},
        {"parallelism.pipeline_parallel_degree": 4},
        {"parallelism.pipeline_parallel_degree": 4, "parallelism.pipeline_parallel_schedule": "Interleaved1F1B"},
        {"compile.enable": True},
        {"parallelism.pipeline_parallel_degree": 2, "parallelism.tensor_parallel_degree": 2},
    ],
    "nanotron": [
        {},
        {"parallelism.dp": 1, "parallelism.tp": 4, "parallelism.pp": 2},
        {"optimizer.learning_rate_scheduler.learning_rate": 1e-4,
         "optimizer.learning_rate_scheduler.lr_decay_style": "cosine",
         "optimizer.learning_rate_scheduler.lr_warmup_steps": 2},
    ],
    "torchtune": [
        {},
        {"recipe": "lora_finetune_distributed", "model._component_": "torchtune.models.llama3_1.lora_llama3_1_8b",
         "model.lora_attn_modules": ["q_proj", "v_proj"], "enable_activation_checkpointing": True,
         "lr_scheduler._component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"},
        {"recipe": "full_dpo_distributed", "loss._component_": "torchtune.rlhf.loss.DPOLoss"},
        {"ac_mode": "selective", "max_steps_per_epoch": 10},
    ],
}  # fmt: skip

VALUES: dict[str, tuple[Any, ...]] = {
    "model._component_": ("torchtune.models.llama3.llama3_70b", "torchtune.models.llama3_1.lora_llama3_1_70b"),
    "dataset._component_": ("torchtune.datasets.text_completion_dataset",),
    "optimizer._component_": ("bitsandbytes.optim.AdamW8bit",),
    "loss._component_": ("torch.nn.CrossEntropyLoss",),
    "lr_scheduler._component_": ("other",),
    "tensor_parallel_plan._component_": ("other",),
    "recipe": ("full_finetune_single_device", "full_dpo_distributed"),
    "dtype": ("fp32", "float32", "bfloat16"),
    "custom_sharded_layers": (["tok_embeddings", "output"],),
    "lora_attn_modules": (["k_proj"],),
    "ac_mode": ("full",),
    "fsdp_auto_wrap_policy": ("SIZE_BASED_WRAP", "NO_WRAP"),
    "auto_wrap_policy": ("SIZE_BASED_WRAP", "NO_WRAP"),
    "attention_backend": ("unfused", "fused", "local"),
    "attn_implementation": ("eager", "flash_attention_3"),
    "attn_impl": ("eager", "flash_attention_3"),
    "torch_dtype": ("float32", "float16"),
    "tuner_type": ("lora", "full"),
    "rlhf_type": ("dpo", "kto"),
    "loss_scale": ("all", "hermes"),
    "bnb_4bit_use_double_quant": (False,),
    "truncation_strategy": ("right",),
    "target_modules": (["q_proj"],),
    "target_regex": (".*q_proj",),
    "target_parameters": (["mlp.experts.down_proj"],),
    "dataset": (["other.jsonl"],),
    "betas": ([0.8, 0.9],),
    "components": (["model"], ["loss"]),
    "cp_comm_type": ("a2a", "allgather"),
    "cuda_graph_impl": ("local", "transformer_engine"),
    "expert_tensor_parallel_size": (1,),
    "moe_router_group_topk": (1,),
    "converters": (["quantize.linear.float8"],),
    "filter_fqns": (["output", "wq"], ["layers.0"]),
    "flash_attn": ("disabled", "sdpa", "fa2"),
    "fqns": (["experts"],),
    "lr_scheduler": ("constant",),
    "pipeline_parallel_schedule": ("GPipe", "Interleaved1F1B"),
    "recipe_name": ("rowwise", "mxfp4_cutlass"),
    "chat_template": ("chatml",),
    "chat_template_path": ("other/tokenizer",),
    "cuda_graph_scope": ("attn",),
    "data_parallel_sharding_strategy": ("optim", "optim_grads", "optim_grads_params"),
    "dataset_text_field": ("other",),
    "datasets": ([{"path": "other", "type": "completion"}],),
    "decay_type": ("linear", "cosine", "sqrt"),
    "decoder_first_pipeline_num_layers": (5,),
    "decoder_last_pipeline_num_layers": (5,),
    "deepspeed.bf16.enabled": (False,),
    "device": ("cpu",),
    "distributed_type": ("MULTI_GPU", "DEEPSPEED", "NO"),
    "double_quantization": (False,),
    "dp_shard_size": (4, 2),
    "dynamo_backend": ("INDUCTOR",),
    "excess_length_strategy": ("truncate",),
    "exp_avg_dtype": ("bf16", "fp8"),
    "exp_avg_sq_dtype": ("bf16", "fp8"),
    "finetuning_type": ("lora", "freeze"),
    "flavor": ("70B", "236B"),
    "fp8_recipe": ("delayed", "tensorwise", "blockwise", "mxfp8"),
    "freeze_trainable_modules": ("mlp",),
    "fsdp_reshard_after_forward": ("never", "always"),
    "grad_accum_dtype": ("fp32",),
    "grad_reduce_in_fp32": (True, False),
    "gradient_accumulation_fusion": (False,),
    "hidden_act": ("gelu",),
    "hidden_size": (1024,),
    "implementation": ("for-loop", "foreach"),
    "intermediate_size": (4096,),
    "lora_target": ("q_proj",),
    "lora_target_modules": (["q_proj"],),
    "loss_type": ("dft",),
    "lr_decay_starting_step": (5,),
    "lr_decay_style": ("constant", "linear", "WSD"),
    "lr_scheduler_type": ("constant", "cosine_with_min_lr"),
    "main_grads_dtype": ("bf16",),
    "main_params_dtype": ("fp16",),
    "mixed_precision_param": ("float32",),
    "mode": ("none", "full", "selective", "memory_budget"),
    "model_name_or_path": ("Qwen/Qwen3-8B",),
    "base_model": ("Qwen/Qwen3-8B",),
    "moe_layer_freq": ("2", "[0]*4+[1]*28"),
    "moe_router_load_balancing_type": ("sinkhorn", "none"),
    "moe_router_score_function": ("sigmoid",),
    "moe_token_dispatcher_type": ("alltoall", "flex"),
    "name": ("qwen3", "AdamW", "SGD"),
    "normalization": ("RMSNorm",),
    "num_layers_per_virtual_pipeline_stage": (2,),
    "offload_optimizer_device": ("cpu",),
    "offload_param_device": ("cpu",),
    "optim": ("sgd", "adamw_bnb_8bit"),
    "optimizer": ("sgd", "adamw_bnb_8bit", "muon"),
    "overlap_p2p_comm": (False, True),
    "packing_strategy": ("wrapped",),
    "pad_to_sequence_len": (False,),
    "pipeline_parallel_layers_per_stage": (3,),
    "pipeline_model_parallel_layout": ("Et*8|t*8|t*8|t*8L",),
    "position_embedding_type": ("rope", "none"),
    "pp_engine": ("1f1b",),
    "pref_loss": ("orpo", "simpo", "kto_pair"),
    "rampup_batch_size": ("8 8 1000",),
    "recompute_granularity": ("full", "selective"),
    "recompute_method": ("block", "uniform"),
    "recompute_modules": (["mlp"], ["moe"], ["mla_up_proj"]),
    "rl": ("dpo", "orpo"),
    "selective_ac_option": ("2", "op"),
    "share_embeddings_and_output_weights": (False,),
    "stage": ("dpo", "pt", 3),
    "template": ("qwen3",),
    "tp_mode": ("REDUCE_SCATTER",),
    "transformer_impl": ("local",),
    "truncation_mode": ("keep_end",),
    "type": ("Adam", "SGD"),
    "zero_stage": (3, 1),
}

SWITCHES = frozenset({
    "accelerate.distributed_type", "bf16", "chat_template_jinja", "dataset_text_field", "datasets", "deepspeed",
    "deepspeed.optimizer.type", "deepspeed.zero_optimization.stage", "finetuning_type", "fsdp", "fsdp_version",
    "activation_checkpoint.mode", "completion_only_loss", "loss_type", "parallelism.data_parallel_replicate_degree",
    "load_in_4bit", "model.dtype", "packing", "parallelism.tensor_parallel_degree", "rl",
    "tuner_type", "rlhf_type", "quant_method", "use_chat_template",
    "stage", "training.dtype", "use_peft", "recipe", "ac_mode", "lr_scheduler._component_",
})  # fmt: skip

OVERRIDDEN = {  # pairs of keys, or a key and a section: the software reads the second first, and then not the first
    ("model.config.tp_comm_overlap", "callbacks.MegatronCommOverlapCallback"): "the callback sets the model's field",
    ("tf32", "fp16"): "matmuls are in fp16",
    ("tf32", "bf16"): "matmuls are in bf16",
    ("checkpoint_activations", "recompute_activations"): "an old script's; arguments.py sets the granularity",
    ("checkpoint_activations", "recompute_granularity"): "an old script's, and now an error",
    ("recompute_granularity", "recompute_activations"): "arguments.py sets the granularity",
    ("openai_gelu", "squared_relu"): "megatron/training/argument_utils.py sets squared_relu's function last",
    ("no_position_embedding", "position_embedding_type"): "it leaves out learned positions alone",
    ("moe_router_pre_softmax", "moe_router_score_function"): "it orders top-k and softmax, which sigmoid does not have",
    ("mixed_precision_param", "converters"): "the recipe of fp8 says what is gathered",
    ("use_bnb_nested_quant", "load_in_8bit"): "trl/trainer/utils.py: of weights in 4 bits alone",
    ("cosine_min_lr_ratio", "lr_scheduler"): "axolotl/core/trainers/mixins/scheduler.py: of the cosine alone",
}
WITHOUT_EFFECT_IN_MEGATRON = {
    "account_for_loss_in_pipeline_split": "needs layers that divide with it alone: tests/interop/test_megatron.py",
    "account_for_embedding_in_pipeline_split": "as that of the loss",
    "accumulate_allreduce_grads_in_fp32": "bf16 always has it",
    "add_bias_linear": "is the default; disable_bias_linear acts",
    "async_tensor_model_parallel_allreduce": "is the default; its negation acts",
    "bf16": "in the base config",
    "moe_grouped_gemm": "is what is counted",
    "moe_router_force_load_balancing": "is what is counted",
    "padded_vocab_size": "acts where vocab_size is not set",
    "tokenizer_model": "acts where vocab_size is not set",
    "tokenizer_type": "acts where vocab_size is not set",
    "use_precision_aware_optimizer": "acts with the types of states, which act",
}

WITHOUT_EFFECT: dict[str, Mapping[str, str]] = {
    "accelerate": {
        "accelerate.deepspeed_config.deepspeed_config_file": "a file, whose keys act",
        "accelerate.mixed_precision": "TrainingArguments' bf16 goes before it",
        "accelerate.num_processes": "another number than that of --gpus is an error",
    },
    "deepspeed": {"deepspeed.torch_autocast.dtype": "acts with torch_autocast.enabled, which is an error"},
    "llamafactory": {"dataset_dir": "the folder of data sets, which act"},
    "ms-swift": {
        "padding_free": "samples are one by one, or packed, which has it on",
    },
    "megatron": WITHOUT_EFFECT_IN_MEGATRON,
    "bridge": {
        field: reason
        for key, reason in WITHOUT_EFFECT_IN_MEGATRON.items()
        for field in (*to_bridge({key: True}), f"ddp.{key}", f"mixed_precision.{key}", f"tokenizer.{key}")
    },
    "nemo": {
        f"{section}.{key}": reason
        for key, reason in WITHOUT_EFFECT_IN_MEGATRON.items()
        for section in ("model.config", "trainer.strategy", "optim.config")
    },
    "torchtitan": {"debug.moe_force_load_balance": "balanced experts are what is counted"},
    "torchtune": {"dataset.packed": "is what is counted; its default is named"},
    "torchtitan-0.2": {
        "activation_checkpoint.memory_budget": "acts in mode memory_budget, which is an error",
        "debug.moe_force_load_balance": "balanced experts are what is counted",
    },
}

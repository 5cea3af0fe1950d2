"""Every key of a software's own list is translated, approximated, an error or harmless; the errors name the keys."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from fivefold.adapter import Adapter
from fivefold.errors import UserError
from fivefold.interop.keys import Table, Values
from fivefold.interop.registry import FORMATS
from fivefold.requests.configs import check_keys
from tests.interop.drawn_keys import (
    SOFTWARE,
    draw_keys,
    find_fault,
    list_software_keys,
    list_translated_names,
    read_with,
)

TABLES: dict[str, Table] = {name: table for form in FORMATS for name, table in form.keys.items()}
# Of each software, keys that change memory, FLOPs, messages or time and are not modelled: by hand, not of a table.
EFFECTS: dict[str, dict[str, Any]] = {
    "axolotl": {
        "adapter": "llama-adapter", "s2_attention": True, "gptq": True, "relora": True, "relora_steps": 100,
        "unsloth_lora_mlp": True, "load_in_8bit": True, "layer_offloading": True, "activation_offloading": "disk",
        "gradient_checkpointing": "offload_disk", "fp8": True, "rl": "kto", "qat.weight_dtype": "int8",
        "tiled_mlp": True, "batch_flatten": 1,
        "unfrozen_parameters": ["lm_head.weight$[:9]"], "peft_autocast_adapter_dtype": False, "max_length": 512,
        "per_device_train_batch_size": 4, "base_model_config": "Qwen/Qwen3-8B", "use_cache": True,
        "bnb_config_kwargs.llm_int8_skip_modules": ["lm_head"], "bnb_config_kwargs.bnb_4bit_compute_dtype": "float32",
    },
    "llamafactory": {
        "finetuning_type": "oft", "quantization_bit": 8, "quantization_method": "hqq",
        "use_galore": True, "use_badam": True, "stage": "kto", "shift_attn": True, "use_unsloth_gc": True,
        "mixture_of_depths": "convert", "upcast_layernorm": True, "use_mca": True, "use_llama_pro": True,
        "use_cache": True,
    },
    "ms-swift": {
        "tuner_type": "longlora", "quant_bits": 4, "quant_method": "hqq", "use_galore": True, "freeze_vit": False,
        "tuner_backend": "unsloth", "rlhf_type": "grpo", "lisa_activated_layers": 2, "device_map": "auto",
        "freeze_parameters_ratio": 0.5, "enable_dft_loss": True, "optimizer": "muon", "task_type": "seq_cls",
        "zero_hpz_partition_size": 8, "loss_type": "sapo", "lora_bias": "all", "model_name_or_path": "Qwen/Qwen3-4B",
        "trainable_parameters": ["lm_head"], "max_memory": "20GB", "use_cache": True,
    },
    "trainer": {
        "load_in_4bit": True, "label_smoothing_factor": 0.1,
        "optim": "galore_adamw", "auto_find_batch_size": True, "neftune_noise_alpha": 5, "fsdp": "full_shard offload",
        "ddp_bucket_cap_mb": 100, "model_init_kwargs.attn": "x", "parallelism_config.tp_size": 2, "dtype": "bfloat16",
        "accelerator_config.split_batches": True, "accelerator_config": "accelerator.json", "use_cache": True,
        "config_name": "Qwen/Qwen3-8B", "bnb_4bit_compute_dtype": "float32", "sync_ref_model": True,
    },
    "trl": {
        "load_in_4bit": True, "dtype": "bfloat16", "loss_type": "dft",
        "model_init_kwargs.attn": "x", "sync_ref_model": True,
    },
    "accelerate": {
        "accelerate.distributed_type": "MEGATRON_LM",
        "accelerate.megatron_lm_config.megatron_lm_tp_degree": 2, "accelerate.fsdp_config.fsdp_forward_prefetch": True,
        "accelerate.fsdp_config.fsdp_ignored_modules": "x",
        "accelerate.fsdp_config.fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer,Embedding",
    },
    "deepspeed": {
        "deepspeed.zero_optimization.offload_param.device": "nvme", "deepspeed.amp.enabled": True,
        "deepspeed.zero_optimization.allgather_bucket_size": 1000, "deepspeed.curriculum_learning.enabled": True,
        "deepspeed.zero_optimization.zero_quantized_weights": True, "deepspeed.compile.deepcompile": True,
        "deepspeed.torch_autocast.enabled": True,
        "deepspeed.zero_optimization.zenflow.topk_ratio": 0.1, "deepspeed.progressive_layer_drop.enabled": True,
        "deepspeed.data_types.param_dtype": "fp32", "deepspeed.zero_optimization.reduce_scatter": False,
    },
    "megatron": {
        "lora_rank": 16, "cpu_offloading_num_layers": 2, "use_torch_fsdp2": True, "ddp_num_buckets": 8,
        "no_bias_swiglu_fusion": True, "fp16_lm_cross_entropy": True, "use_checkpoint_args": True, "spec": "mine",
        "deterministic_mode": True, "muon_num_ns_steps": 3, "hybrid_override_pattern": "M*", "encoder_num_layers": 8,
        "distributed_backend": "gloo", "retro_add_retriever": True, "use_flash_attn_triton": True,
        "no_bias_activation_fusion": True,
        "moe_layer_recompute": True, "no_scatter_gather_tensors_in_pipeline": True, "model_parallel_size": 2,
    },
    "bridge": {
        "peft": "lora", "ddp.fsdp_double_buffer": True, "model.qk_l2_norm": True,
        "model.deallocate_pipeline_outputs": False, "model.cpu_offloading": True, "model.num_moe_layers": 4,
        "optimizer.reuse_grad_buf_for_mxfp8_param_ag": True, "model.activation_func": "x.tanh",
        "model.moe_router_topk_limited_devices": 2,
        "model.param_name_patterns_for_fp32_local_accumulation": ["router"],
        "trainer.callbacks": [{"_target_": "nemo.lightning.pytorch.callbacks.MegatronTokenDropCallback"}],
    },
    "nemo": {
        "peft": "lora", "model_transform": "lora", "model.model_transform": "lora", "trainer.strategy.ddp": "pytorch",
        "trainer.strategy.fsdp": "pytorch", "trainer.strategy.use_sharp": True, "trainer.accumulate_grad_batches": 2,
        "trainer.precision": "bf16-mixed", "trainer.detect_anomaly": True, "trainer.deterministic": True,
        "trainer.strategy.encoder_pipeline_model_parallel_size": 1, "model.config.attn_logit_softcapping": 50.0,
        "trainer.strategy.microbatch_group_size_per_vp_stage": 3, "model.config.window_size": [4096, 0],
        "model.config.cpu_offloading": True, "trainer.plugins.fp8_wgrad": False, "trainer.plugins": "other",
        "callbacks.MegatronTokenDropCallback.moe_expert_capacity_factor": 1.0, "new_key": 1,
        "callbacks.MegatronCommOverlapCallback.overlap_param_gather_with_optimizer_step": True,
    },
    "torchtitan-0.2": {
        "training.enable_cpu_offload": True, "optimizer.name": "Lion", "optimizer.implementation": "for-loop",
        "parallelism.disable_loss_parallel": True, "experimental.custom_import": "x", "comm.mode": "fake_backend",
        "parallelism.pipeline_parallel_schedule_csv": "x.csv", "lora.rank": 8,
        "training.mixed_precision_reduce": "bfloat16", "activation_checkpoint.mode": "memory_budget",
        "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": ["attention.wq"],
    },
    "torchtitan": {
        "training.enable_cpu_offload": True, "override": "x", "parallelism.enable_fsdp_symm_mem": True,
        "debug.batch_invariant": True, "comm.mode": "fake_backend", "new_key": 1,
        "optimizer.param_groups": ["x"], "optimizer.optimizer_factory_kwargs_by_name": {"Muon": 1},
        "optimizer.amsgrad": True, "activation_checkpoint.force_recompute_mm_shapes_by_fqns": ["attention.wq"],
    },
    "nanotron": {
        "parallelism.tp_recompute_allgather": False, "model.ddp_bucket_cap_mb": 50,
        "model.model_config.sliding_window_size": 128, "model.model_config._use_doc_masking": True, "new.key": 1,
    },
    "torchtune": {
        "optimizer_in_bwd": True, "model.apply_lora_to_output": True, "model.lora_rank": 8, "device": "cpu",
        "optimizer._component_": "torchao.optim.CPUOffloadOptimizer", "model.image_size": 560, "new_key": 1,
        "loss._component_": "torchtune.modules.loss.ForwardKLLoss", "model.num_layers": 2, "loss.beta": 0.1,
        "collate_fn": "torchtune.data.padded_collate_tiled_images_and_mask", "ac_mode": "other",
        "resize_token_embeddings": True,
    },
}  # fmt: skip
# Keys that are read as the nearest setting that is counted.
VARIANTS: dict[str, dict[str, Any]] = {
    "axolotl": {"group_by_length": True, "cosine_constant_lr_ratio": 0.8, "lr_scheduler": "one_cycle"},
    "llamafactory": {"moe_aux_loss_coef": 0.01, "enable_torch_profiler": True, "lr_scheduler_type": "polynomial"},
    "ms-swift": {
        "group_by_length": True, "external_plugins": ["plugin.py"], "use_logits_to_keep": True,
        "new_special_tokens": ["<x>"], "enable_channel_loss": True,
    },
    "trainer": {
        "group_by_length": True, "train_sampling_strategy": "group_by_length", "router_aux_loss_coef": 0.01,
        "lr_scheduler_type": "cosine_with_restarts",
    },
    "trl": {"train_sampling_strategy": "group_by_length", "router_aux_loss_coef": 0.01},
    "accelerate": {"accelerate.deepspeed_config.deepspeed_moe_layer_cls_names": "MixtralSparseMoeBlock"},
    "deepspeed": {"deepspeed.flops_profiler.enabled": True, "deepspeed.comms_logger.enabled": True},
    "megatron": {"timing_log_level": 2, "vocab_extra_ids": 100, "deepspeed_config": "ds.json"},
    "bridge": {
        "model.disable_parameter_transpose_cache": True, "model.fused_single_qkv_rope": True,
        "model.memory_efficient_layer_norm": True, "model.batch_p2p_sync": False,
        "ddp.fsdp_all_gather_in_start_param_sync": False,
    },
    "nemo": {
        "trainer.strategy.megatron_log_level": 2, "data.create_attention_mask": True, "trainer.profiler": "simple",
        "trainer.strategy.nccl_communicator_config_path": "nccl.yaml", "data.packed_sequence_specs": "specs",
        "optim.lr_scheduler": {"_target_": "nemo.lightning.pytorch.optim.lr_scheduler.SquareAnnealingScheduler"},
    },
    "torchtitan-0.2": {"activation_checkpoint.debug": True},
    "torchtitan": {"activation_checkpoint.debug": True, "loss.num_chunks": 16},
    "nanotron": {"general.ignore_sanity_checks": False},
    "torchtune": {
        "dataset.packed": False, "optimizer.fused": False, "optimizer._component_": "bitsandbytes.optim.PagedAdamW8bit",
        "custom_sharded_layers": ["output"], "profiler.enabled": True, "clip_grad_norm": "inf",
        "loss.num_output_chunks": 16, "cudnn_deterministic_mode": True,
    },
}  # fmt: skip


def test_the_keys_of_every_format_are_tested() -> None:
    assert set(TABLES) == set(SOFTWARE) == set(EFFECTS) == set(VARIANTS)


@pytest.mark.parametrize("name", SOFTWARE)
def test_every_key_of_the_softwares_own_list_is_known(name: str) -> None:
    values = Values(TABLES[name], {}, origin="", software=name)
    own = list_software_keys(name)
    assert len(own) > 50
    assert [key for key in own if not any(map(values.find_key, list_translated_names(key)))] == []


@pytest.mark.parametrize("name", SOFTWARE)
def test_a_key_with_an_effect_is_an_error_unless_it_is_ignored(name: str, tmp_path: Path) -> None:
    base = read_with(name, {}, tmp_path)
    assert (base.not_understood, base.missing) == ((), ())
    for key, value in EFFECTS[name].items():
        reading = read_with(name, {key: value}, tmp_path)
        names = list_translated_names(key)
        with pytest.raises(UserError, match="--ignore") as error:
            check_keys(reading)
        named = [said.key for said in reading.not_understood]
        assert names & set(named), f"{key}: {named}"
        assert all(item in str(error.value) for item in named), key
        assert "\n" not in str(error.value)
        notes = check_keys(reading, ignore=named)
        assert [said.key for said in notes.ignored] == named


@pytest.mark.parametrize("name", SOFTWARE)
def test_a_model_variant_is_reported_without_an_error(name: str, tmp_path: Path) -> None:
    for key, value in VARIANTS[name].items():
        reading = read_with(name, {key: value}, tmp_path)
        assert list_translated_names(key) & {said.key for said in reading.approximated}, key
        assert reading.not_understood == (), key


@pytest.mark.parametrize("name", SOFTWARE)
def test_drawn_keys_are_each_in_one_list_of_the_reading(name: str, tmp_path: Path) -> None:
    some = random.Random(f"{name} 0")
    for number in range(4):
        keys = draw_keys(name, some, count=6)
        assert find_fault(name, keys, tmp_path) is None, (number, keys)


@pytest.mark.parametrize("name", ["axolotl", "llamafactory", "ms-swift", "trl"])
@pytest.mark.parametrize("value", [["x"], "fsdp.json", 3])
def test_options_of_fsdp_that_are_no_table_are_not_understood(name: str, value: object, tmp_path: Path) -> None:
    reading = read_with(name, {"fsdp_config": value}, tmp_path)
    assert [said.key for said in reading.not_understood] == ["fsdp_config"]


def test_keys_that_are_switched_off_are_harmless(tmp_path: Path) -> None:
    reading = read_with(
        "axolotl", {"adapter": None, "gptq": False, "load_in_4bit": "false", "output_dir": "x"}, tmp_path
    )
    assert reading.not_understood == ()
    assert {"gptq", "output_dir"} <= {said.key for said in reading.harmless}
    assert "datasets" in {said.key for said in reading.understood}
    assert read_with("axolotl", {"unfrozen_parameters": []}, tmp_path).not_understood == ()


def test_llama_factory_trains_adapters_by_default(tmp_path: Path) -> None:
    reading = read_with("llamafactory", {"finetuning_type": None}, tmp_path)
    assert reading.not_understood == ()
    assert reading.job is not None
    assert reading.job.adapter == Adapter(rank=8)


def test_torchtitan_recomputes_by_operation_by_default(tmp_path: Path) -> None:
    result = read_with("torchtitan", {}, tmp_path)
    assert result.layout is not None
    assert result.layout.ac == "norm+rope+act"
    none = read_with("torchtitan", {"activation_checkpoint": None}, tmp_path)
    assert none.layout is not None
    assert (none.layout.ac, none.approximated) == ("none", ())


@pytest.mark.parametrize(
    ("name", "keys", "reason"),
    [
        ("axolotl", {"tensor_parallel_size": 0}, "tp·cp=0 must be 1 or more"),
        (
            "deepspeed",
            {"deepspeed.optimizer.type": "Adam", "deepspeed.optimizer.params.betas": 2},
            "must be two numbers",
        ),
        ("deepspeed", {"deepspeed.bf16.enabled": False}, "bf16=true, but deepspeed.bf16.enabled=false"),
        (
            "accelerate",
            {"accelerate.parallelism_config.parallelism_config_dp_shard_size": 4},
            "dp_replicate_size·dp_shard_size=1·4=4, but dp=8",
        ),
        ("nanotron", {"parallelism.tp_mode": "sharded"}, "it is ALL_REDUCE or REDUCE_SCATTER"),
        (
            "torchtitan",
            {"parallelism.pipeline_parallel_degree": 4, "parallelism.module_fqns_per_model_part": [True]},
            "must be a list of lists of module names",
        ),
        ("bridge", {"model.mtp_num_layers": 10**30}, "depth must be 4096 or less"),
        ("trainer", {"dataset_text_field": ["x"]}, "dataset_text_field must be the name of a column"),
        (
            "axolotl",
            {"datasets": [{"path": "d", "type": "completion", "field": 2}]},
            "field of datasets must be the name of a column",
        ),
        ("axolotl", {"datasets": [{"path": "d", "field_messages": ["m"]}]}, "field_messages of datasets must be"),
        ("trainer", {"warmup_steps": float("nan")}, "warmup_steps must be a number"),
        ("axolotl", {"warmup_ratio": float("inf")}, "warmup_ratio must be a number"),
        ("axolotl", {"warmup_steps": -1}, "a warm-up of -1; it must be 0 or more"),
        ("trainer", {"max_steps": 2.5}, "max_steps must be a whole number"),
        ("llamafactory", {"learning_rate": "${RATE}"}, "learning_rate must be a number"),
        ("axolotl", {"warmup_ratio": 0.1, "warmup_steps": 5}, "warmup_steps and warmup_ratio are both set; keep one"),
        ("megatron", {"fp16": True}, "bf16 and fp16 are both enabled; keep one"),
        ("megatron", {"fp4_format": "e2m1", "fp8_format": "hybrid"}, "fp4_format and fp8_format are both enabled"),
        ("torchtitan", {"lr_scheduler.decay_ratio": -0.5}, "it must be 0 or more"),
        (
            "torchtitan",
            {"parallelism.pipeline_parallel_degree": 4, "parallelism.pipeline_parallel_layers_per_stage": 0.5},
            "pipeline_parallel_layers_per_stage must be a whole number",
        ),
        ("axolotl", {"micro_batch_size": "auto"}, "per_device_train_batch_size must be a number"),
    ],
)
def test_an_impossible_value_is_a_one_line_error(name: str, keys: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=reason) as error:
        read_with(name, keys, tmp_path)
    assert "\n" not in str(error.value)


def test_the_length_of_generated_text_is_no_sequence_length(tmp_path: Path) -> None:
    base, result = (read_with("llamafactory", keys, tmp_path) for keys in ({}, {"max_length": 512}))
    assert result.job == base.job is not None
    assert "max_length" in {said.key for said in result.harmless}


@pytest.mark.parametrize(
    ("name", "keys", "key"),
    [
        ("axolotl", {"adapter": "lora", "peft_layer_replication": [[0, 4]]}, "peft_layer_replication"),
        ("axolotl", {"adapter": "lora", "lora_rank_pattern": {"layers.3.self_attn.q_proj": 64}}, "q_proj"),
        ("axolotl", {"adapter": "lora", "lora_alpha_pattern": {"dense": 64}}, "dense"),
        ("axolotl", {"rl": "dpo", "dpo_use_liger_kernel": True}, "dpo_use_liger_kernel"),
        ("axolotl", {"rl": "dpo", "dpo_use_weighting": True}, "dpo_use_weighting"),
        ("axolotl", {"rl": "dpo", "dpo_use_logits_to_keep": True}, "dpo_use_logits_to_keep"),
        ("axolotl", {"rl": "dpo", "dpo_norm_loss": True}, "dpo_norm_loss"),
        ("axolotl", {"rl": "dpo", "dpo_padding_free": True}, "dpo_padding_free"),
        ("axolotl", {"rl": "dpo", "dpo_loss_type": ["sigmoid", "sft"]}, "dpo_loss_type"),
        ("axolotl", {"rl": "dpo", "precompute_ref_log_probs": True}, "precompute_ref_log_probs"),
        ("trainer", {"loss_type": "sigmoid", "precompute_ref_log_probs": True}, "precompute_ref_log_probs"),
        ("trainer", {"loss_type": "sigmoid", "use_weighting": True}, "use_weighting"),
        ("llamafactory", {"stage": "dpo", "ref_model": "Qwen/Qwen3-8B"}, "ref_model"),
        ("llamafactory", {"stage": "dpo", "ref_model_quantization_bit": 4}, "ref_model_quantization_bit"),
        (
            "torchtitan",
            {"training.dtype": "bfloat16", "training.mixed_precision_param": "float32"},
            "mixed_precision_param",
        ),
        ("torchtitan-0.2", {"training.dtype": "bfloat16", "model.converters": ["quantize.linear.float8"]}, "dtype"),
        (
            "torchtitan-0.2",
            {"model.converters": ["quantize.linear.mx"], "quantize.linear.mx.recipe_name": "mxfp4_cutlass"},
            "recipe_name",
        ),
        (
            "accelerate",
            {"accelerate.fsdp_config.fsdp_version": 1, "accelerate.fsdp_config.fsdp_reshard_after_forward": False},
            "fsdp_reshard_after_forward",
        ),
        ("bridge", {"model.bf16": False, "model.fp16": True, "model.fp8": "hybrid"}, "fp16"),
    ],
)
def test_a_key_that_acts_only_with_another_key_is_an_error(
    name: str, keys: dict[str, Any], key: str, tmp_path: Path
) -> None:
    assert key in {said.key.rpartition(".")[2] for said in read_with(name, keys, tmp_path).not_understood}


def test_a_number_without_a_value_is_its_default(tmp_path: Path) -> None:
    parallel = "accelerate.parallelism_config.parallelism_config_"
    keys = {f"{parallel}{name}_size": None for name in ("dp_replicate", "tp", "cp", "sp")}
    result, base = read_with("accelerate", keys, tmp_path), read_with("accelerate", {}, tmp_path)
    assert result.layout == base.layout is not None


@pytest.mark.parametrize("fused", [True, False])
def test_negated_flag_is_accepted_without_no(fused: bool, tmp_path: Path) -> None:
    reading = read_with("bridge", {"model.gradient_accumulation_fusion": fused}, tmp_path)
    assert reading.job is not None
    assert reading.job.stack.wgrad_accumulation.startswith("fused") is fused


@pytest.mark.parametrize(
    ("name", "keys", "rate"),
    [
        ("trainer", {"max_steps": 200, "warmup_ratio": 0.101}, ("wsd", 0.0, 21)),
        ("trainer", {"max_steps": 200, "warmup_steps": 0.101}, ("wsd", 0.0, 21)),
        ("llamafactory", {"max_steps": 200, "warmup_ratio": 0.05}, ("wsd", 0.0, 10)),
        ("axolotl", {"max_steps": 200}, ("cosine", 0.0, 6)),
        ("axolotl", {"max_steps": 50}, ("cosine", 0.0, 2)),
        ("axolotl", {"max_steps": 200, "warmup_steps": 0, "cosine_min_lr_ratio": 0.1}, ("cosine", 0.1, 0)),
        ("axolotl", {"max_steps": 200, "warmup_ratio": 0.109}, ("cosine", 0.0, 21)),
        ("torchtitan", {"lr_scheduler.decay_type": "cosine", "lr_scheduler.decay_ratio": 2.0}, ("cosine", 0.0, 200)),
        ("torchtitan", {"lr_scheduler.decay_ratio": 0.0}, ("constant", 1.0, 200)),
    ],
)
def test_warm_up_and_minimum_of_the_learning_rate_are_read(
    name: str, keys: dict[str, Any], rate: tuple[str, float, int], tmp_path: Path
) -> None:
    job = read_with(name, keys, tmp_path).job
    assert job is not None
    read_rate = job.learning_rate
    assert (read_rate.kind, read_rate.floor, read_rate.warmup_steps) == rate


@pytest.mark.parametrize(
    ("name", "keys", "key"),
    [
        ("torchtitan", {"lr_scheduler.decay_type": "cosine", "lr_scheduler.decay_ratio": 0.5}, "decay_type"),
        ("torchtitan-0.2", {"lr_scheduler.decay_type": "sqrt"}, "decay_type"),
        ("axolotl", {"pad_to_sequence_len": False}, "pad_to_sequence_len"),
    ],
)
def test_a_value_read_as_a_similar_one_is_reported(name: str, keys: dict[str, Any], key: str, tmp_path: Path) -> None:
    assert key in {said.key.rpartition(".")[2] for said in read_with(name, keys, tmp_path).approximated}


def test_a_decay_ends_with_the_run(tmp_path: Path) -> None:
    keys = {"training.steps": 1000, "lr_scheduler.decay_ratio": 2.0, "lr_scheduler.warmup_steps": 100}
    job = read_with("torchtitan", keys, tmp_path).job
    assert job is not None
    assert (job.learning_rate.kind, job.learning_rate.decay_steps) == ("wsd", 900)


@pytest.mark.parametrize(
    ("keys", "is_named"),
    [
        ({"seq_length": 32768, "max_position_embeddings": 32768}, True),
        ({"seq_length": 8192, "max_position_embeddings": 8192}, False),
        (
            {"seq_length": 32768, "max_position_embeddings": 32768, "no_create_attention_mask_in_dataloader": True},
            False,
        ),
    ],
)
def test_the_attention_mask_of_megatrons_data_loader_is_reported(
    keys: dict[str, Any], is_named: bool, tmp_path: Path
) -> None:
    named = {said.key: said.means for said in read_with("megatron", keys, tmp_path).approximated}
    assert ("no_create_attention_mask_in_dataloader" in named) is is_named
    assert not is_named or "1 GiB" in named["no_create_attention_mask_in_dataloader"]


def test_recompute_activations_replaces_the_granularity(tmp_path: Path) -> None:
    keys = {"recompute_granularity": "full", "recompute_activations": True}
    results = [read_with("megatron", given, tmp_path) for given in (keys, {"recompute_granularity": "selective"})]
    assert results[0].layout == results[1].layout is not None


def test_the_overlap_of_a_nemo_callback_is_read(tmp_path: Path) -> None:
    callbacks = [
        {"_target_": "nemo.utils.exp_manager.TimingCallback"},
        {"_target_": "nemo.lightning.pytorch.callbacks.megatron_comm_overlap.MegatronCommOverlapCallback",
         "tp_comm_overlap": True},
    ]  # fmt: skip
    keys = {"model.tensor_model_parallel_size": 2, "model.sequence_parallel": True}
    base, overlapped = (read_with("bridge", keys | more, tmp_path) for more in ({}, {"trainer.callbacks": callbacks}))
    assert base.job is not None
    assert overlapped.job is not None
    assert overlapped.not_understood == ()
    assert "tp" in overlapped.job.stack.overlap
    assert "tp" not in base.job.stack.overlap


@pytest.mark.parametrize(
    ("name", "keys", "same"),
    [
        ("trainer", {"max_steps": 4.0}, {"max_steps": 4}),
        ("trainer", {"learning_rate": "2e-5", "bf16": "true"}, {"learning_rate": 2e-5, "bf16": True}),
        ("axolotl", {"fsdp_version": "false"}, {"fsdp_version": False}),
        ("axolotl", {"warmup_steps": "null", "max_steps": 200}, {"max_steps": 200}),
        ("deepspeed", {"deepspeed.gradient_clipping": "auto"}, {}),
        (
            "torchtitan",
            {"parallelism.enable_sequence_parallel": None},
            {"parallelism.enable_sequence_parallel": False},
        ),
    ],
)
def test_another_spelling_of_a_value_is_read_equally(
    name: str, keys: dict[str, Any], same: dict[str, Any], tmp_path: Path
) -> None:
    results = [read_with(name, given, tmp_path) for given in (keys, same)]
    assert results[0].layout == results[1].layout
    assert results[0].job == results[1].job is not None


def test_a_size_without_a_value_is_missing(tmp_path: Path) -> None:
    result = read_with("nanotron", {"model.model_config.num_hidden_layers": None}, tmp_path)
    assert any("num_hidden_layers" in missing for missing in result.missing)


@pytest.mark.parametrize("keys", [{"dataset_text_field": "text"}, {"packing_strategy": "bfd", "packing": True}])
def test_a_config_with_keys_of_trl_has_its_defaults_without_a_launch_line(keys: dict[str, Any], tmp_path: Path) -> None:
    plain, ours, launched = (read_with(name, more, tmp_path) for name, more in _list_readings(keys))
    assert (plain.layout.ac, ours.layout.ac, launched.layout.ac) == ("none", "full", "full")
    assert ours.job == launched.job
    assert "(software)" in {item.key for item in ours.approximated}
    off = read_with("trainer", {**keys, "gradient_checkpointing": False}, tmp_path)
    assert off.layout.ac == "none"


def _list_readings(keys: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [("trainer", {}), ("trainer", keys), ("trl", keys)]

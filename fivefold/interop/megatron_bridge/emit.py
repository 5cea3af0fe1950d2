"""Model, layout and job -> a ``run_config.yaml`` of Megatron-Bridge."""

from __future__ import annotations

from fivefold.interop.format import ConfigPlan, WrittenConfig
from fivefold.interop.megatron.emit import emit_arguments
from fivefold.interop.megatron.keys import TABLE
from fivefold.interop.megatron_bridge.keys import BRIDGE, KEYS_OF_SECTION, NAMES, NEGATED_KEYS
from fivefold.interop.render import append_comment, format_literal
from fivefold.model.activations import ActivationName

SKIPPED = (
    "tokenizer_type",
    "swiglu",
    "squared_relu",
    "transformer_impl",
    "max_position_embeddings",
    "no_async_tensor_model_parallel_allreduce",
    "moe_enable_deepep",
)

FUNCTIONS: dict[ActivationName, str] = {
    "silu": "torch.nn.functional.silu",
    "gelu": "torch.nn.functional.gelu",
    "gelu_tanh": "torch.nn.functional.gelu",  # with openai_gelu
    "relu2": "megatron.core.activations.squared_relu",
}

TARGETS = {
    "train": "megatron.bridge.training.config.TrainingConfig",
    "optimizer": "megatron.bridge.training.config.OptimizerConfig",
    "ddp": "megatron.bridge.training.config.DistributedDataParallelConfig",
    "scheduler": "megatron.bridge.training.config.SchedulerConfig",
    "dist": "megatron.bridge.training.config.DistributedInitConfig",
    "rng": "megatron.bridge.training.config.RNGConfig",
    "dataset": "megatron.bridge.training.config.MockGPTDatasetConfig",
    "tokenizer": "megatron.bridge.training.config.TokenizerConfig",
    "checkpoint": "megatron.bridge.training.config.CheckpointConfig",
    "logger": "megatron.bridge.training.config.LoggerConfig",
}


def emit(plan: ConfigPlan) -> WrittenConfig:
    """Return a ``run_config.yaml`` of Megatron-Bridge."""
    model, given = plan.model, emit_arguments(plan, full=True)
    if model.mla:
        given["q_lora_rank"] = model.mla.q_rank  # null, unlike a key that is missing, leaves queries as they are
        given.setdefault("rotary_scaling_factor", 1.0)  # without YaRN
        if (yarn := model.rope_scaling) and yarn.kind == "yarn":  # no arguments, but fields of MLATransformerConfig
            given["original_max_position_embeddings"] = yarn.original_positions
            given |= {"beta_fast": yarn.beta_fast, "beta_slow": yarn.beta_slow}
    overlaps_p2p = plan.layout.v > 1 and not given["no_overlap_p2p_communication"]
    given["no_overlap_p2p_communication"] = not overlaps_p2p  # Megatron-Core has none without virtual stages
    field_names = {
        their_name: our_name
        for our_name, their_name in NAMES.items()
        if their_name not in ("seq_length", "train_iters")
    }
    negated_fields = {their_name: our_name for our_name, their_name in NEGATED_KEYS.items()}
    sections: dict[str, list[str]] = {"model": []}
    grouped = given.pop("group_query_attention", False)
    for name, value in given.items():
        if name in SKIPPED or (name == "num_query_groups" and not grouped):
            continue
        field, field_value = (
            (negated_fields[name], not value) if name in negated_fields else (field_names.get(name, name), value)
        )
        section = next((place for place, names in KEYS_OF_SECTION.items() if field in names), "model")
        means = TABLE[name].means if name in TABLE else ""
        sections.setdefault(section, []).append(append_comment(f"  {field}: {format_literal(field_value)}", means))
    if overlaps_p2p:
        sections["model"].append("  batch_p2p_comm: false  # the default, true, is an error with overlap_p2p_comm")
    gated = model.mlp == "gated"
    is_fp32 = not (given.get("bf16") or given.get("fp16"))
    dtype = "torch.float32" if is_fp32 else "torch.float16" if given.get("fp16") else "torch.bfloat16"
    sections["model"].append(f"  gated_linear_unit: {format_literal(gated)}")
    if model.activation in FUNCTIONS:  # if it is missing, reading the file back names the difference
        sections["model"] += _build_function("activation_func", FUNCTIONS[model.activation])
    sections["model"] += [*_build_function("params_dtype", dtype), *_build_function("pipeline_dtype", dtype)]
    sections["model"] += [f"  {name}: true" for name in ("bf16", "fp16") if given.get(name)]
    sections["optimizer"] += _build_function("params_dtype", dtype)
    sections["ddp"].append(f"  use_distributed_optimizer: {format_literal(bool(given['use_distributed_optimizer']))}")
    return WrittenConfig({"run_config.yaml": _build_file(plan, sections)})


def _build_function(name: str, target: str) -> list[str]:
    return [f"  {name}:", f"    _target_: {target}", "    _call_: false"]


def _build_file(plan: ConfigPlan, sections: dict[str, list[str]]) -> str:
    """Return the YAML of a ConfigContainer with these sections."""
    model, job = plan.model, plan.job
    provider = "MLAModelProvider" if model.mla else "GPTModelProvider"
    module = "megatron.bridge.models.mla_provider" if model.mla else "megatron.bridge.models.gpt_provider"
    sections["dataset"] = [
        f"  seq_length: {job.sequence}",
        f"  random_seed: {job.seed or TABLE['seed'].default}",
        "  reset_position_ids: false",
        "  reset_attention_mask: false",
        "  eod_mask_loss: false",
        "  dataloader_type: single",
    ]
    sections["tokenizer"] = ["  tokenizer_type: NullTokenizer  # put yours", f"  vocab_size: {model.vocab}"]
    sections["checkpoint"] = ["  save: ./checkpoints", "  save_interval: 1000"]
    sections["logger"] = ["  log_interval: 10"]
    nodes, gpus_per_node = plan.hosts
    lines = [
        f"# Megatron-Bridge {BRIDGE}: {model.name}, {plan.layout}",
        f"# Start: torchrun --nnodes {nodes} --nproc_per_node {gpus_per_node} train.py, where train.py calls",
        "#   megatron.bridge.training.pretrain.pretrain(ConfigContainer.from_yaml('run_config.yaml'), forward_step)",
        "_target_: megatron.bridge.training.config.ConfigContainer",
    ]
    for section, rows in sections.items():
        target = f"{module}.{provider}" if section == "model" else TARGETS[section]
        lines += [f"{section}:", f"  _target_: {target}", *rows]
    return "\n".join(lines) + "\n"

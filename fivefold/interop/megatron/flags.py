"""Other names of Megatron's arguments."""

from __future__ import annotations

from typing import Any

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
NEGATED = {  # as an ``args`` of a checkpoint has them: what the flag turns off
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


def named(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments by their names in ``args``: no dashes, no aliases, nothing negated."""
    found: dict[str, Any] = {}
    for key, value in given.items():
        name = key if key.startswith("env.") else key.rpartition(".")[2].lstrip("-").replace("-", "_")
        name = ALIAS.get(name, name)
        if name in NEGATED and isinstance(value, bool):
            name, value = NEGATED[name], not value
        if name in ("position_embedding_type", "cp_comm_type") and isinstance(value, list) and len(value) == 1:
            value = value[0]
        found[name] = value
    return found

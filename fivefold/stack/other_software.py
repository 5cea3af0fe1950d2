"""Further frameworks: DeepSpeed with Hugging Face models, nanotron, InternEvo, PaddleNLP."""

from __future__ import annotations

from fivefold.stack.entry import Fact, StackEntry
from fivefold.stack.pytorch import ACTIVATION_OFFLOADING, TRAINER_OPTIMIZERS

ENGINE = "deepspeedai/DeepSpeed@03f6f75:deepspeed/runtime/pipe/engine.py"
ZERO_CONFIG = "deepspeedai/DeepSpeed@1b88ac3:deepspeed/runtime/zero/config.py"
ZERO_3 = "deepspeedai/DeepSpeed@0.19.8:deepspeed/runtime/zero/partitioned_param_coordinator.py"
STAGE_3 = "deepspeedai/DeepSpeed@0.19.8:deepspeed/runtime/zero/stage3.py"
ZERO_1_2 = "deepspeedai/DeepSpeed@0.19.8:deepspeed/runtime/zero/stage_1_and_2.py"
NANOTRON_REPOSITORY = "huggingface/nanotron"
INTERNEVO_REPOSITORY = "InternLM/InternEvo@c628a8c"
PADDLE_REPOSITORY = "PaddlePaddle/PaddleNLP"
INTERNEVO_CONFIG = "InternLM/InternEvo@00de613:configs/7B_sft.py"

DEEPSPEED = StackEntry(
    name="deepspeed",
    version="03f6f75",
    family="deepspeed",
    facts={
        "attention": Fact(
            "flash2",
            "huggingface/transformers@68c570d:docs/source/en/attention_interface.md: sdpa unless asked for another",
        ),
        "loss": Fact("plain", "huggingface/transformers@0114da0:src/transformers/loss/loss_utils.py, ForCausalLMLoss"),
        "kernels": Fact("plain", "huggingface/transformers: models are PyTorch's modules"),
        "linears": Fact("separate", "PyTorch: torch.nn.Linear, each a node of autograd"),
        "early_stop": Fact(False, f"{ENGINE}: use_reentrant is on"),
        "flat_copies": Fact(("gradients",), "microsoft/DeepSpeed@cde57d2:deepspeed/runtime/zero/stage_1_and_2.py"),
        "overlap": Fact(("dp",), f"{ZERO_CONFIG}: overlap_comm, on by itself under stage 3"),
        "reduce_bucket": Fact(
            500_000_000, f"{ZERO_CONFIG}: reduce_bucket_size; {ZERO_1_2}, average_tensor: all-reduced; measured"
        ),
        "reduce_dtype": Fact(
            "backward",
            "deepspeedai/DeepSpeed@0.19.8:deepspeed/runtime/engine.py, communication_data_type: that of fp16 or bf16; "
            f"{ZERO_1_2}, setup_buckets: buckets have the dtype of the weights",
        ),
        "zero3_gather": Fact("weights", f"{ZERO_3}, fetch_sub_module; measured"),
        "update_group_size": Fact(
            1_000_000_000, f"{ZERO_CONFIG}: sub_group_size; {STAGE_3}, _create_fp16_sub_groups; measured"
        ),
        "param_all_gather": Fact("before_forward", f"{ZERO_CONFIG}: allgather_partitions, at the end of each step"),
        "scatter_gather_tensors": Fact(True, f"{ENGINE}: is_pipe_partitioned"),
    },
    runs={
        "schedules": Fact(("1f1b",), f"{ENGINE}, train_batch: TrainSchedule"),
        "config_axes": Fact(
            ("dp", "cp"), "deepspeedai/DeepSpeed@0.19.8:deepspeed/runtime/config.py: a pipeline is code"
        ),
        "orders": Fact(False, "deepspeedai/DeepSpeed@0.19.8:deepspeed/utils/groups.py: sequence ranks in a row"),
        "recomputes": Fact(
            ("full",), "huggingface/transformers@5.23.0:src/transformers/modeling_layers.py, GradientCheckpointingLayer"
        ),
        "config_optimizers": TRAINER_OPTIMIZERS,
        "config_precisions": Fact(
            ("fp32", "bf16", "bf16-grad16", "fp16"),
            "deepspeedai/DeepSpeed@0.19.8:deepspeed/runtime/config.py: bf16, fp16, data_types.grad_accum_dtype",
        ),
        "pipelined_zero": Fact((0, 1), f"{ENGINE}, __init__: ZeRO-2 and ZeRO-3 are incompatible with pipelines"),
        "cp_kinds": Fact(
            ("ulysses",), "deepspeedai/DeepSpeed@3492962:deepspeed/sequence/layer.py, DistributedAttention"
        ),
        "shard_groups": Fact(False, "deepspeedai/DeepSpeed@0.19.8:deepspeed/runtime/config.py: MiCS was removed"),
        "offloads": Fact(
            ("optimizer", "activations", "parameters"),
            f"{ZERO_CONFIG}: offload_optimizer, offload_param; {ACTIVATION_OFFLOADING}",
        ),
        "optimizer_offload_zero": Fact(
            (1, 2, 3),
            "deepspeedai/DeepSpeed@0.19.8:deepspeed/runtime/engine.py, _configure_basic_optimizer: DeepSpeedCPUAdam "
            "under stage 0 too, which then finds weights on the GPU (ops/adam/cpu_adam.py, step)",
        ),
    },
)

NANOTRON = StackEntry(
    name="nanotron",
    version="19f88fb",
    family="nanotron",
    facts={
        "attention": Fact("flash2", f"{NANOTRON_REPOSITORY}@03b83fc:src/nanotron/models/llama.py: flash_attn"),
        "loss": Fact("upcast_copy", f"{NANOTRON_REPOSITORY}@00708b8:src/nanotron/parallel/tensor_parallel"),
        "kernels": Fact(
            "norms", f"{NANOTRON_REPOSITORY}@03b83fc:src/nanotron/models/llama.py: flash_attn's norms, rotary"
        ),
        "linears": Fact(
            "separate", f"{NANOTRON_REPOSITORY}@00708b8:src/nanotron/parallel/tensor_parallel/functional.py"
        ),
        "rope": Fact(
            "in_place",
            f"{NANOTRON_REPOSITORY}@03b83fc:src/nanotron/models/llama.py, CausalSelfAttention: queries of "
            "qkv_states.view().permute().contiguous(), keys and values concatenated; "
            "Dao-AILab/flash-attention@09d422b:flash_attn/layers/rotary.py, RotaryEmbedding: inplace=True",
        ),
        "merged_projections": Fact(
            True, f"{NANOTRON_REPOSITORY}@03b83fc:src/nanotron/models/llama.py: qkv_proj, gate_up_proj"
        ),
        "transposes_attention": Fact(
            True,
            f"{NANOTRON_REPOSITORY}@03b83fc:src/nanotron/models/llama.py, CausalSelfAttention: view, transpose(0, 1)",
        ),
        "early_stop": Fact(False, f"{NANOTRON_REPOSITORY}@00708b8:src/nanotron/parallel: full layers are run again"),
        "wgrad_accumulation": Fact(
            "deferred", f"{NANOTRON_REPOSITORY}@069c21c:src/nanotron/optim: gradient accumulator"
        ),
        "flat_copies": Fact(
            ("weights",), f"{NANOTRON_REPOSITORY}@069c21c:src/nanotron/distributed.py, of ZeRO-1's gather"
        ),
        "param_all_gather": Fact(
            "before_forward", f"{NANOTRON_REPOSITORY}@069c21c:src/nanotron/optim/zero.py: after the update"
        ),
        "overlap": Fact(
            ("dp",), f"{NANOTRON_REPOSITORY}@0e0a27e:scripts/scaling_benchmarks.py; stages wait for theirs"
        ),
        "async_tp": Fact(True, f"{NANOTRON_REPOSITORY}@00708b8:src/nanotron/parallel/tensor_parallel/functional.py"),
        # forward: sequence lengths from the mask (6), keys and values concatenated and transposed (2), the output
        # transposed (1); backward: 5 for these, gradient sums of 4 weights and 2 norms, and the norms' second kernels
        # (2). The 5 are inferred: 8 were counted with SiLU, of which autograd's count for a gate explains 3
        "extra_kernels": Fact(
            (9, 13),
            f"{NANOTRON_REPOSITORY}@03b83fc:src/nanotron/models/llama.py, CoreAttention, CausalSelfAttention, "
            "GLUActivation; @069c21c:src/nanotron/optim/gradient_accumulator.py, _accumulate_grad",
        ),
        "run_ahead": Fact(True, f"{NANOTRON_REPOSITORY}@00708b8: torch.distributed holds what it sends: record_stream"),
    },
    runs={
        "cp_kinds": Fact(("ring",), f"{NANOTRON_REPOSITORY}@e60dec2:src/nanotron/nn/ring_attention.py"),
        "schedules": Fact(
            ("gpipe", "1f1b"), f"{NANOTRON_REPOSITORY}@19f88fb:src/nanotron/config/parallelism_config.py, pp_engine"
        ),
        "recomputes": Fact(
            ("full",), f"{NANOTRON_REPOSITORY}@19f88fb:src/nanotron/config/parallelism_config.py, recompute_layer"
        ),
        "zero": Fact((0, 1), f"{NANOTRON_REPOSITORY}@069c21c:src/nanotron/optim/zero.py: ZeRO Stage 1"),
        "config_optimizers": Fact(("adamw",), f"{NANOTRON_REPOSITORY}@19f88fb:src/nanotron/config/config.py"),
        "config_precisions": Fact(
            ("bf16", "bf16-full", "fp32"),
            f"{NANOTRON_REPOSITORY}@19f88fb:src/nanotron/config: model.dtype, accumulate_grad_in_fp32",
        ),
        "shard_groups": Fact(False, f"{NANOTRON_REPOSITORY}@069c21c:src/nanotron/optim/zero.py: over all of dp_pg"),
        "orders": Fact(False, f"{NANOTRON_REPOSITORY}@009b8f7:src/nanotron/parallel/context.py: pp, dp, cp, tp"),
    },
)

INTERNEVO = StackEntry(
    name="internevo",
    version="c628a8c",
    family="internevo",
    facts={
        "attention": Fact("flash1", "InternLM/InternLM:doc/en/install.md: FlashAttention 1.0.5"),
        "runtime_connect": Fact(
            False, "InternLM/InternEvo@3a665e8:requirements/torch.txt: PyTorch 2.1, with NCCL 2.18"
        ),
        "loss": Fact(
            "upcast",
            f"{INTERNEVO_REPOSITORY}:internlm/core/naive_amp.py, output_to_fp32; internlm/model/losses/ce_loss.py: "
            "flash_attn's, inplace_backward",
        ),
        "linears": Fact("separate", "PyTorch: torch.nn.Linear, each a node of autograd"),
        "merged_projections": Fact(True, f"{INTERNEVO_REPOSITORY}:internlm/model: Wqkv"),
        "input_grad_all_reduces": Fact((1, 2), f"{INTERNEVO_REPOSITORY}:internlm/model/modules/mlp.py: w1 and w3"),
        "async_tp": Fact(
            True, f"{INTERNEVO_REPOSITORY}:internlm/model/utils.py, FusedDenseFunc: all_reduce_raw, async_op, before dW"
        ),
        "early_stop": Fact(False, "InternLM/InternEvo@108e1a5:internlm/solver/activation_checkpoint.py, use_reentrant"),
        "overlap": Fact(("dp",), f"{INTERNEVO_CONFIG}: overlap_sync_grad, not overlap_sync_param"),
        "param_all_gather": Fact(
            "broadcast", f"{INTERNEVO_REPOSITORY}:internlm/solver/optimizer: each owner's full tensors"
        ),
        "reduce_in_fp32": Fact(False, f"{INTERNEVO_REPOSITORY}:internlm/solver/optimizer: 16-bit gradients"),
    },
    runs={
        "schedules": Fact(("1f1b", "interleaved"), f"{INTERNEVO_CONFIG}: num_chunks of the pipeline scheduler"),
        "zero": Fact((0, 1, 3), f"{INTERNEVO_CONFIG}: zero1 parallel, or fsdp"),
    },
)

PADDLE_LLAMA = f"{PADDLE_REPOSITORY}@5dd0f5d:paddlenlp/transformers/llama/modeling.py"
PADDLE_CONFIG = f"{PADDLE_REPOSITORY}@7b0d79d:llm/llama/pretrain-llama2_7b-tp2sd4_stage2.json"
PADDLE_LAYERS = "PaddlePaddle/Paddle@009e8cf:python/paddle/distributed/fleet/layers/mpu"
PADDLE_LOSS = "PaddlePaddle/Paddle@032655e:paddle/fluid/operators/collective/c_softmax_with_cross_entropy_op.cu"
PADDLENLP = StackEntry(
    name="paddlenlp",
    version="0b246a6",
    family="paddle",
    facts={
        "attention": Fact("flash2", f"{PADDLE_CONFIG}: use_flash_attention"),
        "runtime_connect": Fact(False, f"{PADDLE_CONFIG}: of 2023, before NCCL 2.22 of June 2024"),
        "loss": Fact(
            "upcast_separate",
            f"{PADDLE_LLAMA}: LlamaForCausalLM holds logits while the cross entropy reads them as float32; "
            f"{PADDLE_LOSS}: allocates Softmax",
        ),
        "kernels": Fact("norms", f"{PADDLE_CONFIG}: use_fused_rms_norm, use_fused_rope; {PADDLE_LLAMA}: F.silu() * up"),
        "linears": Fact("separate", f"{PADDLE_LLAMA}: a ColumnParallelLinear each"),
        "input_grad_all_reduces": Fact(
            (3, 2),
            f"{PADDLE_LLAMA}: q, k and v, gate and up, as fuse_attention_qkv and fuse_attention_ffn are off; "
            f"{PADDLE_LAYERS}/mp_ops.py, c_identity_eager: each in the stream that computes",
        ),
        "column_inputs": Fact(
            "copied", "PaddlePaddle/Paddle@9ae6547:paddle/phi/kernels/impl/c_identity_kernel_impl.h: Copy"
        ),
        "early_stop": Fact(False, f"{PADDLE_LLAMA}: recompute runs full layers again"),
        "overlap": Fact((), f"{PADDLE_CONFIG}: no sharding_parallel_config, so nothing is hidden"),
        "reduce_in_fp32": Fact(False, f"{PADDLE_CONFIG}: amp_master_grad is off"),
        "param_all_gather": Fact(
            "before_forward", f"{PADDLE_CONFIG}: sharding stage2 hands out weights after the update"
        ),
    },
    runs={
        "axes": Fact(("dp", "tp", "pp"), f"{PADDLE_CONFIG}: tensor, pipeline and sharding degrees"),
        "schedules": Fact(("1f1b", "interleaved"), f"{PADDLE_CONFIG}: virtual_pp_degree"),
    },
)

ENTRIES = (DEEPSPEED, NANOTRON, INTERNEVO, PADDLENLP)

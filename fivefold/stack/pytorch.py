"""PyTorch's FSDP and trainers based on it: each layer under autograd, gradients reduced during the backward."""

from __future__ import annotations

from fivefold.stack.entry import Fact, StackEntry

FULLY_SHARD = "pytorch/pytorch@0257dd1:torch/distributed/fsdp/_fully_shard/_fully_shard.py"
STAGE = "pytorch/pytorch@cf30153:torch/distributed/pipelining/stage.py, backward_maybe_with_nosync"
PARALLELIZE = "pytorch/torchtitan@018740b:torchtitan/models/llama3/infra/parallelize.py"
PARALLEL_DIMS = "pytorch/torchtitan@0119de1:torchtitan/distributed/parallel_dims.py"
TABLES = "pytorch/torchtitan@b5bcd76:benchmarks"
KEMPNERFORGE_REPOSITORY = "KempnerInstitute/KempnerForge@01b461a"
FOUNDRY = "mosaicml/llm-foundry@8c8dd48:scripts/train/benchmarking/README.md"
COMPOSER_ADAMW = "mosaicml/composer@28cc4ca:composer/optim/decoupled_weight_decay.py, adamw"
FLAT = "pytorch/pytorch@v2.1.0:torch/distributed/fsdp/_flat_param.py, FlatParameter"
FLAT_GRADIENTS = Fact(
    "updated", "pytorch/pytorch@00ae0bc:torch/distributed/fsdp/_runtime_utils.py, _cast_grad_to_param_dtype; measured"
)
TUNE = "meta-pytorch/torchtune@v0.6.1"
FMS = "foundation-model-stack/fms-fsdp@5a296af"

AUTOGRAD = {"linears": Fact("separate", "PyTorch: torch.nn.Linear, each a node of autograd")}
HOOKS = "pytorch/pytorch@v2.13.0:torch/distributed/fsdp/_fully_shard/_fsdp_state.py, _register_pre_backward_hook"
SHARDS = "pytorch/pytorch@v2.13.0:torch/distributed/fsdp/_fully_shard/_fsdp_param.py, _sharded_param_data; measured"
REDUCED = "pytorch/pytorch@v2.13.0:torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, foreach_reduce"
BUFFERS = "pytorch/pytorch@v2.13.0:torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py"
FULLY_SHARDED = AUTOGRAD | {
    "backward_all_gather": Fact("all", f"{HOOKS}: on the output of every unit; measured"),
    "zero2_shards": Fact("separate", f"{SHARDS}: gathered weights are another tensor"),
    "reduced_gradients": Fact("updated", f"{REDUCED}: reduce_output becomes orig_dtype; measured"),
    "comm_buffers": Fact(
        "retained", f"{BUFFERS}: all_gather_state, _backward_prefetch, unsharded_grads, reduce_scatter_states; measured"
    ),
}
DTENSOR = {
    "column_inputs": Fact("saved", "PyTorch: PrepareModuleInput gathers the input of torch.nn.Linear, which keeps it"),
    "tp_buffers": Fact(
        "copied",
        "pytorch/pytorch@v2.13.0:torch/distributed/_functional_collectives.py, all_gather_tensor and "
        "reduce_scatter_tensor: torch.cat where the dimension is not the first",
    ),
}
DATA_PARALLEL = Fact(("dp",), "fully shards over data-parallel ranks, and nothing else")

TRAINER = "huggingface/transformers@5.23.0:src/transformers/training_args.py"
TRAINER_OPTIMIZERS = Fact(("adamw", "adamw8bit", "adamw4bit", "adafactor", "sgd"), f"{TRAINER}, OptimizerNames")
ACTIVATION_OFFLOADING = "trl@1.16.0:trl/models/activation_offloading.py, OffloadActivations"
OFFLOAD_POLICY = "pytorch/pytorch@v2.13.0:torch/distributed/fsdp/_fully_shard/_fsdp_api.py, CPUOffloadPolicy"
PLANS = "huggingface/accelerate@1.15.0:src/accelerate/parallelism_config.py"
FSDP2 = StackEntry(
    name="fsdp2",
    version="0257dd1",
    family="torch",
    facts=FULLY_SHARDED
    | DTENSOR
    | {
        "attention": Fact("flash2", "pytorch/pytorch: scaled_dot_product_attention is FlashAttention-2 since 2.2"),
        "loss": Fact(
            "low_precision", "pytorch/pytorch: torch.nn.functional.cross_entropy keeps the dtype of the logits"
        ),
        "kernels": Fact("plain", "PyTorch without torch.compile: a kernel for each operation"),
        "overlap": Fact(("dp",), f"{FULLY_SHARD}: gathers and reductions by unit, on streams of their own"),
    },
    runs={
        "axes": Fact(("dp", "tp", "cp"), f"{FULLY_SHARD}: next to DTensor's tp and context_parallel's ring; {PLANS}"),
        "config_axes": Fact(("dp", "cp"), f"{PLANS}: tp as transformers' models plan it, which is counted otherwise"),
        "cp_shards": Fact(True, f"{PLANS}, dp_shard_cp_dim_names"),
        "cp_kinds": Fact(("ring",), f"{PLANS}, cp_backend: torch"),
        "orders": Fact(False, f"{PLANS}, _get_mesh: copies, shards, cp, tp"),
        "zero": Fact((2, 3), f"{FULLY_SHARD}, reshard_after_forward"),
        # reshard_after_forward=False gathers for every micro-batch: zero3 with reshard=backward
        "config_zero": Fact((3,), "huggingface/accelerate@1.15.0:src/accelerate/utils/dataclasses.py: of every module"),
        "recomputes": Fact(
            ("full",), "huggingface/accelerate@1.15.0:src/accelerate/utils/fsdp_utils.py, fsdp2_apply_ac: full blocks"
        ),
        "config_optimizers": TRAINER_OPTIMIZERS,
        "config_precisions": Fact(
            ("fp32", "tf32", "bf16-grad16", "fp16"),
            "huggingface/accelerate@1.15.0:src/accelerate/utils/dataclasses.py, set_mixed_precision: reduce_dtype",
        ),
        "offloads": Fact(("activations", "parameters"), f"{OFFLOAD_POLICY}; {ACTIVATION_OFFLOADING}"),
    },
)

REDUCER = "pytorch/pytorch@v2.13.0:torch/csrc/distributed/c10d/reducer.cpp"
DDP = StackEntry(
    name="ddp",
    version="2.13.0",
    family="torch",
    facts=AUTOGRAD
    | {
        "attention": FSDP2.facts["attention"],
        "loss": FSDP2.facts["loss"],
        "kernels": FSDP2.facts["kernels"],
        "overlap": Fact(("dp",), f"{REDUCER}: a bucket is reduced once its gradients are ready"),
        "wgrad_accumulation": Fact(
            "ddp_buckets", f"{REDUCER}: copied into buckets (no gradient_as_bucket_view); measured"
        ),
    },
    runs={
        "axes": Fact(("dp",), f"{REDUCER}: one process group, of replicas"),
        "zero": Fact((0,), f"{REDUCER}: all-reduce of full gradients"),
        "config_optimizers": TRAINER_OPTIMIZERS,
        "config_precisions": Fact(
            ("fp32", "tf32", "bf16-autocast", "fp16-autocast"), f"{TRAINER}, bf16 and fp16: autocast over fp32 weights"
        ),
        "offloads": Fact(("activations",), ACTIVATION_OFFLOADING),
    },
)

TORCHTITAN = StackEntry(
    name="torchtitan",
    version="018740b",
    family="torch",
    facts=FULLY_SHARDED
    | DTENSOR
    | {
        "attention": Fact("flash2", f"{PARALLELIZE}: scaled_dot_product_attention, FlashAttention-2 since PyTorch 2.2"),
        "loss": Fact("plain", "pytorch/torchtitan@00a388d:torchtitan/components/loss.py: cross_entropy(pred.float())"),
        "compile": Fact(True, f"{PARALLELIZE}, apply_compile; as {TABLES} runs it"),
        "early_stop": Fact(
            False,
            "pytorch/torchtitan@018740b:torchtitan/config/job_config.py, ActivationCheckpoint; an option, off, since "
            "@25413d2 of August 2025 (0.2.0); @0.3.0:torchtitan/distributed/activation_checkpoint.py, FullAC: off",
        ),
        # Context parallelism gathers keys and values before attention starts (rotate_method "allgather").
        "stage_outputs": Fact(
            "retained", "pytorch/pytorch@v2.13.0:torch/distributed/pipelining/stage.py, fwd_cache; measured"
        ),
        "recv_buffers": Fact(
            "preallocated",
            "pytorch/pytorch@v2.13.0:torch/distributed/pipelining/stage.py, args_recv_info, grad_recv_info and "
            "clear_runtime_states; measured",
        ),
        "deferred_wgrad": Fact(
            "graph",
            "pytorch/pytorch@v2.13.0:torch/distributed/pipelining/_backward.py, stage_backward_input: retain_graph, "
            "param_groups; stage.py, backward_one_chunk: not of the first stage; measured",
        ),
        "replicated_grad_reduce": Fact(
            "weight", "pytorch/pytorch@v2.13.0:torch/distributed/tensor: each Partial gradient for itself; measured"
        ),
        "overlap": Fact(("dp",), f"{PARALLELIZE}: fully_shard; async tensor parallelism only by maybe_enable_async_tp"),
        "reduce": Fact("unpipelined", f"{FULLY_SHARD}, set_requires_gradient_sync: on; {STAGE} turns it off"),
    },
    runs={
        "schedules": Fact(
            ("gpipe", "1f1b", "interleaved", "zbv", "dualpipev"),
            "pytorch/pytorch@cf30153:torch/distributed/pipelining/schedules.py, get_schedule_class",
        ),
        "zero": Fact((0, 2, 3), f"{PARALLELIZE}: apply_ddp; fsdp_reshard_after_forward never or always"),
        "pipelined_zero": Fact((2, 3), f"{PARALLELIZE}: DDP has not supported > 1D parallelism"),
        "config_zero": Fact((0, 3), f"{FULLY_SHARD}: gathered for every micro-batch, unless {STAGE} defers it"),
        "cp_shards": Fact(True, f"{PARALLEL_DIMS}, build_mesh: fsdp is dp_shard · cp"),
        "recomputes": Fact(
            ("full", "norm+rope+act"),
            "pytorch/torchtitan@0.3.0:torchtitan/distributed/activation_checkpoint.py: FullAC, or SelectiveAC by "
            "operation, which keeps matmuls and attention",
        ),
        "config_optimizers": Fact(
            ("adamw",), "pytorch/torchtitan@0.3.0:torchtitan/components/optimizer.py: Adam and AdamW"
        ),
        # those of its versions 0.2 and 0.3 together
        "config_precisions": Fact(
            ("fp32", "bf16", "bf16-full", "bf16-autocast"), f"{PARALLELIZE}, apply_fsdp: param_dtype; apply_ddp"
        ),
        "config_dense_precisions": Fact(
            ("fp8", "fp8-wire", "fp8-rowwise", "fp8-rowwise-gw", "mxfp8"),
            "pytorch/torchtitan@018740b:torchtitan/components/quantization: float8 and mx of linear layers",
        ),
        "experts_as_mlp": Fact(True, "pytorch/torchtitan@0.3.0:torchtitan/models/common/moe.py: no etp with ep"),
        "cp_kinds": Fact(("ring",), f"{PARALLEL_DIMS}, seq_len_divisor: two parts of a sequence per rank"),
        "no_sp": Fact(False, f"{PARALLELIZE}, apply_tp: SequenceParallel in every plan"),
        "orders": Fact(False, f"{PARALLEL_DIMS}, build_mesh: pp, dp, cp, tp"),
        "offloads": Fact(("parameters",), f"{PARALLELIZE}, apply_fsdp: {OFFLOAD_POLICY}"),
    },
)

KEMPNERFORGE = StackEntry(
    name="kempnerforge",
    version="01b461a",
    family="torch",
    facts=FULLY_SHARDED
    | {
        "tp_buffers": DTENSOR["tp_buffers"],
        "loss": Fact("low_precision", f"{KEMPNERFORGE_REPOSITORY}: scripts/train.py: PyTorch's cross entropy"),
        "kernels": Fact("plain", f"{KEMPNERFORGE_REPOSITORY}: scripts/train.py: torch.compile is an option"),
        "overlap": Fact(("dp",), f"{KEMPNERFORGE_REPOSITORY}:kempnerforge/distributed/parallel.py: fully_shard"),
        "reduce": Fact("step", f"{KEMPNERFORGE_REPOSITORY}:kempnerforge/training/grad.py: set_requires_gradient_sync"),
    },
    runs={
        "zero": Fact((2, 3), f"{KEMPNERFORGE_REPOSITORY}:kempnerforge/distributed/parallel.py: reshard_after_forward")
    },
)

LLM_FOUNDRY = StackEntry(
    name="llm-foundry",
    version="8c8dd48",
    family="torch",
    facts=AUTOGRAD
    | {
        "attention": Fact("flash1_triton", f"{FOUNDRY}: Triton's flash attention"),
        "runtime_connect": Fact(False, "mosaicml/llm-foundry@003ac6a:setup.py: PyTorch 2.6, whose NCCL is 2.21"),
        "kernels": Fact("plain", f"{FOUNDRY}: no torch.compile"),
        # checkpoints are not reentrant (submit_benchmarks.py), so PyTorch 2.1 stops them early: the default
        "overlap": Fact(("dp",), f"{FOUNDRY}: FSDP"),
        # step and its copy to the host, which waits for it; 8 of AdamW without weight decay; 2 of clipping
        "update_kernels": Fact(
            12, f"{COMPOSER_ADAMW}; pytorch/pytorch@v2.1.0: FullyShardedDataParallel.clip_grad_norm_"
        ),
        "flat_shards": Fact(True, FLAT),
        "reduced_gradients": FLAT_GRADIENTS,
    },
    runs={
        "axes": DATA_PARALLEL._replace(source=f"{FOUNDRY}: only FSDP"),
        "zero": Fact((0, 2, 3), "pytorch/pytorch: ShardingStrategy NO_SHARD, SHARD_GRAD_OP, FULL_SHARD of FSDP"),
    },
)

TORCHTUNE = StackEntry(
    name="torchtune",
    version="0.6.1",
    family="torch",
    facts=FULLY_SHARDED
    | DTENSOR
    | {
        "attention": Fact("flash2", f"{TUNE}:torchtune/modules/attention_utils.py: scaled_dot_product_attention"),
        # all logits in bf16, then a chunk in fp32, whose log_softmax is saved; compile=True fuses a chunk
        "loss": Fact("upcast", f"{TUNE}:torchtune/modules/loss/ce_chunked_output_loss.py, CEWithChunkedOutputLoss"),
        "kernels": Fact("plain", f"{TUNE}:recipes/configs/llama3/8B_full.yaml: compile is False"),
        "overlap": Fact(("dp",), f"{FULLY_SHARD}: gathers and reductions by unit, on streams of their own"),
        "reduce_in_fp32": Fact(False, f"{TUNE}:torchtune/training/_distributed.py, shard_model: no mp_policy"),
    },
    runs={
        "axes": Fact(("dp", "tp"), f"{TUNE}:recipes/full_finetune_distributed.py: a mesh of dp and tp"),
        "zero": Fact((3,), f"{TUNE}:recipes/lora_finetune_distributed.py: shard_model, unless on one device"),
        "shard_groups": Fact(False, f"{TUNE}:recipes/full_finetune_distributed.py: one dimension of dp"),
        "orders": Fact(False, f"{TUNE}:recipes/full_finetune_distributed.py: dp, tp"),
        "recomputes": Fact(
            ("full", "full/n"), f"{TUNE}:torchtune/training/activations.py, apply_selective_activation_checkpointing"
        ),
        "config_optimizers": Fact(
            ("adamw", "adamw8bit", "adamw4bit", "sgd"), f"{TUNE}:recipes/configs: torch.optim, bitsandbytes, torchao"
        ),
        "config_precisions": Fact(
            ("bf16-pure", "bf16-full", "fp32"), f"{TUNE}:torchtune/training/precision.py, get_dtype: no master copy"
        ),
        "offloads": Fact(
            ("activations", "parameters"),
            f"{TUNE}:recipes/full_finetune_distributed.py: enable_activation_offloading, fsdp_cpu_offload",
        ),
    },
)

FMS_FSDP = StackEntry(
    name="fms-fsdp",
    version="5a296af",
    family="torch",
    facts=AUTOGRAD
    | {
        "attention": Fact("flash2", f"{FMS}:README.md: SDPA's FlashAttention-2"),
        "loss": Fact("plain", f"{FMS}:fms_fsdp/utils/train_utils.py: CrossEntropyLoss"),
        "compile": Fact(True, f"{FMS}:README.md: torch.compile"),
        "overlap": Fact(("dp",), f"{FMS}:README.md: FSDP"),
        "reduce_in_fp32": Fact(False, "foundation-model-stack/fms-fsdp@8ec8256:fms_fsdp/policies/mixed_precision.py"),
        "flat_shards": Fact(True, FLAT),
        "reduced_gradients": FLAT_GRADIENTS,
    },
    runs={
        "axes": DATA_PARALLEL._replace(source=f"{FMS}:README.md: only FSDP and HSDP"),
        "zero": Fact((0, 2, 3), "pytorch/pytorch: ShardingStrategy NO_SHARD, SHARD_GRAD_OP, FULL_SHARD of FSDP"),
    },
)

AUTOMODEL = "NVIDIA-NeMo/Automodel@0565679:nemo_automodel/components/distributed/fsdp2.py"
AUTOMODEL_RECIPE = "NVIDIA-NeMo/Automodel@51d4df5: qwen3_moe_30b_te_deepep.yaml"
NEMO_AUTOMODEL = StackEntry(
    name="nemo-automodel",
    version="0565679",
    family="torch",
    facts=FULLY_SHARDED
    | {
        "tp_buffers": DTENSOR["tp_buffers"],
        "loss": Fact("low_precision", f"{AUTOMODEL_RECIPE}: fp32_upcast is off; {AUTOMODEL}: output_dtype is bf16"),
        "overlap": Fact(("dp",), f"{FULLY_SHARD}: gathers and reductions by unit, on streams of their own"),
        "reduce_in_fp32": Fact(False, f"{AUTOMODEL}: reduce_dtype is bf16"),
        "dispatcher": Fact("fused", f"{AUTOMODEL_RECIPE}: DeepEP"),
    },
    runs={
        "zero": Fact((2, 3), f"{FULLY_SHARD}, reshard_after_forward"),
        "pipelined_zero": Fact((2, 3), f"{FULLY_SHARD}, reshard_after_forward"),
        "cp_kinds": Fact(("ring",), f"{AUTOMODEL}: context parallelism of PyTorch, within the shards' mesh"),
    },
)

ENTRIES = (FSDP2, DDP, TORCHTITAN, KEMPNERFORGE, LLM_FOUNDRY, TORCHTUNE, FMS_FSDP, NEMO_AUTOMODEL)

"""Megatron-LM of 2021 and 2022 and its derivatives, and Megatron-Core with Transformer Engine."""

from __future__ import annotations

from fivefold.stack.entry import Fact, StackEntry

LAYERS = "NVIDIA/Megatron-LM@960c06b:megatron/core/tensor_parallel/layers.py"
SCHEDULES = "NVIDIA/Megatron-LM@00611e6:megatron/core/pipeline_parallel/schedules.py"
PTD_P = "arXiv:2104.04473"
SP = "arXiv:2205.05198"
CHRONICLES = "bigscience-workshop/bigscience@053adaf:train/tr11-176B-ml/chronicles-prequel.md"
HYDRA = "NVIDIA/dgxc-benchmarking@35a9aec:nemo_megatron/gpt3_175b_hydra.yaml"
RECIPES = "NVIDIA-NeMo/Megatron-Bridge@00538e2:scripts/performance/utils/overrides.py"

BRIDGE = "NVIDIA-NeMo/Megatron-Bridge@067f987"

COMMON = {
    "linears": Fact(
        "separate", f"{LAYERS}, LinearWithGradAccumulationAndAsyncCommunication: an autograd function each"
    ),
    "merged_projections": Fact(True, f"{LAYERS}; query_key_value of a ColumnParallelLinear, gate and up of another"),
    "early_stop": Fact(
        False, "NVIDIA/Megatron-LM@cf547de:megatron/core/tensor_parallel/random.py, CheckpointFunction runs all again"
    ),
    "vocab_multiple": Fact(
        128, "NVIDIA/Megatron-LM@307dcf3:megatron/training/arguments.py, --make-vocab-size-divisible-by"
    ),
}

# Until 2022: scale, mask and softmax are one kernel on materialized scores; nothing overlaps with compute.
PLAIN = COMMON | {
    "attention": Fact("unfused", f"{PTD_P} §4.2: fused kernels for scale, mask and softmax on the scores"),
    "loss": Fact(
        "upcast", f"{PTD_P} §4.2 and Megatron-LM of that time: cross entropy of fp32 logits, split by vocabulary"
    ),
    "overlap": Fact(
        (),
        "VIA-Research/vTrain@f8dda84: use_gradient_bucket false; Megatron-LM of that time reduces at the end",
    ),
    "runtime_connect": Fact(False, "NVIDIA/nccl@v2.22.3-1:src/init.cc, runtimeConn: of June 2024, after these runs"),
    "scatter_gather_tensors": Fact(True, f"{PTD_P} §4.1: scatter/gather between pipeline stages"),
    # backward: sums of four biases; two more kernels per norm; the second products of scores and values, and two
    # scalings of the former (alpha of baddbmm)
    "extra_kernels": Fact(
        (0, 12), "VIA-Research/vTrain@f8dda84:src/model/gpt_modeling.py, as in Megatron-LM: a layer's nodes of autograd"
    ),
}
PLAIN_AXES = Fact(("dp", "tp", "pp"), f"{PTD_P} §2: pipeline, tensor and data parallelism")

MEGATRON_LM = StackEntry(
    name="megatron-lm",
    version="2022",
    family="megatron",
    facts=PLAIN
    | {
        "async_tp": Fact(
            True,
            f"{SP} §4.2.2: the gather of a layer's input during a product of its backward; {LAYERS}: the "
            "reduce-scatter of dx, or without sequence parallelism its all-reduce, during that of dW",
        ),
        "wgrad_accumulation": Fact(
            "fused",
            "NVIDIA/Megatron-LM@9c5a830 of February 2022:megatron/mpu/layers.py, gradient_accumulation_fusion: on",
        ),
    },
    runs={
        "axes": PLAIN_AXES,
        "schedules": Fact(("1f1b", "interleaved"), f"{PTD_P} §2.2"),
        "zero": Fact((0,), f"{PTD_P} §5.2: ZeRO is DeepSpeed's"),
        "shard_groups": Fact(False, f"{PTD_P} §5.2: ZeRO is DeepSpeed's"),
    },
)

ZERO_BUBBLE_REPOSITORY = "sail-sg/zero-bubble-pipeline-parallelism@475e062"
ZERO_BUBBLE = MEGATRON_LM._replace(
    name="zero-bubble",
    version="2023",
    runs={
        **MEGATRON_LM.runs,
        "schedules": Fact(
            ("1f1b", "interleaved", "zb1p", "zb2p", "zbv"), f"{ZERO_BUBBLE_REPOSITORY}; arXiv:2401.10241 §2, §6"
        ),
    },
)

MEGATRON_DEEPSPEED = StackEntry(
    name="megatron-deepspeed",
    version="2022",
    family="megatron-deepspeed",
    facts=PLAIN
    | {
        "flat_copies": Fact(("gradients",), "microsoft/DeepSpeed@cde57d2:deepspeed/runtime/zero/stage_1_and_2.py"),
        "reduce_in_fp32": Fact(False, f"{CHRONICLES}: 16-bit gradients unless a run says fp32"),
        # all stages of a replica, for the norm; tp, which gathers what stages receive; pairs of stages
        "second_communicators": Fact(
            ("world", "tp", "pp"),
            "deepspeedai/DeepSpeed@v0.6.0:deepspeed/runtime/pipe/topology.py, PipelineParallelGrid: "
            "ds_model_proc_group and slice_proc_group; p2p.py: dist.send, for which PyTorch makes a communicator of "
            "two ranks",
        ),
    },
    runs={
        "axes": PLAIN_AXES,
        "schedules": Fact(("1f1b",), "deepspeedai/DeepSpeed@03f6f75:deepspeed/runtime/pipe/engine.py, train_batch"),
        "pipelined_zero": Fact(
            (0, 1), "deepspeedai/DeepSpeed@03f6f75:deepspeed/runtime/pipe/engine.py, __init__: no ZeRO-2 and ZeRO-3"
        ),
        "offloads": Fact(
            ("optimizer",), "microsoft/DeepSpeed@cde57d2:deepspeed/runtime/zero/stage_1_and_2.py, cpu_offload"
        ),
    },
)

# forward: the seed of attention's dropout. Backward: the second kernels of two norms, and the sums of the gradients of
# their weights into main_grad; in cuDNN's attention the product of the output and its gradient, the gradients of keys
# and of values summed over the queries of a group (not launched where each query has its own), and the cast of the
# gradient of queries
TRANSFORMER_ENGINE_KERNELS = Fact(
    (1, 8),
    "NVIDIA/TransformerEngine@d0067d0:transformer_engine/common/normalization/rmsnorm/rmsnorm_bwd_semi_cuda_kernel.cu, "
    "fused_attn/utils.cu (extract_seed_and_offset); NVIDIA/Megatron-LM@d98e8a6:megatron/core/distributed/"
    "distributed_data_parallel.py (_make_backward_post_hook); cuDNN's kernels: BastiaanGroot/ML-Infrastructure-Engineer"
    "@52ad575:training/profiles",
)
TRANSFORMER_ENGINE = COMMON | {
    "extra_kernels": TRANSFORMER_ENGINE_KERNELS,
    "merged_adapters": Fact(
        "all_gather", f"{BRIDGE}:src/megatron/bridge/peft/lora.py, LoRA of linear_qkv and linear_fc1; utils.py"
    ),
    "wgrad_accumulation": Fact(
        "fused_dummy",
        "NVIDIA/TransformerEngine@fecb10b:transformer_engine/pytorch/module/base.py, get_dummy_wgrad",
    ),
    "p2p_overlap": Fact(
        "interleaved", f"{SCHEDULES}, forward_backward_pipelining_without_interleaving refuses overlap_p2p_comm"
    ),
}
CORE_RECOMPUTES = "NVIDIA/Megatron-LM@core_v0.16.1:megatron/core/transformer/transformer_config.py, recompute_modules"
CORE_PARALLEL_STATE = "NVIDIA/Megatron-LM@core_v0.16.1:megatron/training/initialize.py, _initialize_distributed"
CORE_RUNS = {
    "schedules": Fact(("1f1b", "interleaved"), f"{SCHEDULES}, get_forward_backward_func"),
    "zero": Fact((0, 1), "NVIDIA/Megatron-LM@d08b402:megatron/core/optimizer/distrib_optimizer.py"),
    "orders": Fact(("tp-cp-pp-dp",), f"{CORE_PARALLEL_STATE}, use_tp_pp_dp_mapping instead of tp-cp-ep-dp-pp"),
    "recomputes": Fact(
        ("full", "core", "norm", "mlp", "up", "rope", "latent"),
        f"{CORE_RECOMPUTES}; moe_act without experts is refused",
    ),
    "offloads": Fact(
        ("optimizer",), "NVIDIA/Megatron-LM@core_v0.16.1:megatron/training/arguments.py, --optimizer-cpu-offload"
    ),
    "expert_recomputes": Fact(("act", "moe", "shared"), f"{CORE_RECOMPUTES}, with moe_grouped_gemm"),
}
CORE_ARGUMENTS = "NVIDIA/Megatron-LM@core_v0.16.1:megatron/training/arguments.py"
CORE_CONFIGS = {
    "config_optimizers": Fact(("adamw", "muon", "sgd"), f"{CORE_ARGUMENTS}, --optimizer"),
    "config_precisions": Fact(
        (
            "fp32",
            "fp16",
            *(
                f"{name}{end}"
                for name in (
                    "bf16",
                    "fp8",
                    "fp8-param",
                    "fp8-delayed",
                    "fp8-delayed-param",
                    "fp8-tiles",
                    "fp8-tiles-param",
                    "mxfp8",
                    "nvfp4",
                )
                for end in ("", "-grad16")
            ),
        ),
        f"{CORE_ARGUMENTS}, --fp16, --bf16, --fp8-recipe, --fp8-param-gather, --fp4-format, --grad-reduce-in-bf16",
    ),
}
FUSED_DISPATCHER = {
    "fused_dispatcher": Fact(
        True,
        "NVIDIA/Megatron-LM@core_v0.16.1:megatron/core/transformer/moe/token_dispatcher.py, MoEFlexTokenDispatcher: "
        "DeepEP or HybridEP",
    ),
}
CORE_CONFIG = "NVIDIA/Megatron-LM@02aa3ee:megatron/core/model_parallel_config.py"

MEGATRON_CORE = StackEntry(
    name="megatron-core",
    version="00611e6",
    family="megatron",
    facts=TRANSFORMER_ENGINE
    | {
        "loss": Fact("upcast", f"{CORE_CONFIG}: cross_entropy_loss_fusion is off"),
        "overlap": Fact(
            ("dp", "cp", "pp"), f"{CORE_CONFIG}: tp_comm_overlap and overlap_moe_expert_parallel_comm are off"
        ),
        "async_tp": Fact(
            True,
            f"{SP} §4.2.2; {LAYERS}, LinearWithGradAccumulationAndAsyncCommunication; "
            "NVIDIA/TransformerEngine@d0067d0:transformer_engine/pytorch/module/linear.py, dgrad_work",
        ),
        "ddp_bucket_size": Fact(
            (40_000_000, 1_000_000),
            "NVIDIA/Megatron-LM@d98e8a6:megatron/core/distributed/distributed_data_parallel.py, bucket_size",
        ),
    },
    runs=CORE_RUNS | CORE_CONFIGS | FUSED_DISPATCHER,
)

# Elements, whatever the number of ranks; NeMo's MegatronCommOverlapCallback sets the same.
BRIDGE_BUCKET = Fact(
    (128 * 1024 * 1024, 0), f"{BRIDGE}:src/megatron/bridge/training/comm_overlap.py, _get_optimizer_overlap_cfgs"
)

# Userbuffers overlap the messages of tensor parallelism; the loss is Transformer Engine's.
MEGATRON_BRIDGE = StackEntry(
    name="megatron-bridge",
    version="25.09 to 26.08",
    family="megatron",
    facts=TRANSFORMER_ENGINE
    | {
        "overlap": Fact(("dp", "cp", "pp", "tp"), f"{RECIPES}; llama3_llm_pretrain.py: userbuffers"),
        "reduce_in_fp32": Fact(False, f"{RECIPES}: grad_reduce_in_fp32 is off"),
        "ddp_bucket_size": BRIDGE_BUCKET,
    },
    runs=CORE_RUNS | CORE_CONFIGS | FUSED_DISPATCHER,
)

NEMO = StackEntry(
    name="nemo",
    version="24.07 to 25.05",
    family="megatron",
    facts=TRANSFORMER_ENGINE
    | {
        "overlap": Fact(("dp", "cp", "pp", "tp"), f"{HYDRA}: ub_tp_comm_overlap, overlap_grad_sync"),
        "reduce_in_fp32": Fact(False, f"{HYDRA}: grad_sync_dtype; NVIDIA/dgxc-benchmarking@741c886:llama3.1"),
        "ddp_bucket_size": BRIDGE_BUCKET,
    },
    runs=CORE_RUNS,
)

# The framework that trained DeepSeek-V3. Not published, so assumed: kernels and saved tensors as in Megatron-Core.
DEEPSEEK_V3 = "arXiv:2412.19437"
DEEPSEEK = StackEntry(
    name="deepseek",
    version="2024",
    family="megatron",
    facts={name: fact for name, fact in MEGATRON_CORE.facts.items() if name != "p2p_overlap"}
    | {
        "overlap": Fact(("dp", "ep", "pp"), f"{DEEPSEEK_V3} §3.2.1: both all-to-all and pipeline messages are hidden"),
        "pairs": Fact(True, f"{DEEPSEEK_V3} §3.2.1: a pair of forward and backward chunks overlaps"),
        "runtime_connect": Fact(False, f"{DEEPSEEK_V3}, of 2024, before PyTorch 2.7 brought NCCL 2.26"),
        "dispatcher": Fact("fused", f"{DEEPSEEK_V3} §3.2.2: a token goes to at most four nodes, over NVLink within"),
        "low_precision_saved": Fact(("activation", "attention"), f"{DEEPSEEK_V3} §3.3.3: low-precision activation"),
    },
    runs={
        "axes": Fact(("dp", "ep", "pp"), f"{DEEPSEEK_V3} §3.2: no tensor parallelism"),
        "schedules": Fact(("1f1b", "zb1p", "dualpipe"), f"{DEEPSEEK_V3} §3.2.1, table 2"),
        "zero": Fact((0, 1), f"{DEEPSEEK_V3} §3.2: ZeRO-1"),
        "shard_groups": Fact(False, f"{DEEPSEEK_V3} §3.2: ZeRO-1, over all that hold the same"),
        "orders": Fact(False, f"{DEEPSEEK_V3} §3.2: experts span eight nodes"),
        "recomputes": Fact(("norm", "up", "rope"), f"{DEEPSEEK_V3} §3.2.3: norms and up-projections"),
        "expert_recomputes": Fact(("act",), f"{DEEPSEEK_V3} §3.3.3: the output of SwiGLU"),
        "precisions": Fact(("bf16", "fp8-deepseek"), f"{DEEPSEEK_V3} §3.3 and appendix B.1: compared with bf16"),
    },
)

ENTRIES = (MEGATRON_LM, ZERO_BUBBLE, MEGATRON_DEEPSPEED, MEGATRON_CORE, MEGATRON_BRIDGE, NEMO, DEEPSEEK)

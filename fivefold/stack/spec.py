"""The stack record: the properties of a training framework that affect memory, FLOPs, messages and time.

The defaults are those of Fivefold's trainer. Where a named stack differs, its entry has the source (``catalog.py``).
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from fivefold.bounded_types import Bytes, Elements, Multiple
from fivefold.layout.names import DEFAULT_ORDER, Axis, CpKind, MeshAxis, Offloaded
from fivefold.layout.schedule.pipeline_schedule import PIPELINE_SCHEDULES, SCHEDULES, ScheduleName
from fivefold.model.mixers.chunk_groups import CPU_TEMPORARY_BYTES, GPU_TEMPORARY_BYTES
from fivefold.model.mixers.kinds import MixerName
from fivefold.record import Record
from fivefold.stack.kernel_facts import (
    ATTENTIONS,
    AUTOGRAD,
    FIVEFOLD,
    LOSSES,
    AttentionFacts,
    KernelFacts,
    LossFacts,
)

Attention = Literal["flash", "flash2", "flash1", "flash1_triton", "blocks", "unfused"]
Reduce = Literal["step", "micro_batch", "unpipelined"]
ZeroStage = Annotated[int, Field(ge=0, le=3)]
Launches = Annotated[int, Field(ge=0, le=1000)]
AllReduces = Annotated[int, Field(ge=1, le=4)]

# token mixers whose scans flash-linear-attention has kernels for (``trainer/model/mixers/fused_scans.py``)
FUSED_SCANS: tuple[MixerName, ...] = ("gated_delta_net", "kimi_delta", "lightning", "mamba2")
# token mixers that scan a sequence in chunks (``model/mixers/chunk_groups.py``)
CHUNKED_SCANS: tuple[MixerName, ...] = (*FUSED_SCANS, "mamba", "rg_lru", "rwkv")

AT_LEAST_ONE = Field(min_length=1)  # errors name one of them


class SupportedLayouts(Record):
    """The layouts that a stack supports."""

    axes: tuple[Axis, ...] = ("dp", "tp", "cp", "ep", "pp")  # axes whose degree may exceed 1
    schedules: Annotated[tuple[ScheduleName, ...], AT_LEAST_ONE] = SCHEDULES  # pipeline schedules
    zero: Annotated[tuple[ZeroStage, ...], AT_LEAST_ONE] = (0, 1, 2, 3)  # ZeRO stages
    pipelined_zero: tuple[ZeroStage, ...] = (0, 1, 2, 3)  # ZeRO stages with pp > 1
    shard_groups: bool = True  # ZeRO within groups of replicas (zero3/8)
    cp_kinds: Annotated[tuple[CpKind, ...], AT_LEAST_ONE] = ("ring", "ulysses")  # kinds of context parallelism
    expert_tensor: bool = True  # etp smaller than tp, or larger than 1
    no_sp: bool = True  # tensor parallelism without sequence parallelism
    uneven_stages: bool = True  # stages with different numbers of layers
    orders: bool | tuple[str, ...] = True  # any order of the mesh axes; or these besides the default
    # Recomputation that its config can express: full, full/n, groups of operations, and groups that come together only
    # (joined by +); empty: all. The search uses no others; predictions accept any, as some configs are read as the
    # nearest recomputation.
    recomputes: tuple[str, ...] = ()
    expert_recomputes: tuple[str, ...] = ()  # further groups, only in models with experts
    fused_dispatcher: bool = False  # its experts can have the fused dispatcher, which it is not run with by default
    experts_as_mlp: bool = False  # its config can express etp = tp without ep, and etp = 1 with ep, only
    config_axes: tuple[Axis, ...] = ()  # those of ``axes`` that its config can express; empty: all
    config_zero: tuple[ZeroStage, ...] = ()  # those of ``zero`` that its config can express with pp = 1; empty: all
    config_optimizers: tuple[str, ...] = ()  # update rules with which a config of it is written; empty: all
    precisions: tuple[str, ...] = ()  # names of recipes that it trains with; empty: those of its config, or all
    config_precisions: tuple[str, ...] = ()  # names of recipes with which a config of it is written; empty: all
    config_dense_precisions: tuple[str, ...] = ()  # further recipes, only of models without experts
    offloads: tuple[Offloaded, ...] = ()  # what it can keep in host memory; advice to offload names no other software
    optimizer_offload_zero: tuple[ZeroStage, ...] = (0, 1, 2, 3)  # ZeRO stages with which the optimizer can be there
    cp_shards: bool = False  # its config always shards weights over all of cp: no ZeRO-0 with cp, groups span cp

    def zero_with(self, pp: int) -> tuple[ZeroStage, ...]:
        """Return the ZeRO stages supported with ``pp`` pipeline ranks."""
        return tuple(stage for stage in self.zero if pp == 1 or stage in self.pipelined_zero)

    def supports_order(self, order: Sequence[MeshAxis]) -> bool:
        """Tell whether the stack supports this order of the axes."""
        if isinstance(self.orders, bool):
            return self.orders or tuple(order) == DEFAULT_ORDER
        return tuple(order) == DEFAULT_ORDER or "-".join(order) in self.orders

    def expressible_zero(self, pp: int, cp: int = 1) -> tuple[ZeroStage, ...]:
        """Return the stages of ``zero_with`` that the config can express with ``cp`` ranks per sequence."""
        expressible = self.config_zero if pp == 1 and self.config_zero else self.zero
        min_stage = 1 if self.cp_shards and cp > 1 else 0
        return tuple(stage for stage in self.zero_with(pp) if stage in expressible and stage >= min_stage)

    def can_express_shards(self, shards: int, cp: int) -> bool:
        """Tell whether the config can express shard groups of ``shards`` ranks with ``cp`` ranks per sequence."""
        return not self.cp_shards or shards % cp == 0

    def can_express(self, ac: str, *, experts: bool) -> bool:
        """Tell whether the config can express a recomputation, for a model with or without ``experts``."""
        if ac == "none" or not self.recomputes:
            return True
        if "@" in ac:
            return False
        if ac in self.recomputes:
            return True
        known = self.recomputes + (self.expert_recomputes if experts else ())
        if ac.startswith("full"):
            return ("full/n" if "/" in ac else "full") in known
        return all(group in known for group in (["core"] if ac == "selective" else ac.split("+")))

    def list_config_precisions(self, *, experts: bool) -> tuple[str, ...]:
        """Return the recipes with which a config is written for a model with or without ``experts``; empty: all."""
        return self.config_precisions if experts else (*self.config_precisions, *self.config_dense_precisions)

    def list_precisions(self, *, experts: bool) -> tuple[str, ...]:
        """Return the recipes that it trains a model with or without ``experts`` with; empty: all."""
        return self.precisions or self.list_config_precisions(experts=experts)

    def list_joint_recomputes(self) -> list[str]:
        """Return the groups of operations that its config can only recompute together."""
        return [ac for ac in self.recomputes if "+" in ac]


class Stack(Record):
    """A training framework: its kernels, what it keeps, sends and overlaps, and the layouts that it supports."""

    name: str = "fivefold"  # as in ``--stack``
    version: str = ""  # version of the framework to which the facts apply
    family: str = "fivefold"  # stacks whose predictions have similar errors (``planner/time/errors.py``)

    # flash: the chip's fastest kernel; flash2, flash1, flash1_triton: FlashAttention-2, -1, and -1 in Triton; blocks:
    # pads heads of latent attention to one dim, as PyTorch's on CPU; unfused: materializes the scores
    attention: Attention = "flash"
    # with fp8 or fp4 matmuls, flash attention multiplies in fp8 too, and saves its inputs and its output in fp8
    # (Transformer Engine's fp8_dpa)
    fp8_attention: bool = False
    # fused: one buffer holds the logits, then their gradient; chunked: never all logits at once; plain: PyTorch's, with
    # fp32 copies; low_precision: PyTorch's in the dtype of the logits, which the caller holds until the end of the
    # backward; upcast: one fp32 copy that becomes the gradient (Megatron); upcast_copy: as upcast, with the fp32 logits
    # kept (nanotron); upcast_separate: as upcast_copy, while the caller holds the 16-bit logits too (PaddleNLP);
    # upcast_compiled: as upcast, but the gradient is a copy of the softmax (Megatron's native fusion)
    loss: Literal[
        "plain", "low_precision", "upcast", "upcast_copy", "upcast_separate", "upcast_compiled", "chunked", "fused"
    ] = "fused"
    # Norms, rotary embedding, activation and loss. fused: one kernel each, Fivefold's in Triton on GPUs, PyTorch's on
    # CPUs; triton, compiled, eager: Fivefold's, written in Triton, by torch.compile of full blocks, or as separate
    # PyTorch kernels, which save no more tensors; plain: PyTorch's under autograd, which save more; norms: as plain for
    # the activation, else fused
    kernels: Literal["fused", "triton", "compiled", "eager", "norms", "plain"] = "fused"
    # rotary embedding if other kernels are fused: also fused; separate PyTorch kernels with a concatenation of the
    # heads (Megatron's latent attention without apply_rope_fusion); or fused and in place, where queries, if each head
    # has its own key, stay in one tensor with the keys and values, of which attention saves copies (nanotron)
    rope: Literal["fused", "unfused", "in_place"] = "fused"
    compile: bool = False  # as kernels = "compiled", or blocks compiled around other kernels
    compile_loss: bool = True  # if blocks are compiled, PyTorch's loss as well (torchtitan, except at the end of 2024)
    merged_projections: bool = False  # q, k and v as one matmul, and gate and up as one (Megatron)
    # with merged projections, an adapter of q, k and v is one pair of factors, and so is that of gate and up; tensor
    # parallelism shards both factors (Megatron-Bridge). How the update of a row-parallel layer reaches the ranks:
    # all_gather, or all_to_all (a2a_experimental). none: such adapters are not modelled
    merged_adapters: Literal["none", "all_gather", "all_to_all"] = "none"
    # fused_backward: linear layers on one input are one operation, which computes one input gradient and accumulates
    # the weight gradients itself (Fivefold); separate: a layer each under autograd. ``kernel_facts.py`` lists the
    # effects
    linears: Literal["fused_backward", "separate"] = "fused_backward"
    # with fp8 matmuls, tensors saved in fp8 besides the inputs of matmuls: the input of SwiGLU, and the output of
    # attention in 12 bits (DeepSeek-V3; ``planner/counts/operations/narrow.py``)
    low_precision_saved: tuple[Literal["activation", "attention"], ...] = ()
    # scans of Fivefold's trainer run the kernels of flash-linear-attention on GPUs, where it has any (``FUSED_SCANS``);
    # else PyTorch's operations in groups of chunks. Other software runs fused kernels anyway
    fused_scans: bool = False
    # the largest temporary of a scan of PyTorch's operations, which computes as many chunks at once as it holds; by
    # default 256 MiB on GPUs, where fewer chunks at once are more launches, and 16 MiB on CPUs, whose caches hold it
    scan_temporary_bytes: Bytes | None = None
    # layers have the tokens of a micro-batch first, attention its sequences: the output of attention is copied for the
    # projection, which saves the copy, where there are several sequences (nanotron)
    transposes_attention: bool = False
    # the input of column-parallel layers under sequence parallelism, gathered over tp: freed after the forward and
    # gathered again for the weight gradients, or saved until then (PyTorch's autograd); copied: as saved, and without
    # sequence parallelism each layer that all-reduces its input gradient copies the input and saves the copy (Paddle)
    column_inputs: Literal["regathered", "saved", "copied"] = "regathered"
    # without sequence parallelism, the number of all-reduces of the gradient of attention's input, and of the MLP's:
    # one, or as many as column-parallel layers read it, if each reduces the gradient that it computes
    input_grad_all_reduces: tuple[AllReduces, AllReduces] = (1, 1)
    # tensor-parallel gathers and reductions over sequences, the second dimension of a micro-batch of several: in place,
    # or copied out of a buffer and into one (PyTorch's functional collectives, which send along the first dimension)
    tp_buffers: Literal["in_place", "copied"] = "in_place"
    # separate: a weight gradient is a tensor until it is added to the accumulated gradient; fused: the matmul
    # accumulates it into a buffer that is allocated from the start (Megatron); fused_dummy: as fused, with an unused
    # gradient of each shape (Transformer Engine); deferred: all are kept until the backward ends, then added to buffers
    # allocated from the start; deferred_buckets: as deferred, and copied for their reduction (nanotron); ddp_buckets:
    # as separate, where the first backward allocates the accumulated gradients, and copied into permanent buckets of 25
    # MiB, the first of 1 MiB (PyTorch's DistributedDataParallel)
    wgrad_accumulation: Literal["separate", "deferred", "deferred_buckets", "ddp_buckets", "fused", "fused_dummy"] = (
        "separate"
    )
    # dtype in which messages of data parallelism reduce gradients: that in which they are accumulated; that of the
    # backward (DeepSpeed, whose buckets have it too); or fp32, to which a bucket is cast for its message, and back
    # (Aleph Alpha; DeepSpeed's communication_data_type)
    reduce_dtype: Literal["summed", "backward", "fp32"] = "summed"
    # dtype of a rank's shard of reduced gradients: that of the reduction, or that of the weights that the optimizer
    # updates, to which each unit's are cast when they are reduced (PyTorch's FSDP)
    reduced_gradients: Literal["summed", "updated"] = "summed"
    # what the update copies to one flat tensor: a rank's gradients, in their dtype and in fp32 (DeepSpeed), or all
    # weights as they are gathered (nanotron)
    flat_copies: tuple[Literal["gradients", "weights"], ...] = ()
    # memory of tensor-parallel messages that overlap (async_tp) is reused only when the device has sent them, while the
    # host runs a pass ahead (PyTorch's NCCL process groups hold by record_stream what they send asynchronously)
    run_ahead: bool = False
    # CUDA graphs, which replace host launches: of the router, of all but the experts and their messages (Megatron's
    # scopes moe_router and moe_preprocess, and attn), or of the full step
    cuda_graphs: Literal["none", "router", "partial", "full"] = "none"
    # kernels that the host launches for a block in addition to its operations, in forward and backward: masks, copies
    # of views, accumulation of each weight's gradient
    extra_kernels: tuple[Launches, Launches] = (0, 0)
    # launches of the host for each weight after the backward, to clip its gradient and to update it, if the host has
    # waited for the backward and updates weight by weight; 0: a few for all weights at once (fused optimizers)
    update_kernels: Launches = 0
    # the weights of a unit are sharded as one flat tensor, so that a rank updates parts of few of them (PyTorch's
    # FullyShardedDataParallel), or each by itself
    flat_shards: bool = False
    # fused: a token is sent once to each rank that needs it and sorted by expert on the way (DeepEP, HybridEP)
    dispatcher: Literal["all_to_all", "fused"] = "all_to_all"
    # fused: kernels of their own permute tokens to experts and sum what returns (Transformer Engine, Fivefold);
    # scatter_add: torch.gather and torch.scatter_add, which adds element by element, also for the gather's gradient
    # (torchtitan's experts in 2025; PyTorch has had a faster kernel for rows since May 2026)
    token_permutation: Literal["fused", "scatter_add"] = "fused"
    pairs: bool = False  # overlaps the forward of one micro-batch with the backward of another to hide ep messages
    overlap: tuple[Axis, ...] = ("dp", "cp", "ep", "pp")  # axes whose messages overlap with compute on GPUs
    # schedules under which messages between stages overlap with compute, if ``overlap`` contains pp
    p2p_overlap: Literal["any", "interleaved"] = "any"
    # gradients of ZeRO-2 and -3 are reduced to their shards once per step, or after every backward; unpipelined: after
    # every backward, but once per step with a pipeline (PyTorch, whose stages defer it to their last backward)
    reduce: Reduce = "micro_batch"
    # when ZeRO-3 frees gathered weights: after each forward and backward, or only after the backward, so that they are
    # gathered once for both (FSDP2's reshard_after_forward=False)
    reshard: Literal["forward", "backward"] = "forward"
    # what ZeRO-3 gathers again for the backward: the units that need it, or all, including the embedding, whose
    # backward does not use its weights (FSDP2's pre-backward hooks); root: as all, but without a pipeline embedding and
    # head are one unit, which stays gathered from its forward to its backward (accelerate's FSDP2)
    backward_all_gather: Literal["needed", "all", "root"] = "needed"
    # freed: buffers of a unit's messages are allocated only while these are in flight; retained: as the host allocates
    # and frees them, on CPUs too (FSDP2). The output of a gather is kept next to the weights copied from it until the
    # next unit's has arrived, and in a backward it is allocated from the start of the previous unit; gradients of a
    # unit are kept until all are computed, and their copy for the reduction until the next unit's is made
    comm_buffers: Literal["freed", "retained"] = "freed"
    # shards of ZeRO-2. view: of the weights, which stay gathered from step to step; separate: a tensor of its
    # own, and weights are gathered for each forward and its backward, with a pipeline for each step (FSDP2 with
    # reshard_after_forward=False)
    zero2_shards: Literal["view", "separate"] = "view"
    # units: gathers as FSDP; weights: gathers and prefetches by modules, as DeepSpeed's coordinator
    # (``planner/counts/parameter_prefetch.py``), within the limits in elements that follow: prefetched at once, size of
    # weights that are never freed, distance to the next use below which a weight is not freed, and gathered in total
    zero3_gather: Literal["units", "weights"] = "units"
    prefetch_bucket_size: Elements = 50_000_000  # DeepSpeed's stage3_prefetch_bucket_size
    param_persistence_threshold: Elements = 100_000  # DeepSpeed's stage3_param_persistence_threshold
    max_reuse_distance: Elements = 1_000_000_000  # DeepSpeed's stage3_max_reuse_distance
    max_live_parameters: Elements = 1_000_000_000  # DeepSpeed's stage3_max_live_parameters
    # elements of a rank's shards that ZeRO-3 updates at once, of whose gradients there is a copy meanwhile (DeepSpeed's
    # sub_group_size); 0: all
    update_group_size: Elements = 0
    # elements of gradients that are reduced at once, unsharded under ZeRO-1 and -2, in an additional buffer
    # (DeepSpeed); 0: unit by unit, or as ``wgrad_accumulation`` says
    reduce_bucket: Elements = 0
    # elements of gradients that are reduced, and of weights that are gathered, in one message, and for each rank of the
    # group, if these are more (Megatron's DistributedDataParallel; all of them if dp does not overlap); 0, 0: by unit
    ddp_bucket_size: tuple[Elements, Elements] = (0, 0)
    # gradients of weights that are replicated over tensor parallelism are all_reduced over it unit by unit, or weight
    # by weight (DTensor)
    replicated_grad_reduce: Literal["unit", "weight"] = "unit"
    # a pipeline stage frees its output after sending it, or holds it (in the last stage: the logits) until the backward
    # of that micro-batch (PyTorch)
    stage_outputs: Literal["freed", "retained"] = "freed"
    # kept between B and W of a split backward: operands of the deferred weight gradients; or the graph: all that the
    # forward saved below the last weight, and the gradient of each operation on weights, while the first stage defers
    # all of its backward (PyTorch)
    deferred_wgrad: Literal["operands", "graph"] = "operands"
    # what a stage receives is kept while it is needed, or in permanent buffers for every micro-batch of a step, as are
    # the gradients of its inputs once they are computed (PyTorch)
    recv_buffers: Literal["freed", "preallocated"] = "freed"
    reduce_in_fp32: bool = True  # else gradients that a recipe accumulates in fp32 are kept and reduced in 16 bits
    # when updated weights of ZeRO-1 and -2 are sent to other ranks. overlapped: during the forward, before each unit
    # needs them; before_forward: all; broadcast: before the forward, full tensors by each owner in turn (InternEvo)
    param_all_gather: Literal["overlapped", "before_forward", "broadcast"] = "overlapped"
    # overlaps the second gather of a column-parallel layer's input, for its weight gradient, with the product of the
    # input gradient (sequence parallelism in Megatron-LM, arXiv:2205.05198 §4.2.2), and the reduce-scatter of the input
    # gradient, or without sequence parallelism its all-reduce, with the product of the weight gradient
    async_tp: bool = False
    # the host waits for every kernel (CUDA_LAUNCH_BLOCKING=1), which adds its time to theirs
    launch_blocking: bool = False
    # NCCL connects a ring, a tree or a peer, and allocates its buffers, when it is first used (NCCL_RUNTIME_CONNECT, on
    # since NCCL 2.22, which PyTorch has since 2.7); else every ring and tree when a communicator is made
    runtime_connect: bool = True
    # with a pipeline, groups whose ranks have a second NCCL communicator, with buffers of its own (DeepSpeed's grid
    # next to Megatron's groups)
    second_communicators: tuple[MeshAxis | Literal["world"], ...] = ()
    # without sequence parallelism, each tensor-parallel rank sends 1/tp of the residual stream to the next pipeline
    # stage, which gathers it (Megatron-LM, arXiv:2104.04473 §4.1; DeepSpeed); else every rank sends all of it
    scatter_gather_tensors: bool = False
    # recomputation ends with the last operation whose result the backward needs (Fivefold, and PyTorch's non-reentrant
    # checkpoints); else the full layer runs again (Megatron, torchtitan), unless its block is compiled
    early_stop: bool = True
    vocab_multiple: Multiple = 1  # the vocabulary is padded to a multiple of this times tp
    expandable_segments: bool = False  # option of PyTorch's CUDA allocator (PYTORCH_CUDA_ALLOC_CONF)

    runs: SupportedLayouts = SupportedLayouts(offloads=("optimizer",))  # layouts that the framework supports

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        """Raise a ``ValueError`` for fields that contradict each other."""
        if self.compile and self.kernels == "eager":
            raise ValueError("compile=true compiles what kernels='eager' runs one by one; drop either")
        if self.fp8_attention and self.attention != "flash":
            raise ValueError(f"fp8_attention is a kernel of its own; use attention='flash', not {self.attention!r}")
        if self.linears == "fused_backward" and self.column_inputs != "regathered":
            raise ValueError(
                "linears='fused_backward' gathers inputs again for dW; "
                f"column_inputs={self.column_inputs!r} needs linears='separate'"
            )
        if self.reduce_dtype == "fp32" and not self.reduce_bucket:
            raise ValueError("reduce_dtype='fp32' casts buckets of gradients; set reduce_bucket, or use 'summed'")
        return self

    @property
    def is_own_trainer(self) -> bool:
        """Tell whether the software is Fivefold's trainer."""
        return self.name == "fivefold"

    @property
    def updates_in_blocks(self) -> bool:
        """Tell whether optimizers convert weights and gradients block by block, to fp32 or on their way to the host.

        Fused kernels of other software convert in registers: PyTorch's, and bitsandbytes'.
        """
        return self.is_own_trainer

    @property
    def has_frozen_stages(self) -> bool:
        """Tell whether it is known what a pipeline does in stages that have no backward."""
        return self.is_own_trainer

    @property
    def can_compile_blocks(self) -> bool:
        """Tell whether torch.compile is an option of the software that is not set yet."""
        return self.family == "torch" and self.kernels == "plain" and not self.is_compiled

    @property
    def kernel_facts(self) -> KernelFacts:
        """Return the properties of its kernels, which follow from the kind of its linear layers."""
        return FIVEFOLD if self.linears == "fused_backward" else AUTOGRAD

    def launches_scan(self, mixer: MixerName) -> bool:
        """Tell whether a scan is PyTorch's operations, which the host launches one after another."""
        return self.kernel_facts.separate_adds and not (self.fused_scans and mixer in FUSED_SCANS)

    @property
    def loss_facts(self) -> LossFacts:
        """Return the properties of its kind of loss."""
        return LOSSES[self.loss]

    @property
    def attention_facts(self) -> AttentionFacts:
        """Return the properties of its kind of attention kernels."""
        return ATTENTIONS[self.attention]

    @property
    def merges_adapters(self) -> bool:
        """Tell whether linear layers that are one matmul have one pair of factors of an adapter."""
        return self.merged_projections and self.merged_adapters != "none"

    @property
    def offloads_with_parameters(self) -> bool:
        """Tell whether offloaded parameters take gradients and optimizer states with them (FSDP2's CPUOffloadPolicy).

        DeepSpeed offloads the parameters (``offload_param``) and the optimizer (``offload_optimizer``) separately.
        """
        return self.zero3_gather == "units"

    @property
    def adds_in_wgrad(self) -> bool:
        """Tell whether the matmul of a weight gradient adds it to the accumulated gradient (Megatron)."""
        return self.wgrad_accumulation in ("fused", "fused_dummy")

    @property
    def copies_comm_buffers(self) -> bool:
        """Tell whether kernels copy between the buffers of data-parallel messages and weights or gradients.

        PyTorch's FSDP2 copies both, its FSDP gradients (the backward of splitting a flat tensor concatenates them), and
        its DistributedDataParallel gradients to buckets and back. Buckets may be cast for their messages.
        """
        copies = self.comm_buffers == "retained" or self.flat_shards or self.wgrad_accumulation == "ddp_buckets"
        return copies or self.reduce_dtype == "fp32"

    @property
    def is_compiled(self) -> bool:
        """Tell whether torch.compile generates the kernels of the blocks."""
        return self.compile or self.kernels == "compiled"

    @property
    def compiles_loss(self) -> bool:
        """Tell whether torch.compile fuses PyTorch's loss to one kernel, and its backward to another."""
        return self.is_compiled and self.compile_loss

    @property
    def drops_unused_recomputation(self) -> bool:
        """Tell whether recomputation leaves out operations whose results the backward does not need.

        Compiled blocks leave them out whatever ``early_stop`` says: nothing in the graph of the backward reads them.
        """
        return self.early_stop or self.is_compiled

    def with_device_kernels(self, *, gpu: bool) -> Self:
        """Return the stack on GPUs or CPUs, with Fivefold's ``fused`` kernels replaced by those that run there."""
        changes: dict[str, Any] = {}
        if self.is_own_trainer and self.kernels == "fused":
            changes["kernels"] = "compiled" if self.compile else "triton" if gpu else "eager"
        if self.kernel_facts.separate_adds and self.scan_temporary_bytes is None:
            changes["scan_temporary_bytes"] = GPU_TEMPORARY_BYTES if gpu else CPU_TEMPORARY_BYTES
        return self.replace(**changes) if changes else self

    def overlaps_p2p(self, schedule: ScheduleName) -> bool:
        """Tell whether messages between pipeline stages overlap with compute under ``schedule``."""
        return "pp" in self.overlap and (self.p2p_overlap == "any" or PIPELINE_SCHEDULES[schedule].is_interleaved)


FACTS = frozenset(Stack.model_fields) - {"name", "version", "family", "runs"}  # fields that a job may change one by one

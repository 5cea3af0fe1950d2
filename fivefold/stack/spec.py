"""The stack as a record: the software that runs a job, as far as memory, work, messages and time depend on it.

The defaults are this engine's. A fact that a named stack states otherwise has its source in its entry (``catalog.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fivefold.bounded_types import Elements, Multiple
from fivefold.layout.names import DEFAULT_ORDER, Axis, CpKind, MeshAxis
from fivefold.layout.schedule.pipeline_schedule import PIPELINE_SCHEDULES, SCHEDULES, ScheduleName
from fivefold.record import Record
from fivefold.stack.kernel_facts import AUTOGRAD, FIVEFOLD, KernelFacts

Attention = Literal["flash", "flash2", "flash1", "blocks", "unfused"]
Reduce = Literal["step", "micro_batch", "unpipelined"]
ZeroStage = Annotated[int, Field(ge=0, le=3)]
Launches = Annotated[int, Field(ge=0, le=1000)]


class Runs(Record):
    """The layouts that a stack can run."""

    axes: tuple[Axis, ...] = ("dp", "tp", "cp", "ep", "pp")  # whose degree may exceed 1
    schedules: tuple[ScheduleName, ...] = SCHEDULES  # pipeline schedules
    zero: tuple[ZeroStage, ...] = (0, 1, 2, 3)  # ZeRO stages
    pipelined_zero: tuple[ZeroStage, ...] = (0, 1, 2, 3)  # of these, with pp > 1
    shard_groups: bool = True  # ZeRO within groups of replicas (zero3/8)
    cp_kinds: tuple[CpKind, ...] = ("ring", "ulysses")  # kinds of context parallelism
    expert_tensor: bool = True  # etp smaller than tp, or larger than 1
    no_sp: bool = True  # tensor parallelism without sequence parallelism
    uneven_stages: bool = True  # stages with different numbers of layers
    orders: bool | tuple[str, ...] = True  # any order of the axes over the ranks; or these beside the usual one
    # What its config can be told to recompute: full, full/n, and groups of operations, some of them in models with
    # experts alone; empty: all. The search takes no other; any is predicted, as some configs are read for the nearest.
    recomputes: tuple[str, ...] = ()
    expert_recomputes: tuple[str, ...] = ()  # further groups, in models with experts alone
    experts_as_mlp: bool = False  # told likewise: etp is tp without ep, and 1 with it
    told_axes: tuple[Axis, ...] = ()  # told likewise: of ``axes``; empty: all
    told_zero: tuple[ZeroStage, ...] = ()  # told likewise, with pp = 1: of ``zero``; empty: all
    cp_shards: bool = False  # told likewise: weights are sharded over all of cp: no ZeRO-0 beside it, and whole groups

    def zero_with(self, pp: int) -> tuple[ZeroStage, ...]:
        """The ZeRO stages beside ``pp`` pipeline ranks."""
        return tuple(stage for stage in self.zero if pp == 1 or stage in self.pipelined_zero)

    def orders_like(self, order: Sequence[MeshAxis]) -> bool:
        """Whether the ranks may be in this order of the axes."""
        if isinstance(self.orders, bool):
            return self.orders or tuple(order) == DEFAULT_ORDER
        return tuple(order) == DEFAULT_ORDER or "-".join(order) in self.orders

    def zero_told(self, pp: int, cp: int = 1) -> tuple[ZeroStage, ...]:
        """Of ``zero_with`` those that the config can be told, beside ``cp`` ranks of a sequence."""
        among = self.told_zero if pp == 1 and self.told_zero else self.zero
        least = 1 if self.cp_shards and cp > 1 else 0
        return tuple(stage for stage in self.zero_with(pp) if stage in among and stage >= least)

    def shards_told(self, shards: int, cp: int) -> bool:
        """Whether the config can be told shard groups of ``shards`` replicas beside ``cp`` ranks of a sequence."""
        return not self.cp_shards or shards % cp == 0

    def told(self, ac: str, *, experts: bool) -> bool:
        """Whether the config has words for a recomputation, of a model with ``experts`` or without."""
        if ac == "none" or not self.recomputes:
            return True
        if "@" in ac:
            return False
        known = self.recomputes + (self.expert_recomputes if experts else ())
        if ac.startswith("full"):
            return ("full/n" if "/" in ac else "full") in known
        return all(group in known for group in (["core"] if ac == "selective" else ac.split("+")))


class Stack(Record):
    """A training software: its kernels, what it keeps, sends and hides, and what it can run."""

    name: str = "fivefold"  # as in ``--stack``
    version: str = ""  # of the software that the facts are of
    family: str = "fivefold"  # stacks whose predictions have similar errors (``planner/time/errors.py``)

    # flash: the chip's fastest; flash2, flash1: FlashAttention-2 and -1 (also in Triton); blocks: pads heads of latent
    # attention to one dim, as PyTorch's on CPU; unfused: scores written out
    attention: Attention = "flash"
    # fused: the logits exist once and become their gradient; chunked: never whole; plain: PyTorch's, with fp32 copies;
    # narrow: PyTorch's in the logits' dtype, which the caller holds until the end of the backward; widened: one fp32
    # copy that becomes its own gradient (Megatron); copied: as widened, but beside the fp32 logits (nanotron)
    loss: Literal["plain", "narrow", "widened", "copied", "chunked", "fused"] = "fused"
    # Norms, rotary embedding, activation and loss. fused: a kernel each, in our engine Triton's on GPUs and PyTorch's
    # on CPUs (``on``); triton, compiled, eager: ours, written in Triton, by torch.compile of whole blocks, or as
    # PyTorch's kernels one by one, which keep no more; plain: PyTorch's under autograd, which keep more; norms: so the
    # activation alone
    kernels: Literal["fused", "triton", "compiled", "eager", "norms", "plain"] = "fused"
    # rotary embedding where other kernels are fused: one of them, or PyTorch's one by one, with the concatenation of
    # the heads (Megatron's latent attention without apply_rope_fusion)
    rope: Literal["fused", "apart"] = "fused"
    compile: bool = False  # as kernels = "compiled", or blocks compiled around other kernels
    compile_loss: bool = True  # where blocks are compiled, PyTorch's loss as well (torchtitan, but at the end of 2024)
    joint: bool = False  # q, k and v as one matmul, and gate and up as one (Megatron)
    # fanned: linear layers on one input are one operation, which makes one gradient of it and adds each weight's to the
    # sums itself (ours); apart: each for itself, under autograd. What comes with them: ``kernel_facts.py``
    linears: Literal["fanned", "apart"] = "fanned"
    # with fp8 matmuls, what beside their inputs is kept in fp8: the input of SwiGLU, and the output of attention in 12
    # bits (DeepSeek-V3; ``planner/counts/operations/narrow.py``)
    narrow_kept: tuple[Literal["activation", "attention"], ...] = ()
    # the input of column-parallel layers under sequence parallelism, gathered over tp: freed after the forward and
    # gathered again for the gradients of their weights, or kept until then (PyTorch's autograd, which knows no better)
    column_inputs: Literal["regathered", "kept"] = "regathered"
    # apart: a weight's gradient is a tensor until it is added to the sums; summed: the matmul adds it itself, and the
    # sums live from the start (Megatron); placeholders: and an unused gradient of each shape lives (Transformer
    # Engine); late: all live until the backward has ended, and then are added to sums that live from the start;
    # buckets: late, and copied for their reduction (nanotron); bucketed: apart, in sums that the first backward makes,
    # and copied into buckets of 25 MiB, the first of 1, that live throughout (PyTorch's DistributedDataParallel)
    weight_gradients: Literal["apart", "late", "buckets", "bucketed", "summed", "placeholders"] = "apart"
    # what the update joins to one tensor: a rank's gradients, as they are and widened (DeepSpeed), or all weights, as
    # they are gathered (nanotron)
    joined: tuple[Literal["gradients", "weights"], ...] = ()
    # what tensor parallelism sends is used again only when the device has sent it, and the host is a pass ahead
    # (PyTorch's record_stream, by which its NCCL groups hold what they send)
    run_ahead: bool = False
    # CUDA graphs spare the host its launches: of the choice of experts, of all but the experts and their messages
    # (Megatron's scopes moe_router and moe_preprocess; attn besides), or of the whole step
    graphs: Literal["none", "router", "partial", "full"] = "none"
    # kernels that the host launches for a block beside those of its operations, forward and backward: masks, copies of
    # views, sums of gradients weight by weight
    further_kernels: tuple[Launches, Launches] = (0, 0)
    # fused: a token goes once to each rank that wants it, sorted by expert underway (DeepEP, HybridEP)
    dispatcher: Literal["all_to_all", "fused"] = "all_to_all"
    pairs: bool = False  # one micro-batch's forward beside another's backward: each hides the other's ep messages
    overlap: tuple[Axis, ...] = ("dp", "cp", "ep", "pp")  # axes whose messages run beside compute, on GPUs
    # under which schedules messages between stages run beside compute, where ``overlap`` names pp
    p2p_overlap: Literal["any", "interleaved"] = "any"
    # gradients of ZeRO-2 and -3 go to their shards once a step, or after every backward; unpipelined: after every one,
    # but with a pipeline once (PyTorch's, whose stages defer it to their last)
    reduce: Reduce = "micro_batch"
    # after what ZeRO-3 frees gathered weights: each forward and backward, or each backward alone, so that they are
    # gathered once for both and stay meanwhile (FSDP2's reshard_after_forward=False)
    reshard: Literal["forward", "backward"] = "forward"
    # of what ZeRO-3 frees after the forward, it gathers again what the backward needs, or every unit: the embedding
    # too, whose backward needs no weights (FSDP2's pre-backward hooks); root: as all, but embedding and head are one
    # unit without a pipeline, which stays gathered from its forward to its backward (accelerate's FSDP2)
    gathers_again: Literal["needed", "all", "root"] = "needed"
    # what a unit's messages bring and take lives while they travel; or as the host allocates and lets go of it, on CPUs
    # too: what a gather brought lives beside the weights copied from it until the next unit's has come, in a backward
    # ahead of them from the start of the unit before; a unit's gradients until all are made, and their copy for the
    # reduction until the next unit's is made (FSDP2)
    unit_buffers: Literal["let_go", "held"] = "let_go"
    # of ZeRO-2: a rank's shard lies within the weights, which stay gathered from step to step; or it alone stays, and
    # beside it weights are gathered for each forward and its backward, with a pipeline for a step (FSDP2 with
    # reshard_after_forward=False)
    shards: Literal["within", "beside"] = "within"
    # units: as in FSDP; weights: by modules, and ahead, as DeepSpeed's coordinator does
    # (``planner/counts/parameter_prefetch.py``), within these numbers of elements: gathered ahead at once, of a weight
    # that is never freed, until a weight is used again that is not freed meanwhile, and gathered at most
    fetch: Literal["units", "weights"] = "units"
    fetch_ahead: Elements = 50_000_000  # DeepSpeed's stage3_prefetch_bucket_size
    fetch_small: Elements = 100_000  # DeepSpeed's stage3_param_persistence_threshold
    fetch_reuse: Elements = 1_000_000_000  # DeepSpeed's stage3_max_reuse_distance
    fetch_live: Elements = 1_000_000_000  # DeepSpeed's stage3_max_live_parameters
    # elements of gradients that are reduced at once, whole under ZeRO-1 and -2, in a buffer that lives beside them
    # (DeepSpeed); 0: unit by unit, or as ``weight_gradients`` says
    reduce_bucket: Elements = 0
    # gradients of weights that tensor parallelism does not cut are summed over it unit by unit, or weight by weight
    # (DTensor)
    copies: Literal["unit", "weight"] = "unit"
    # a stage of a pipeline lets go of what it has sent on, or holds its output, the logits of the last, until the
    # backward of that micro-batch (PyTorch's)
    outputs: Literal["let_go", "held"] = "let_go"
    # between the halves of a split backward live the operands of the weight gradients that are put off; or the graph:
    # all that the forward kept below the last weight, and the gradient of each operation on weights, while the first
    # stage puts off all of its backward (PyTorch's)
    deferred: Literal["operands", "graph"] = "operands"
    # what a stage receives lives while it is needed, or in buffers of every micro-batch of a step, throughout, as the
    # gradients of its inputs do once they are made (PyTorch's)
    received: Literal["let_go", "held"] = "let_go"
    reduce_in_fp32: bool = True  # else a recipe's fp32 sums of gradients are kept and reduced in 16 bits
    # updated weights of ZeRO-1 and -2 reach the other ranks ahead: beside the forward, before each unit needs them;
    # at_once: before the forward; broadcast: at once, each owner hands out whole tensors in turn (InternEvo)
    weights: Literal["ahead", "at_once", "broadcast"] = "ahead"
    # the input of a column-parallel layer, gathered once more for the gradient of its weight, travels beside the
    # product that makes the gradient of the input (sequence parallelism in Megatron-LM, arXiv:2205.05198 §4.2.2)
    async_tp: bool = False
    blocking: bool = False  # the host waits for every kernel (CUDA_LAUNCH_BLOCKING=1), so that its time adds to theirs
    # without sequence parallelism, each tensor-parallel rank sends its part of the stream to the next pipeline stage,
    # which gathers it (Megatron-LM, arXiv:2104.04473 §4.1; DeepSpeed); else every rank sends the whole
    scatter_hops: bool = False
    # recomputation ends with the last operation whose result the backward asks for (ours, and PyTorch's non-reentrant
    # checkpoints); else the whole layer runs again (Megatron)
    early_stop: bool = True
    vocab_multiple: Multiple = 1  # the vocabulary is padded to a multiple of this times tp
    expandable_segments: bool = False  # of PyTorch's CUDA allocator (PYTORCH_CUDA_ALLOC_CONF)

    runs: Runs = Runs()  # layouts that the software can run

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.compile and self.kernels == "eager":
            raise ValueError("compile=true compiles what kernels='eager' runs one by one; drop either")
        if self.linears == "fanned" and self.column_inputs == "kept":
            raise ValueError(
                "linears='fanned' gather their input again for dW; column_inputs='kept' needs linears='apart'"
            )
        return self

    @property
    def kernel_facts(self) -> KernelFacts:
        """What its kernels do, by whose linear layers they are."""
        return FIVEFOLD if self.linears == "fanned" else AUTOGRAD

    @property
    def compiles(self) -> bool:
        """Whether torch.compile makes the kernels of the blocks."""
        return self.compile or self.kernels == "compiled"

    @property
    def compiles_loss(self) -> bool:
        """Whether torch.compile makes one kernel of PyTorch's loss, and one of its backward."""
        return self.compiles and self.compile_loss

    def on(self, *, gpu: bool) -> Stack:
        """The stack on GPUs or CPUs: our engine's ``fused`` kernels under the name of those that run there."""
        if self.name != "fivefold" or self.kernels != "fused":
            return self
        return self.replace(kernels="compiled" if self.compile else "triton" if gpu else "eager")

    def hides_p2p(self, schedule: ScheduleName) -> bool:
        """Whether messages between pipeline stages run beside compute under ``schedule``."""
        return "pp" in self.overlap and (self.p2p_overlap == "any" or PIPELINE_SCHEDULES[schedule].interleaves)


FACTS = frozenset(Stack.model_fields) - {"name", "version", "family", "runs"}  # which a job may change one by one

"""The keyword arguments that state a job, with their types, for type checkers and editors.

It is written from the records of a job and a stack by FIVEFOLD_FREEZE=1 python -m pytest tests/api/test_job_words.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from fivefold.job import Job


class JobWords(TypedDict, total=False):
    """The fields of a job. The others override ``job``, a .toml file, a mapping or a ``Job``. None: not given."""

    job: str | PathLike[str] | Mapping[str, Any] | Job | None
    stack: str | Mapping[str, Any] | None
    seq: int | None
    gbs: int | None
    precision: str | Mapping[str, Any] | None
    optimizer: str | Mapping[str, Any] | None
    adapter: str | Mapping[str, Any] | None
    attention: Literal["flash", "flash2", "flash1", "flash1_triton", "blocks", "unfused"] | None
    sequence: int
    global_batch: int
    objective: Literal["pretrain", "sft", "dpo"]
    dpo_beta: float
    documents: Literal["joined", "separate"]
    emulate: bool
    imbalance: float
    offload: Sequence[Literal["optimizer", "activations", "parameters"]]
    learning_rate: Mapping[str, Any]
    ramp: Mapping[str, Any] | None
    freeze: Sequence[str]
    images: int
    image_tokens: int | None
    freeze_vision_tower: bool
    freeze_projector: bool
    steps: int
    seed: int
    fp8_attention: bool
    loss: Literal[
        "plain", "low_precision", "upcast", "upcast_copy", "upcast_separate", "upcast_compiled", "chunked", "fused"
    ]
    kernels: Literal["fused", "triton", "compiled", "eager", "norms", "plain"]
    rope: Literal["fused", "unfused", "in_place"]
    compile: bool
    compile_loss: bool
    merged_projections: bool
    merged_adapters: Literal["none", "all_gather", "all_to_all"]
    linears: Literal["fused_backward", "separate"]
    low_precision_saved: Sequence[Literal["activation", "attention"]]
    fused_scans: bool
    scan_temporary_bytes: int | None
    transposes_attention: bool
    column_inputs: Literal["regathered", "saved", "copied"]
    input_grad_all_reduces: Sequence[int]
    tp_buffers: Literal["in_place", "copied"]
    wgrad_accumulation: Literal["separate", "deferred", "deferred_buckets", "ddp_buckets", "fused", "fused_dummy"]
    reduce_dtype: Literal["summed", "backward", "fp32"]
    reduced_gradients: Literal["summed", "updated"]
    flat_copies: Sequence[Literal["gradients", "weights"]]
    run_ahead: bool
    cuda_graphs: Literal["none", "router", "partial", "full"]
    extra_kernels: Sequence[int]
    update_kernels: int
    flat_shards: bool
    dispatcher: Literal["all_to_all", "fused"]
    token_permutation: Literal["fused", "scatter_add"]
    pairs: bool
    overlap: Sequence[Literal["dp", "tp", "cp", "ep", "pp"]]
    p2p_overlap: Literal["any", "interleaved"]
    reduce: Literal["step", "micro_batch", "unpipelined"]
    reshard: Literal["forward", "backward"]
    backward_all_gather: Literal["needed", "all", "root"]
    comm_buffers: Literal["freed", "retained"]
    zero2_shards: Literal["view", "separate"]
    zero3_gather: Literal["units", "weights"]
    prefetch_bucket_size: int
    param_persistence_threshold: int
    max_reuse_distance: int
    max_live_parameters: int
    update_group_size: int
    reduce_bucket: int
    ddp_bucket_size: Sequence[int]
    replicated_grad_reduce: Literal["unit", "weight"]
    stage_outputs: Literal["freed", "retained"]
    deferred_wgrad: Literal["operands", "graph"]
    recv_buffers: Literal["freed", "preallocated"]
    reduce_in_fp32: bool
    param_all_gather: Literal["overlapped", "before_forward", "broadcast"]
    async_tp: bool
    launch_blocking: bool
    runtime_connect: bool
    second_communicators: Sequence[Literal["tp", "cp", "dp", "pp"] | Literal["world"]]
    scatter_gather_tensors: bool
    early_stop: bool
    vocab_multiple: int
    expandable_segments: bool

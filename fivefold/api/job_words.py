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
    attention: Literal["flash", "flash2", "flash1", "blocks", "unfused"] | None
    sequence: int
    global_batch: int
    documents: Literal["joined", "apart"]
    emulate: bool
    imbalance: float
    offload: Sequence[Literal["optimizer", "activations"]]
    optimizer: Mapping[str, Any]
    learning_rate: Mapping[str, Any]
    ramp: Mapping[str, Any] | None
    steps: int
    seed: int
    loss: Literal["plain", "narrow", "widened", "copied", "chunked", "fused"]
    kernels: Literal["fused", "triton", "compiled", "eager", "norms", "plain"]
    rope: Literal["fused", "apart"]
    compile: bool
    compile_loss: bool
    joint: bool
    linears: Literal["fanned", "apart"]
    narrow_kept: Sequence[Literal["activation", "attention"]]
    column_inputs: Literal["regathered", "kept"]
    weight_gradients: Literal["apart", "late", "buckets", "bucketed", "summed", "placeholders"]
    joined: Sequence[Literal["gradients", "weights"]]
    run_ahead: bool
    graphs: Literal["none", "router", "partial", "full"]
    further_kernels: Sequence[int]
    dispatcher: Literal["all_to_all", "fused"]
    pairs: bool
    overlap: Sequence[Literal["dp", "tp", "cp", "ep", "pp"]]
    p2p_overlap: Literal["any", "interleaved"]
    reduce: Literal["step", "micro_batch", "unpipelined"]
    reshard: Literal["forward", "backward"]
    gathers_again: Literal["needed", "all", "root"]
    unit_buffers: Literal["let_go", "held"]
    shards: Literal["within", "beside"]
    fetch: Literal["units", "weights"]
    fetch_ahead: int
    fetch_small: int
    fetch_reuse: int
    fetch_live: int
    reduce_bucket: int
    copies: Literal["unit", "weight"]
    outputs: Literal["let_go", "held"]
    deferred: Literal["operands", "graph"]
    received: Literal["let_go", "held"]
    reduce_in_fp32: bool
    weights: Literal["ahead", "at_once", "broadcast"]
    async_tp: bool
    blocking: bool
    scatter_hops: bool
    early_stop: bool
    vocab_multiple: int
    expandable_segments: bool

"""The words that say a job, as keyword arguments: those of the command line, then any field of ``Job``.

``ff.predict(…, seq=8192, gbs=64, precision="fp8", optimizer={"kind": "muon"}, loss="chunked")``
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from fivefold.record import Mistake

if TYPE_CHECKING:
    from fivefold.job import Job
    from fivefold.stack.spec import Attention


class JobWords(TypedDict, total=False):
    """``job``: a .toml file, a table of fields or a ``Job``, over which the others count; None says nothing."""

    job: str | PathLike[str] | Mapping[str, Any] | Job | None
    stack: str | Mapping[str, Any] | None  # the software that runs it: fivefold, megatron-core, torchtitan, …
    seq: int | None  # tokens per sequence
    gbs: int | None  # sequences per optimizer step
    precision: str | Mapping[str, Any] | None  # fp32, bf16, bf16-grad16, fp16, fp8, mxfp8, …
    attention: Attention | None
    # as ``--set FIELD=VALUE``: the other fields of a job
    sequence: int
    global_batch: int
    documents: Literal["joined", "apart"]
    emulate: bool
    imbalance: float
    offload: Sequence[str]
    optimizer: Mapping[str, Any]
    learning_rate: Mapping[str, Any]
    ramp: Mapping[str, Any] | None
    steps: int
    seed: int
    # of its stack
    loss: str
    kernels: str
    rope: str
    compile: bool
    compile_loss: bool
    joint: bool
    linears: str
    narrow_kept: Sequence[str]
    column_inputs: str
    gathers_again: str
    unit_buffers: str
    shards: str
    fetch: str
    fetch_ahead: int
    fetch_small: int
    fetch_reuse: int
    fetch_live: int
    reduce_bucket: int
    copies: str
    outputs: str
    deferred: str
    received: str
    weight_gradients: str
    joined: Sequence[str]
    run_ahead: bool
    further_kernels: Sequence[int]
    graphs: str
    dispatcher: str
    pairs: bool
    overlap: Sequence[str]
    p2p_overlap: str
    reduce: str
    reshard: str
    reduce_in_fp32: bool
    weights: str
    async_tp: bool
    blocking: bool
    scatter_hops: bool
    early_stop: bool
    vocab_multiple: int
    expandable_segments: bool


SHORT = {"seq": "sequence", "gbs": "global_batch"}


def job_of(words: Mapping[str, Any]) -> Job:
    """The job that keyword arguments say; a ``Mistake`` for an unknown field, or for one that is said twice."""
    from pathlib import Path

    from fivefold.job import Job
    from fivefold.record import read_file

    given = {name: value for name, value in words.items() if value is not None and name != "job"}
    for short, name in SHORT.items():
        if short in given and name in given:
            raise Mistake(f"{short}= and {name}= both say {name}; keep one")
    given = {SHORT.get(name, name): value for name, value in given.items()}
    base = words.get("job")
    if isinstance(base, Job):
        return Job.read(base.model_dump() | given, origin="job") if given else base
    if isinstance(base, Mapping):
        return Job.read({**base, **given}, origin="job")
    if base is None:
        return Job.read(given, origin="job")
    return Job.read(read_file(Path(base)) | given, origin=str(base))

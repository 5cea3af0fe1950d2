"""torchtitan's tables: tokens/s/GPU and peak reserved GiB (maximum over ranks) of FSDP2, with TP or CP.

pytorch/torchtitan@b5bcd76:benchmarks/*.md and @3faaa1a:docs/performance.md. Parameters are fp32 shards gathered in
bf16, gradients reduced in fp32 after every backward; sequence parallel with tp; the loss is not compiled, in fp32;
checkpoints stop early, as PyTorch's do since 2.1.
The H100s of its own tables are the 96 GB HBM2e part at 500 W and 2.4 TB/s (benchmarks/llama3_h100_202412).
"""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.check.published.case import Case, Excluded, machine, regime
from fivefold.check.published.convert import (
    Row,
    number,
    read,
    seconds_of_tokens,
    spread,
    whole,
)
from fivefold.job import Job, Recipe, recipe
from fivefold.machine.spec import Machine
from fivefold.model.catalog import resolve
from fivefold.units import GIB

OP_WISE = "op-wise recomputation keeps every second matmul (w1 but not w3); our groups hold an MLP's matmuls together"
NOT_STATED = "what is recomputed is not stated"
ISSUE = "a run from an issue, without its whole configuration"

MODELS = {
    "Llama 3 8B": "llama3-8b",
    "Llama 3.1 8B": "llama3-8b",
    "Llama 3.1 70B": "llama3-70b",
    "Llama 3.1 405B": "llama3-405b",
    "Llama 2 13B": "llama2-13b",
    "Llama 2 70B": "llama2-70b",
}
RECOMPUTED = {"none": "none", "full": "full", "selective (every 2nd layer)": "full/2"}


def _precision(text: str) -> Recipe:
    if "float8" not in text:
        return recipe("bf16")
    if "rowwise" in text:
        return recipe("fp8-rowwise")
    # Tensorwise runs gather their weights in fp8 (enable_fsdp_float8_all_gather).
    return recipe("fp8").replace(name="fp8-gather8", weights_bytes=1)


def _machine(row: Row) -> Machine:
    if row["hardware"].startswith("A100"):
        return machine("a100", whole(row, "gpus"))
    found = machine("h100", whole(row, "gpus"))
    chip = found.chip.replace(memory_bytes=96 * 10**9, memory_bandwidth=2.4e12, power_watts=500.0)
    return found.replace(chip=chip)


def _rule(row: Row) -> str:
    if row["table"] in ("issue", "issue PP8", "Megatron PR 482"):
        return ISSUE
    if "op" in row["recompute"]:
        return OP_WISE
    return "" if row["recompute"] in RECOMPUTED else NOT_STATED


def _case(row: Row) -> Case:
    model, where = resolve(MODELS[row["model"]]), _machine(row)
    layout = spread(row, zero=3, ac=RECOMPUTED[row["recompute"]])
    eager = row["torch_compile"] == "n" or row["table"] == "performance.md A100"
    job = Job(
        linears="apart",
        sequence=whole(row, "seq"),
        global_batch=whole(row, "gbs"),
        precision=_precision(row["precision"]),
        loss="plain",
        attention="flash2",
        kernels="plain" if eager else "fused",
        compile=not eager,
        # Context parallelism gathers keys and values before attention starts (rotate_method "allgather").
        overlap=("dp", "tp") if "async TP" in row["technique"] else ("dp",),
        reduce="micro_batch",
        early_stop=True,
    )
    # Memory of the table with context parallelism could not be reproduced (issue 1344).
    gibibytes = 0.0 if row["trust"] == "low" else number(row, "peak_reserved_gib")
    return Case(
        source="torchtitan",
        row=row["row_id"],
        regime=regime("torch", model, where, layout),
        model=model,
        machine=where,
        layout=layout,
        job=job,
        step_seconds=seconds_of_tokens(job, rate=number(row, "tokens_per_s_per_gpu"), ranks=where.ranks),
        memory_bytes=gibibytes * GIB if gibibytes else None,
        memory="reserved",
    )


def cases() -> Iterator[Case | Excluded]:
    """One per measured row."""
    return read("torchtitan", rule=_rule, case=_case)

"""torchtitan's tables: tokens/s/GPU and peak reserved GiB (maximum over ranks) of FSDP2, with TP or CP.

pytorch/torchtitan@b5bcd76:benchmarks/*.md and @3faaa1a:docs/performance.md. Parameters are fp32 shards gathered in
bf16, gradients reduced in fp32 after every backward; sequence parallel with tp; the loss is in fp32. Checkpoints stop
early, as PyTorch's do since 2.1, up to torchtitan@25413d2 of August 2025; the four runs of September 2025 do not.
The H100s of its own tables are the 96 GB HBM2e part at 500 W and 2.4 TB/s (benchmarks/llama3_h100_202412).
Four runs of Qwen3 32B in pull request 1690 were read after all constants were set, and are held out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from benchmarks.published.case import Case, Excluded, machine
from benchmarks.published.cells import (
    Row,
    apply_printed_shape,
    find_model,
    number,
    number_format,
    read_machine,
    read_recomputation,
    read_required_integer,
    sharding,
)
from benchmarks.published.convert import case_of, layout_of_row, read, seconds_of_tokens
from fivefold.errors import UserError
from fivefold.job import Recipe, get_recipe
from fivefold.machine.spec import Machine
from fivefold.stack.catalog import build_stack
from fivefold.units import GIB

OP_WISE = "op-wise recomputation keeps every second matmul (w1 but not w3); our groups hold an MLP's matmuls together"
NOT_STATED = "what is recomputed is not stated"
EAGER_LOSS = "torchtitan Dec 2024"  # at 9dec370; pull request 755 had just turned compiling the loss off
READ_LATER = "pull request 1690"
ISSUE = "a run from an issue, without its full configuration"

DISPUTED = "memory of the table with context parallelism could not be reproduced (issue 1344)"


def _precision(text: str) -> Recipe:
    base_recipe = get_recipe(number_format(text))
    # Tensorwise runs gather their weights in fp8 (enable_fsdp_float8_all_gather).
    return base_recipe.replace(name="fp8-gather8", weights_bytes=1) if base_recipe.name == "fp8" else base_recipe


def _machine(row: Row) -> Machine:
    """Return the cluster of a row; H100s with HBM2e have 96 GB at 2.4 TB/s and the printed power."""
    if not row["hardware"].startswith("H100 SXM HBM2e"):
        return read_machine(row)
    cluster = machine("h100", read_required_integer(row, "gpus"))
    watts = re.search(r"(\d+) ?W\b", row["hardware"])
    power = float(watts[1]) if watts else 500.0
    chip = cluster.chip.replace(memory_bytes=96 * 10**9, memory_bandwidth=2.4e12, power_watts=power)
    return cluster.replace(chip=chip)


def _rule(row: Row) -> str:
    if row["table"] in ("issue", "issue PP8", "Megatron PR 482"):
        return ISSUE
    if row["recompute"].startswith("selective (op)"):
        return OP_WISE
    return "" if row["recompute"] else NOT_STATED


def _case(row: Row) -> Case:
    """Return the case of a row, with what its technique compiles, overlaps and casts."""
    if row["recompute"] == "selective":
        raise UserError("recompute is 'selective', which torchtitan does by operation or by layer")
    model = apply_printed_shape(find_model(row["model"]), row)
    machines = _machine(row)
    layout = layout_of_row(row, zero=sharding(row, silent=3), ac=read_recomputation(row))
    # with a scale for each row, the gathers of async TP were not fused with matmuls (pytorch/pytorch issue 149990)
    is_async = "async TP" in row["technique"] and "rowwise" not in row["precision"]
    eager = row["torch_compile"] == "n" or row["table"] == "performance.md A100"
    stack = build_stack("torchtitan").replace(
        kernels="plain" if eager else "fused",
        compile=not eager,
        overlap=("dp", "tp") if is_async else ("dp",),
        compile_loss=row["framework"] != EAGER_LOSS,
        early_stop=row["table"] != READ_LATER,
    )
    gibibytes = number(row, "peak_reserved_gib") or number(row, "peak_gb")  # torchao prints torchtitan's GiB as GB
    disputed, rate = row["trust"] == "low", number(row, "tokens_per_s_per_gpu")
    return case_of(
        "torchtitan",
        row,
        stack=stack,
        model=model,
        machine=machines,
        layout=layout,
        recipe=_precision(row["precision"]),
        seconds=lambda job: seconds_of_tokens(job, rate=rate, ranks=machines.ranks),
        memory_bytes=None if disputed else gibibytes * GIB,
        memory="reserved",
        left_out=(("peak", DISPUTED),) if disputed and gibibytes else (),
    )._replace(held_out=row["table"] == READ_LATER)


def cases() -> Iterator[Case | Excluded]:
    """Yield one case, or one exclusion, per measured row."""
    return read("torchtitan", rule=_rule, case=_case)

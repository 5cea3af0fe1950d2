"""Single tables of many projects; of them InternEvo's scaling on A100 and two fms-fsdp runs state enough.

InternLM/InternEvo@c628a8c:doc/en/train_performance.md, configs/7B_sft.py: Adam with fp32 master, sharded over all
ranks or groups of them (hybrid ZeRO-1), 16-bit gradients, whose reduction alone overlaps; each owner broadcasts its
full tensors (internlm/solver/optimizer), logits widened to fp32; FlashAttention 1.0.5 (InternLM/InternLM:
doc/en/install.md), tensor parallel without sequence parallel (mtp). Norms are recomputed unless full layers are
(modeling_internlm.py, dropout_selective_checkpoint). fms-fsdp@5a296af: compile, HSDP in bf16.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from benchmarks.published.case import Case, Excluded
from benchmarks.published.cells import (
    Row,
    apply_printed_shape,
    find_model,
    number,
    read_machine,
    read_recomputation,
    sharding,
)
from benchmarks.published.convert import batch, case_of, layout_of_row, read, seconds_of_tokens
from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.stack.catalog import build_stack

SOURCE = "misc_throughput"
TPU = "a TPU, which is not in our catalog"
NO_LAYOUT = "the source prints no layout or no batch"
SOME_LAYERS = "the share of recomputed layers is not printed"
ROUNDED = "a round figure of a complete run"

INTERNLM = Model(
    name="internlm-7b",
    layers=32,
    width=4096,
    heads=32,
    kv_heads=32,
    head_dim=128,
    ffn=10_944,
    vocab=103_168,
    qkv_bias=True,
    out_bias=True,
)


def _rule(row: Row) -> str:
    """Return why a row is left out; empty if it is not."""
    if row["hardware"].startswith("TPU"):
        return TPU
    if row["model"].startswith("BLOOM"):
        return ROUNDED
    if row["framework"] == "fms-fsdp":
        return SOME_LAYERS if row["recompute"] == "selective" else ""
    return "" if row["framework"].startswith("InternEvo") else NO_LAYOUT


def _cluster(row: Row) -> Machine:
    """Return nodes of eight with the network that the row prints: ``4x100 Gb/s RoCE per node``."""
    match = re.fullmatch(r"(?:(\d+)x)?(\d+) Gb/s .*per node", row["network"])
    if row["network"] and not match:
        raise UserError(f"network {row['network']!r} is not read")
    gigabits = int(match[1] or 1) * int(match[2]) / 8 if match else None
    return read_machine(row, nic_gigabits=gigabits, source=row["network"])


def _internevo(row: Row) -> Case:
    """Return the case of a row of InternEvo, whose ZeRO shards over some of the replicas."""
    if row["model"] != "InternLM 7B":
        raise UserError(f"model {row['model']!r}, whose fields the source does not state")
    group = re.search(r"\((\d+) GPUs\)", row["zero"])
    recomputed = read_recomputation(row, words={"none": "norm", "full": "full"})
    layout = layout_of_row(row, zero=sharding(row, silent=1), ac=recomputed)
    shards = min(int(group[1]), layout.dp) if group else layout.dp
    layout = layout.replace(sp=layout.tp == 1, shard_group=shards if shards < layout.dp else None)
    model = apply_printed_shape(INTERNLM, row)
    machines = _cluster(row)
    return case_of(
        SOURCE,
        row,
        stack=build_stack("internevo"),
        model=model,
        machine=machines,
        layout=layout,
        seconds=_seconds(row, machines),
        rivals=f"internlm-7b on {machines.ranks}, batch {batch(row, layout)}, {row['table']}",
    )


def _fms(row: Row) -> Case:
    """Return the case of a row of fms-fsdp, sharded over all ranks or within a node."""
    model = apply_printed_shape(find_model(row["model"]), row)
    shards = 8 if row["fsdp"] == "HSDP" else None  # within a node
    layout = layout_of_row(row, zero=sharding(row, silent=3), ac=read_recomputation(row), shard_group=shards)
    machines = _cluster(row)
    return case_of(
        SOURCE,
        row,
        # PyTorch's checkpoints stop early since 2.1; whether its own of selected blocks do was not read.
        stack=build_stack("fms-fsdp").replace(early_stop=False),
        model=model,
        machine=machines,
        layout=layout,
        seconds=_seconds(row, machines),
    )


def _seconds(row: Row, machine: Machine) -> Callable[[Job], float]:
    return lambda job: seconds_of_tokens(job, rate=number(row, "tokens_per_s_per_gpu"), ranks=machine.ranks)


def cases() -> Iterator[Case | Excluded]:
    """Yield one case, or one exclusion, per measured row."""
    return read(SOURCE, rule=_rule, case=lambda row: _fms(row) if row["framework"] == "fms-fsdp" else _internevo(row))

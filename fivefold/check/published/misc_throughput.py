"""Single tables of many projects; of them InternEvo's scaling on A100 and two fms-fsdp runs state enough.

InternLM/InternEvo@c628a8c:doc/en/train_performance.md, configs/7B_sft.py: Adam with fp32 master, sharded over all
ranks or groups of them (hybrid ZeRO-1), 16-bit gradients, whose reduction alone is hidden; each owner broadcasts its
whole tensors (internlm/solver/optimizer), logits widened to fp32; FlashAttention 1.0.5 (InternLM/InternLM:
doc/en/install.md), tensor parallel without sequence parallel (mtp). fms-fsdp@5a296af: compile, HSDP in bf16.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from fivefold.check.published.case import Case, Excluded, machine, regime
from fivefold.check.published.convert import Row, number, read, seconds_of_tokens, spread, whole
from fivefold.job import Job, recipe
from fivefold.model.catalog import resolve
from fivefold.model.spec import Model

SOURCE = "misc_throughput"
TPU = "a TPU, which is not in our catalog"
NO_LAYOUT = "the source prints no layout or no batch"
SOME_LAYERS = "the share of recomputed layers is not printed"
ROUNDED = "a round figure of a whole run"

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
    if row["hardware"].startswith("TPU"):
        return TPU
    if row["model"].startswith("BLOOM"):
        return ROUNDED
    if row["framework"] == "fms-fsdp":
        return SOME_LAYERS if row["recompute"] == "selective" else ""
    return "" if row["framework"].startswith("InternEvo") else NO_LAYOUT


def _internevo(row: Row) -> Case:
    group = re.search(r"\((\d+) GPUs\)", row["zero"])
    tp, ranks = whole(row, "tp"), whole(row, "gpus")
    replicas = ranks // tp
    shards = min(int(group[1]), replicas) if group else replicas
    layout = spread(row, zero=1, sp=tp == 1, ac=row["recompute"], shard_group=shards if shards < replicas else None)
    job = Job(
        linears="apart",
        early_stop=False,
        sequence=whole(row, "seq"),
        global_batch=whole(row, "gbs"),
        precision=recipe("bf16-grad16"),
        loss="plain",
        attention="flash1",
        joint=True,
        overlap=("dp",),
        weights="broadcast",
    )
    where = machine("a100", ranks, nic_gigabits=400 / 8, source="4 x 100 Gbit/s RoCE per node")
    return Case(
        source=SOURCE,
        row=row["row_id"],
        regime=regime("internevo", INTERNLM, where, layout),
        model=INTERNLM,
        machine=where,
        layout=layout,
        job=job,
        step_seconds=seconds_of_tokens(job, rate=number(row, "tokens_per_s_per_gpu"), ranks=ranks),
        rivals=f"internlm-7b on {ranks}, batch {job.global_batch}, {row['table']}",
    )


def _fms(row: Row) -> Case:
    model, a100 = resolve("llama2-7b"), row["hardware"].startswith("A100")
    layout = spread(row, zero=3, shard_group=8)  # HSDP: shards within a node
    job = Job(
        linears="apart",
        early_stop=False,
        sequence=whole(row, "seq"),
        global_batch=whole(row, "gbs"),
        precision=recipe("bf16-grad16"),
        loss="plain",
        attention="flash2",
        compile=True,
        overlap=("dp",),
        reduce="micro_batch",
    )
    chip, node_gigabits = ("a100", 400) if a100 else ("h100", 800)
    where = machine(chip, whole(row, "gpus"), nic_gigabits=node_gigabits / 8, source=row["network"])
    return Case(
        source=SOURCE,
        row=row["row_id"],
        regime=regime("torch", model, where, layout),
        model=model,
        machine=where,
        layout=layout,
        job=job,
        step_seconds=seconds_of_tokens(job, rate=number(row, "tokens_per_s_per_gpu"), ranks=where.ranks),
    )


def cases() -> Iterator[Case | Excluded]:
    """One per measured row."""
    return read(SOURCE, rule=_rule, case=lambda row: _fms(row) if row["framework"] == "fms-fsdp" else _internevo(row))

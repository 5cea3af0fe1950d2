"""The Ultra-Scale Playbook's heat maps: nanotron's best layouts on 8 to 512 H100, MFU and peak memory.

huggingface/nanotron@c252843:docs/benchmark_summary.svg; scripts/scaling_benchmarks.py@0e0a27e: fp32 gradient sums,
REDUCE_SCATTER tensor parallelism with asynchronous messages, no recomputation, 1F1B without hidden messages, fused
norms, loss in fp32. MFU counts full attention of 989 TFLOP/s; memory is GiB, of which counter is not stated.
"""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.check.published.case import Case, Excluded, machine, regime
from fivefold.check.published.convert import (
    Row,
    number,
    read,
    seconds_of_flops,
    spread,
    whole,
)
from fivefold.job import Job, recipe
from fivefold.model.spec import Model
from fivefold.units import GIB

PEAK_FLOPS = 989e12


def _model(row: Row) -> Model:
    width, heads = whole(row, "hidden"), whole(row, "heads")
    return Model(
        name=f"nanotron-{row['model'].lower()}",
        layers=whole(row, "layers"),
        width=width,
        heads=heads,
        kv_heads=whole(row, "kv_heads"),
        head_dim=width // heads,
        ffn=whole(row, "ffn"),
        vocab=whole(row, "vocab"),
        tied_embeddings=row["tied_embeddings"] == "y",
    )


def _case(row: Row) -> Case:
    model, layout = _model(row), spread(row, zero=whole(row, "zero"))
    job = Job(
        sequence=whole(row, "seq"),
        global_batch=whole(row, "gbs"),
        precision=recipe("bf16"),
        loss="plain",
        attention="flash2",
        overlap=("dp", "tp"),
    )
    where = machine("h100", whole(row, "gpus"))
    rate = number(row, "mfu_pct") / 100 * PEAK_FLOPS
    return Case(
        source="ultrascale_playbook",
        row=row["row_id"],
        regime=regime("nanotron", model, where, layout),
        model=model,
        machine=where,
        layout=layout,
        job=job,
        step_seconds=seconds_of_flops(model, job, rate=rate, ranks=where.ranks, count="full"),
        memory_bytes=number(row, "peak_mem_gib") * GIB,
    )


def cases() -> Iterator[Case | Excluded]:
    """One per measured row."""
    return read("ultrascale_playbook", rule=lambda row: "", case=_case)

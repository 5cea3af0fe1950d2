"""The Ultra-Scale Playbook's heat maps: nanotron's best layouts on 8 to 512 H100, MFU and peak memory.

huggingface/nanotron@c252843:docs/benchmark_summary.svg; scripts/scaling_benchmarks.py@0e0a27e: fp32 gradient sums,
no recomputation, 1F1B without hidden messages, FlashAttention's norms and rotary, loss in fp32 on copies. A layer's
input travels beside the matmul of the rank's own tokens alone, 1/tp of it (functional.py@00708b8), and weights after
the update (optim/zero.py@069c21c). MFU counts full attention of 989 TFLOP/s. Memory is GiB of rank 0, allocated or
reserved (helpers.py@31aa4c4 writes both): above what lives at once by its buffers (nccl's, ZeRO's), so reserved.
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
STALLED = (
    "half the utilisation of the same model on 64 GPUs, 14.8 % and 30.7 %, while 50 GB of states leave little room: "
    "no layout explains it, an allocator that frees and asks again would"
)


def _rule(row: Row) -> str:
    return STALLED if (row["model"], row["gpus"]) == ("80B", "32") else ""


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


def _stages(model: Model, pp: int) -> tuple[int, ...]:
    """A stage ends with the layer that exceeds its share of all layers and the head, by elements of their weights
    (models/base.py@01de8d9, build_model; models/llama.py@03b83fc, get_block_compute_costs).
    """
    layer = 4 * model.width * model.width + 3 * model.ffn * model.width
    whole, stages = model.layers * layer + model.vocab * model.width, [0] * pp
    for index in range(model.layers):
        stages[next(stage for stage in range(pp) if index * layer * pp <= whole * (stage + 1))] += 1
    return tuple(stages)


def _case(row: Row) -> Case:
    model, layout = _model(row), spread(row, zero=whole(row, "zero"))
    if layout.pp > 1:
        layout = layout.replace(stages=_stages(model, layout.pp))
    sharded = layout.zero > 0  # and so without DistributedDataParallel (trainer.py@004a89c, _init_model)
    job = Job(
        linears="apart",
        early_stop=False,
        sequence=whole(row, "seq"),
        global_batch=whole(row, "gbs"),
        precision=recipe("bf16"),
        loss="copied",
        attention="flash2",
        kernels="norms",
        joint=True,
        weight_gradients="late" if sharded or layout.dp == 1 else "buckets",
        overlap=("dp",),
        weights="at_once",
        joined=("weights",) if sharded else (),
        async_tp=True,
        run_ahead=True,
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
        memory="reserved",
    )


def cases() -> Iterator[Case | Excluded]:
    """One per measured row."""
    return read("ultrascale_playbook", rule=_rule, case=_case)

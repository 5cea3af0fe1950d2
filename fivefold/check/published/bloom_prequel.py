"""The layouts that BigScience tried before BLOOM: Megatron-DeepSpeed on 8 to 384 A100 of Jean Zay, ZeRO-1.

Facts of bigscience-workshop/bigscience@053adaf:train/tr11-176B-ml/chronicles-prequel.md: full recomputation, no
sequence parallelism, fp16 whose gradients stay in 16 bits; a stage takes layers/pp, rounded up, and the last the rest;
the 106-layer runs give each embedding a layer's place. nvidia-smi of the first and last node; second iteration.
CUDA_LAUNCH_BLOCKING=1, as the larger runs hung without it. Four 100 Gbit/s links per node (arXiv:2211.05100 §3.3).
DeepSpeed is told the ZeRO stage alone, so its buckets are as they come (setup-test-n2.slurm@7148d3e beside it).
"""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.check.published.case import Case, Excluded, machine, regime, rows
from fivefold.check.published.gpt import PLAIN_MEGATRON, gpt
from fivefold.job import recipe
from fivefold.layout.spec import Layout
from fivefold.units import GIB, ceil_div

SOURCE = "bloom_prequel"
NETWORK = "four 100 Gbit/s Omni-Path links per node: arXiv:2211.05100 §3.3; latency as in the catalog"
VOCAB = 250_000  # padded to 250 880 by Megatron at tp8, as in the config.json of bigscience/bloom


def cases() -> Iterator[Case | Excluded]:
    """Every run that names its layers and heads; rivals share model, batch and the state of the cluster's tuning."""
    for row in rows(SOURCE):
        rule = _rule(row)
        yield Excluded(SOURCE, row["row_id"], rule) if rule else _case(row)


def _rule(row: dict[str, str]) -> str:
    if row["oom"] == "y":
        return "out of memory: nothing was measured"
    if row["trust"] == "low":
        return "the source contradicts itself: " + row["note"].partition("SUSPECT: ")[2]
    if not row["layers"] or not row["heads"]:
        return "layers or heads are not printed"
    if not row["step_s"] and not row["mem_gb_nvidia_smi"]:
        return "nothing was measured"
    return ""


def _stages(layers: int, pp: int) -> tuple[int, ...]:
    if layers % pp == 0:
        return ()
    if (layers + 2) % pp == 0:  # partition method type:transformer|embed
        each = (layers + 2) // pp
        return (each - 1, *[each] * (pp - 2), each - 1)
    most = ceil_div(layers, pp)
    return (*[most] * (pp - 1), layers - most * (pp - 1))


def _case(row: dict[str, str]) -> Case:
    layers, gpus, pp, tp = (int(row[key]) for key in ("layers", "gpus", "pp", "tp"))
    model = gpt(
        layers=layers, width=int(row["hidden"]), heads=int(row["heads"]), vocab=VOCAB, positions=int(row["seq"])
    )
    layout = Layout(
        dp=int(row["dp"]),
        tp=tp,
        pp=pp,
        zero=1,
        mbs=int(row["mbs"]),
        ac="full",
        sp=tp == 1,
        stages=_stages(layers, pp),
    )
    precision = recipe("fp16" if row["precision"] == "fp16" else "bf16-grad16")
    job = PLAIN_MEGATRON.replace(
        sequence=int(row["seq"]),
        global_batch=int(row["gbs"]),
        precision=precision,
        vocab_multiple=128,
        joined=("gradients",),
        blocking=True,
    )
    machines = machine("a100", gpus, nic_gigabits=50, source=NETWORK)
    tuned = "tuned" if "tuning" in row["note"] else "untuned"
    memory = row["mem_gb_nvidia_smi"]
    return Case(
        SOURCE,
        row["row_id"],
        regime("megatron-deepspeed", model, machines, layout),
        model,
        machines,
        layout,
        job,
        step_seconds=float(row["step_s"]) if row["step_s"] else None,
        memory_bytes=float(memory) * GIB if memory else None,
        memory="driver",
        rivals=f"{SOURCE} {model.name} {model.heads} {gpus} {row['gbs']} {tuned}",
    )

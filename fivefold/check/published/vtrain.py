"""vTrain (Bang et al. 2024, arXiv:2312.12391): Megatron-DeepSpeed on A100, one node and 64 to 512 GPUs.

Facts of VIA-Research/vTrain@f8dda84: GPT with 50257 words, dropout 0.1, fp16 (src/predictor.py), 1F1B and full
recomputation (config/validation), 800 Gbit/s per node of 8 (inter_node_bandwidth); gradients are reduced after the
last micro-batch, in one go (use_gradient_bucket false). No ZeRO appears anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.check.published.case import Case, Excluded, machine, regime, rows
from fivefold.check.published.gpt import PLAIN_MEGATRON, gpt
from fivefold.layout.spec import Layout

SOURCE = "vtrain"
NETWORK = "800 Gbit/s per node: VIA-Research/vTrain@f8dda84:config/validation; latency as in the catalog"


def cases() -> Iterator[Case | Excluded]:
    """Every measured iteration; rivals share model, GPUs and batch."""
    for row in rows(SOURCE):
        yield _case(row)


def _case(row: dict[str, str]) -> Case:
    model = gpt(
        layers=int(row["layers"]),
        width=int(row["hidden"]),
        heads=int(row["heads"]),
        vocab=50257,
        positions=int(row["seq"]),
    )
    pp, tp, micro = int(row["pp"]), int(row["tp"]), int(row["microbatches"])
    layout = Layout(
        dp=int(row["dp"]),
        tp=tp,
        pp=pp,
        # With fewer micro-batches than stages, 1F1B and GPipe both take (m + pp − 1)(F + B); memory is not asked.
        schedule="gpipe" if micro < pp else "1f1b",
        mbs=int(row["mbs"]),
        ac=row["recompute"],
        sp=tp == 1,
    )
    job = PLAIN_MEGATRON.replace(sequence=int(row["seq"]), global_batch=int(row["gbs"]), vocab_multiple=128)
    gpus = int(row["gpus"])
    machines = machine("a100", gpus, nic_gigabits=100, source=NETWORK)
    return Case(
        SOURCE,
        row["row_id"],
        regime("megatron-deepspeed", model, machines, layout),
        model,
        machines,
        layout,
        job,
        step_seconds=float(row["iteration_ms"]) / 1e3,
        rivals=f"{SOURCE} {model.name} {gpus} {row['gbs']}",
    )

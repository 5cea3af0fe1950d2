"""Narayanan et al. 2021, arXiv:2104.04473, table 2: PTD-P against DeepSpeed ZeRO-3 on 384 to 2240 A100.

Printed is TFLOP/s per GPU, of hardware FLOPs with the repeated forward: 96·B·s·l·h²·(1 + s/6h + V/16lh).
Model-parallel size 96 is tp8 pp12, 280 is tp8 pp35 (§5.1: tp8 and the layers of 105/35). Table 1 prints no micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.check.published.case import Case, Excluded, machine, regime, rows
from fivefold.check.published.gpt import PLAIN_MEGATRON, gpt
from fivefold.layout.spec import Layout

SOURCE = "megatron2021"


def cases() -> Iterator[Case | Excluded]:
    """Table 2; rivals share model, GPUs and batch."""
    for row in rows(SOURCE):
        if not row["layers"]:
            yield Excluded(SOURCE, row["row_id"], "a remark in the text, not a step")
        elif not row["mbs"]:
            yield Excluded(SOURCE, row["row_id"], "the micro-batch size is not printed")
        else:
            yield _case(row)


def hardware_flops(row: dict[str, str]) -> float:
    """FLOPs of one iteration as the paper counts them: full attention, the layers' forward twice, the head's once."""
    batch, s, layers, h, vocab = (int(row[key]) for key in ("gbs", "seq", "layers", "hidden", "vocab"))
    return 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h))


def _case(row: dict[str, str]) -> Case:
    sharded = row["zero"] == "3"
    gpus = int(row["gpus"])
    tp = 1 if sharded else 8
    layout = Layout(
        dp=int(row["dp"]),
        tp=tp,
        pp=int(row["model_parallel_size"]) // tp,
        zero=int(row["zero"]),
        mbs=int(row["mbs"]),
        ac="full",
        sp=tp == 1,
    )
    model = gpt(
        layers=int(row["layers"]),
        width=int(row["hidden"]),
        heads=int(row["heads"]),
        vocab=int(row["vocab"]),
        positions=int(row["seq"]),
    )
    job = PLAIN_MEGATRON.replace(
        sequence=int(row["seq"]),
        global_batch=int(row["gbs"]),
        reduce="micro_batch" if sharded else "step",
    )
    machines = machine("a100", gpus)
    return Case(
        SOURCE,
        row["row_id"],
        regime("deepspeed" if sharded else "megatron", model, machines, layout),
        model,
        machines,
        layout,
        job,
        step_seconds=hardware_flops(row) / (float(row["hw_tflops_per_gpu"]) * 1e12 * gpus),
        rivals=f"{SOURCE} {model.name} {gpus} {row['gbs']}",
    )

"""Zero Bubble (Qi et al. 2023, arXiv:2401.10241, table 4): 1F1B against ZB-1p and ZB-2p on 8 and 32 A100.

Megatron-LM, fp16, dropout 0.1, sequences of 1024 (sail-sg/zero-bubble-pipeline-parallelism@475e062:examples, whose
example recomputes selectively). The paper's table 1 keeps sb(34h + 5as) bytes per layer instead: nothing is recomputed
and attention writes its scores; so does its printed memory. Its sizes fit a vocabulary of 32 000. First and last stage
hold a layer less. Memory: "GB" of 1e9, as the authors' schedulers count it (zb_schedules.py@0a01bcb).
"""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.check.published.case import Case, Excluded, machine, regime, rows
from fivefold.check.published.gpt import PLAIN_MEGATRON, gpt
from fivefold.layout.spec import Layout, ScheduleName

SOURCE = "zero_bubble"
SCHEDULES: dict[str, ScheduleName] = {"1F1B": "1f1b", "ZB-1p": "zb1p", "ZB-2p": "zb2p"}


def cases() -> Iterator[Case | Excluded]:
    """Table 4; rivals share model and batch."""
    for row in rows(SOURCE):
        if row["kind"] != "measured":
            continue
        if row["trust"] == "low":
            yield Excluded(SOURCE, row["row_id"], "layout, sequence and micro-batches are not given")
        elif row["schedule"] not in SCHEDULES:
            yield Excluded(
                SOURCE, row["row_id"], "its first and last virtual stage hold no layer, as no layout can say"
            )
        else:
            yield _case(row)


def _case(row: dict[str, str]) -> Case:
    layers, pp = int(row["layers"]), int(row["pp"])
    each = (layers + 2) // pp
    model = gpt(
        layers=layers, width=int(row["hidden"]), heads=int(row["heads"]), vocab=32_000, positions=int(row["seq"])
    )
    layout = Layout(
        pp=pp,
        schedule=SCHEDULES[row["schedule"]],
        mbs=int(row["mbs"]),
        stages=(each - 1, *[each] * (pp - 2), each - 1),
    )
    job = PLAIN_MEGATRON.replace(sequence=int(row["seq"]), global_batch=int(row["gbs"]), vocab_multiple=128)
    machines = machine("a100", int(row["gpus"]))
    return Case(
        SOURCE,
        row["row_id"],
        regime("megatron", model, machines, layout),
        model,
        machines,
        layout,
        job,
        step_seconds=float(row["iteration_s_derived"]),
        memory_bytes=float(row["memory_gb"]) * 1e9,
        rivals=f"{SOURCE} {model.name} {row['gbs']}",
    )

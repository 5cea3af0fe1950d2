"""Zero Bubble (Qi et al. 2023, arXiv:2401.10241, table 4): 1F1B against ZB-1p and ZB-2p on 8 and 32 A100.

Megatron-LM, fp16, dropout 0.1, sequences of 1024 (sail-sg/zero-bubble-pipeline-parallelism@475e062:examples, whose
example recomputes selectively). The paper's table 1 keeps sb(34h + 5as) bytes per layer instead: nothing is recomputed
and attention writes its scores; so does its printed memory. Its sizes fit a vocabulary of 32 000. First and last stage
hold a layer less; interleaved chunks have one layer each, and the first and the last none. Memory: "GB" of 1e9, as the
authors' schedulers count it (zb_schedules.py@0a01bcb).
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.published.case import Case, Excluded
from benchmarks.published.cells import Row, number, read_machine, read_required_integer
from benchmarks.published.convert import batch, case_of, layout_of_row, read
from benchmarks.published.readers.gpt import gpt_of
from fivefold.errors import UserError
from fivefold.job import get_recipe
from fivefold.layout.schedule.pipeline_schedule import ScheduleName
from fivefold.stack.catalog import build_stack

SOURCE = "zero_bubble"
SCHEDULES: dict[str, ScheduleName] = {"1F1B": "1f1b", "1F1B-I": "interleaved", "ZB-1p": "zb1p", "ZB-2p": "zb2p"}


def cases() -> Iterator[Case | Excluded]:
    """Yield the cases of table 4. Alternatives share model and batch."""
    return read(SOURCE, rule=_rule, case=_case)


def _rule(row: Row) -> str:
    return "layout, sequence and micro-batches are not given" if row["trust"] == "low" else ""


def _case(row: Row) -> Case:
    """Return the case of a row, whose first and last stage have one layer less."""
    model, pp = gpt_of(row, vocab=32_000), read_required_integer(row, "pp")
    per_stage, rest = divmod(model.layers + 2, pp)
    if rest:
        raise UserError(f"{model.layers} layers and two less are not the same on each of {pp} stages")
    schedule = SCHEDULES.get(row["schedule"])
    if schedule is None:
        raise UserError(f"{row['schedule']} is none of {', '.join(SCHEDULES)}")
    if schedule == "interleaved":  # chunks of one layer, of which the ends have none
        layout = layout_of_row(row | {"vp": str(per_stage)}, zero=0, schedule=schedule)
    else:
        stages = (per_stage - 1, *[per_stage] * (pp - 2), per_stage - 1)
        layout = layout_of_row(row, zero=0, schedule=schedule, stages=stages)
    return case_of(
        SOURCE,
        row,
        stack=build_stack("zero-bubble"),
        model=model,
        machine=read_machine(row),
        layout=layout,
        recipe=get_recipe("fp16"),
        seconds=number(row, "iteration_s_derived"),
        memory_bytes=number(row, "memory_gb") * 1e9,
        rivals=f"{SOURCE} {model.name} {batch(row, layout)}",
    )

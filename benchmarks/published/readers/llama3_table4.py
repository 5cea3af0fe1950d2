"""Llama 3 405B on 8192 H100 (arXiv:2407.21783, table 4): TFLOP/s per GPU; held out of every fit.

§3.3 tells of FSDP that keeps what it gathered and reduces in fp32, sequence parallelism, interleaved stages whose
messages overlap with compute, the first and last stage one layer short, nothing recomputed at 8 K.
Assumed, as not printed: micro-batches of one sequence; four virtual stages per rank, as eight would leave the ends no
layer; FLOPs with causal attention (full: 4 % more, none: 4 % less); 400 Gbit/s a GPU; torchtitan's loss and attention.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.published.case import Case, Excluded
from benchmarks.published.cells import Row, apply_printed_shape, find_model, number, read_machine
from benchmarks.published.convert import case_of, layout_of_row, read, seconds_of_flops
from fivefold.stack.catalog import build_stack

SOURCE = "llama3_table4"
VIRTUAL = 4
RECOMPUTED = "none (text: no activation checkpointing at 8K)"


def _rule(row: Row) -> str:
    return "" if row["recompute"] == RECOMPUTED else "what is recomputed is not printed"


def _case(row: Row) -> Case:
    model = apply_printed_shape(find_model(row["model"]), row)
    machines = read_machine(row)
    known = row | {"mbs": "1", "vp": str(VIRTUAL), "schedule": "interleaved", "recompute": "none"}
    layout = layout_of_row(known, zero=2, ac="none")
    per_stage = (model.layers + 2) // (layout.pp * VIRTUAL)
    layout = layout.replace(stages=(per_stage - 1, *[per_stage] * (layout.pp * VIRTUAL - 2), per_stage - 1))
    return case_of(
        SOURCE,
        known,
        stack=build_stack("torchtitan").replace(overlap=("dp", "pp"), compile=False, kernels="fused"),
        model=model,
        machine=machines,
        layout=layout,
        seconds=lambda job: seconds_of_flops(
            model, job, rate=number(row, "tflops_per_gpu") * 1e12, ranks=machines.ranks, count="causal"
        ),
    )._replace(held_out=True)


def cases() -> Iterator[Case | Excluded]:
    """Yield the row."""
    return read(SOURCE, rule=_rule, case=_case)

"""Llama 3 405B on 8192 H100 (arXiv:2407.21783, table 4): TFLOP/s per GPU; held out of every fit.

§3.3 tells of FSDP that keeps what it gathered and reduces in fp32, sequence parallelism, interleaved stages whose
messages overlap with compute, a first chunk of the embedding alone and a last one of the head alone, nothing recomputed
at 8 K. 126 layers and these two ends are 16 ranks of eight chunks with one layer each.
Assumed, as not printed: micro-batches of one sequence; FLOPs with causal attention (full: 4 % more, none: 4 % less);
400 Gbit/s a GPU; torchtitan's loss and attention.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.published.case import Case, Excluded
from benchmarks.published.cells import Row, apply_printed_shape, find_model, number, read_machine
from benchmarks.published.convert import case_of, layout_of_row, read, seconds_of_flops
from fivefold.stack.catalog import build_stack

SOURCE = "llama3_table4"
VIRTUAL = 8
RECOMPUTED = "none (text: no activation checkpointing at 8K)"


def _rule(row: Row) -> str:
    return "" if row["recompute"] == RECOMPUTED else "what is recomputed is not printed"


def _case(row: Row) -> Case:
    """Return the case of a row, with the interleaved schedule of the paper."""
    model = apply_printed_shape(find_model(row["model"]), row)
    machines = read_machine(row)
    known = row | {"mbs": "1", "vp": str(VIRTUAL), "schedule": "interleaved", "recompute": "none"}
    return case_of(
        SOURCE,
        known,
        stack=build_stack("torchtitan").replace(overlap=("dp", "pp"), compile=False, kernels="fused"),
        model=model,
        machine=machines,
        layout=layout_of_row(known, zero=2, ac="none"),
        seconds=lambda job: seconds_of_flops(
            model, job, rate=number(row, "tflops_per_gpu") * 1e12, ranks=machines.ranks, count="causal"
        ),
    )._replace(held_out=True)


def cases() -> Iterator[Case | Excluded]:
    """Yield the row."""
    return read(SOURCE, rule=_rule, case=_case)

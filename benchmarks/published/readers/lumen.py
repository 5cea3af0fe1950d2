"""Llama 3.1 8B and Qwen3 8B on MI325X under Megatron-LM: Transformer Engine's kernels; those of Lumen are its own.

ZhangDanyang-AMD/Lumen@c410f2c:examples, with the arguments in examples/llama31/results: distributed optimizer, fp32
reductions that overlap, weights gathered before the forward (overlap_param_gather off), weight gradients added by
kernels of their own (gradient_accumulation_fusion off), no recomputation. Read after all constants were set, so all
rows are held out.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.published.case import Case, Excluded
from benchmarks.published.cells import (
    Row,
    apply_printed_shape,
    find_model,
    number,
    read_machine,
    read_recomputation,
)
from benchmarks.published.convert import case_of, layout_of_row, read
from fivefold.stack.catalog import build_stack

OWN_KERNELS = "kernels of the source's own, which no software of ours has"
UNIT = "whether GB are 1e9 or 2^30 bytes is not stated"
STACK = build_stack("megatron-core").replace(param_all_gather="before_forward", wgrad_accumulation="separate")


def _rule(row: Row) -> str:
    return "" if row["kernels"] == "TransformerEngine" else OWN_KERNELS


def _case(row: Row) -> Case:
    """Return the case of a row without its peak, which the source prints in an unknown unit."""
    return case_of(
        "lumen",
        row,
        stack=STACK,
        model=apply_printed_shape(find_model(row["model"]), row),
        machine=read_machine(row),
        layout=layout_of_row(row, zero=1, ac=read_recomputation(row)),
        seconds=number(row, "step_s"),
        left_out=(("peak", UNIT),),
    )._replace(held_out=True)


def cases() -> Iterator[Case | Excluded]:
    """Yield one case, or one exclusion, per measured row."""
    return read("lumen", rule=_rule, case=_case)

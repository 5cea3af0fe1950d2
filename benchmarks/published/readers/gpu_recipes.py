"""Google Cloud's recipes of NeMo on 256 H100 (A3 Mega) and H200 (A3 Ultra): the seconds of the step that a page prints.

AI-Hypercomputer/gpu-recipes@2e1fd5e: pages under training, with the configuration that each of them runs
(src/frameworks/*/nemo-configs): no userbuffers, 16-bit gradients, nothing recomputed, messages of the distributed
optimizer and between stages overlap. Mixtral's experts run one after another (moe_grouped_gemm off) on as many tokens
each (capacity factor 1). Read after all constants were set, so all rows are held out.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.published.case import Case, Excluded
from benchmarks.published.cells import (
    Row,
    apply_printed_shape,
    chip,
    find_model,
    number,
    read_machine,
    read_recomputation,
)
from benchmarks.published.convert import case_of, layout_of_row, read
from fivefold.stack.catalog import build_stack

NIC_GIGABITS = {"h100": 200, "h200": 400}  # per GPU: cloud.google.com/compute/docs/gpus (A3 Mega, A3 Ultra)
NETWORK = "cloud.google.com/compute/docs/gpus"
STACK = build_stack("nemo").replace(overlap=("dp", "cp", "pp"))


def _case(row: Row) -> Case:
    """Return the case of a row; Google's ranks have the NICs of their machine type."""
    return case_of(
        "gpu_recipes",
        row,
        stack=STACK,
        model=apply_printed_shape(find_model(row["model"]), row),
        machine=read_machine(row, nic_gigabits=NIC_GIGABITS.get(chip(row["hardware"])), source=NETWORK),
        layout=layout_of_row(row, zero=1, ac=read_recomputation(row)),
        seconds=number(row, "step_s"),
    )._replace(held_out=True)


def cases() -> Iterator[Case | Excluded]:
    """Yield one case per measured row."""
    return read("gpu_recipes", rule=lambda row: "", case=_case)

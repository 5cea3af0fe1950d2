"""Acceptance tests of three clusters of B200 and GB200: seconds of a step of NVIDIA's recipes and of Megatron-LM.

What a report leaves to its recipe is as in that release: of Vultr NVIDIA/dgxc-benchmarking@v26.02, of Kubernetes
Megatron-Bridge of nemo:26.02 (scripts/performance/configs: stacks as in ``megatron_bridge_perf`` and ``nemo_perf``).
The A4X runs are Megatron-LM's core_r0.16.0 with its defaults. Read after all constants were set, so all rows are held
out.
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
from benchmarks.published.readers.megatron_bridge_perf import stack_of
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.stack.catalog import build_stack
from fivefold.stack.spec import Stack

NO_RECIPE = "which release of the recipe was run is not stated, and the micro-batch differs among them"


def _stack(row: Row, model: Model, layout: Layout) -> Stack:
    if row["framework"] != "Megatron-Bridge":
        return build_stack("nemo" if row["framework"] == "NeMo" else "megatron-core")
    return stack_of(model, layout, precision=row["precision"], chip=chip(row["hardware"]), release="26.02")


def _case(row: Row) -> Case:
    """Return the case of a row, under ZeRO-1."""
    model = apply_printed_shape(find_model(row["model"]), row)
    layout = layout_of_row(row, zero=1, ac=read_recomputation(row))
    return case_of(
        "cluster_tests",
        row,
        stack=_stack(row, model, layout),
        model=model,
        machine=read_machine(row),
        layout=layout,
        seconds=number(row, "step_s"),
        rivals=f"{row['site']}, {row['row_id']}",  # none: two sites ran the same steps
    )._replace(held_out=True)


def cases() -> Iterator[Case | Excluded]:
    """Yield one case, or one exclusion, per measured row."""
    return read("cluster_tests", rule=lambda row: "" if row["mbs"] else NO_RECIPE, case=_case)

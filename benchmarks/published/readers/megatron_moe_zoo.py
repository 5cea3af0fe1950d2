"""Qwen3 235B under Megatron-Core's expert parallelism: seconds of a step or model TFLOP/s (causal attention) per GPU.

yanring/Megatron-MoE-ModelZoo@020b813:best_practice/qwen3/readme.md; its commands set the balance of the experts, the
CUDA graphs (attn, moe_router, moe_preprocess under MXFP8 and BF16 on GB200 and GB300) and the modules recomputed.
Of stages that 94 layers do not fill, embedding and loss count as layers (--account-for-embedding-in-pipeline-split).
Half of the rows are held out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from benchmarks.published.case import Case, Excluded
from benchmarks.published.cells import (
    RECOMPUTED,
    Row,
    apply_printed_shape,
    find_model,
    integer,
    number,
    read_recomputation,
)
from benchmarks.published.convert import case_of, cluster, layout_of_row, read, seconds_of_flops
from fivefold.errors import UserError
from fivefold.layout.names import Axis
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.stack.catalog import build_stack
from fivefold.stack.spec import Stack

OFFLOADED = "activations are offloaded to the host in addition to recomputation; ours are one or the other"
FSDP = "Megatron's own FSDP, whose units and gathers are no part of this stack"
DROPLESS = "experts as the router fills them: how unevenly is not printed"

MODULES: Mapping[str, str] = RECOMPUTED | {"norm, act": "norm+act", "norm, moe": "norm+moe"}


def stages_of(model: Model, layout: Layout) -> tuple[int, ...]:
    """Return layers of the stages, where embedding and loss count as a layer each."""
    per_stage, rest = divmod(model.layers + 2, layout.pp * layout.v)
    if layout.pp == 1:
        return ()
    if rest:
        raise UserError(f"{model.layers} layers, embedding and loss are not divisible by {layout.pp * layout.v} stages")
    return (per_stage - 1, *(per_stage,) * (layout.pp * layout.v - 2), per_stage - 1)


def layout_of(row: Row, model: Model) -> Layout:
    """Return the layout with its uneven stages; the experts are not cut by tensor parallelism (etp 1)."""
    layout = layout_of_row(row, zero=1, ac=read_recomputation(row, words=MODULES))
    return layout.replace(stages=stages_of(model, layout))


def _rule(row: Row) -> str:
    if row["fsdp"]:
        return FSDP
    if "offloaded" in row["note"]:
        return OFFLOADED
    return DROPLESS if row["balance"] == "dropless" else ""


def _stack(row: Row) -> Stack:
    """Return Megatron-Core with the overlap, CUDA graphs and dispatcher of a row."""
    pairs = row["note"] == "1f1b overlap"
    overlap: tuple[Axis, ...] = ("dp", "cp", "pp", "ep") if pairs else ("dp", "cp", "pp")
    graphed = row["dispatcher"] == "HybridEP" and not integer(row, "cp") > 1
    return build_stack("megatron-core").replace(
        overlap=overlap,
        pairs=pairs,
        cuda_graphs="partial" if graphed else "none",
        dispatcher="all_to_all" if row["dispatcher"] == "A2A" else "fused",
    )


def _case(row: Row) -> Case:
    """Return the case of a row, timed by its model FLOPs per second."""
    model = apply_printed_shape(find_model(row["model"]), row)
    machines = cluster(row)
    rate = number(row, "model_tflops_per_gpu") * 1e12
    return case_of(
        "megatron_moe_zoo",
        row,
        stack=_stack(row),
        model=model,
        machine=machines,
        layout=layout_of(row, model),
        seconds=lambda job: (
            number(row, "step_s") or seconds_of_flops(model, job, rate=rate, ranks=machines.ranks, count="causal")
        ),
    )


def cases() -> Iterator[Case | Excluded]:
    """Yield one case, or one exclusion, per measured row."""
    return read("megatron_moe_zoo", rule=_rule, case=_case, halved=True)

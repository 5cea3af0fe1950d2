"""Layouts of Qwen3 under Megatron-Bridge 0.1.0rc4 on two nodes of H100: seconds and allocated bytes of the first rank.

BastiaanGroot/ML-Infrastructure-Engineer@4392184:training (launch.py: batches and lengths; scripts/run_experiment.py:
max_memory_allocated of rank 0, in 1e9 bytes). Recipes of NVIDIA-NeMo/Megatron-Bridge@v0.1.0rc4, recipes/qwen: fp32
reductions, no userbuffers, no sequence parallelism, blocks of the 32B and of the mixture recomputed; its
models/gpt_provider.py: SwiGLU not fused (bias_activation_fusion off), Megatron-Core 0.14's fused cross entropy
(cross_entropy_loss_fusion, cross_entropy_fusion_impl native), compiled by PyTorch. Queries, keys and values are copied
by three kernels instead of one, and norms of queries and keys have two more each in the backward, as a layer's have:
training/profiles@52ad575, of which only numbers of kernels are read. Tokens of the mixture go to experts as an
untrained router sends them. Read after all constants were set, so all rows are held out.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.published.case import Case, Excluded
from benchmarks.published.cells import (
    Row,
    apply_printed_shape,
    degree,
    find_model,
    number,
    read_machine,
    read_recomputation,
    read_required_integer,
)
from benchmarks.published.convert import case_of, layout_of_row, read, split_into_nodes
from benchmarks.published.readers.megatron_bridge_perf import OFFLOADED
from fivefold.stack.catalog import build_stack

FIRST_STAGE = "memory of a pipeline's first stage alone, where another may have more"
BRIDGE = build_stack("megatron-bridge")
FORWARD, BACKWARD = BRIDGE.extra_kernels
STACK = BRIDGE.replace(
    overlap=("dp", "cp", "pp"),
    reduce_in_fp32=True,
    loss="upcast_compiled",
    kernels="norms",
    extra_kernels=(FORWARD + 2, BACKWARD + 4),
)


def _rule(row: Row) -> str:
    return OFFLOADED if "offloaded" in row["technique"] else ""


def _case(row: Row) -> Case:
    """Return the case of a row, on nodes of as many GPUs as it states."""
    machine = split_into_nodes(read_machine(row), read_required_integer(row, "gpus_per_node"))
    layout = layout_of_row(row, zero=1, sp=degree(row, "tp") == 1, ac=read_recomputation(row))
    attention = "unfused" if row["technique"] == "unfused attention" else "flash"
    return case_of(
        "qwen3_layouts",
        row,
        stack=STACK.replace(attention=attention),
        model=apply_printed_shape(find_model(row["model"]), row),
        machine=machine,
        layout=layout,
        seconds=number(row, "step_s"),
        memory_bytes=None if layout.pp > 1 else number(row, "peak_allocated_gb") * 1e9,
        left_out=(("peak", FIRST_STAGE),) if layout.pp > 1 else (),
    )._replace(held_out=True)


def cases() -> Iterator[Case | Excluded]:
    """Yield one case, or one exclusion, per measured row."""
    return read("qwen3_layouts", rule=_rule, case=_case)

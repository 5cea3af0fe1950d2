"""KempnerForge on nodes of 4 H200: tokens/s and peak allocated GiB of torch FSDP2 and tensor parallelism.

KempnerInstitute/KempnerForge@01b461a: kempnerforge/distributed/{parallel,tensor_parallel}.py, training/grad.py,
scripts/train.py. Weights and both moments are bf16 without a master; with FSDP, gradients of all micro-batches are
summed in full in fp32 and reduced with the last (set_requires_gradient_sync); the loss is PyTorch's, attention cuDNN's
(benchmarks/profiling: aten::_cudnn_attention_backward); checkpoints stop early, as PyTorch's do since 2.1.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.published.case import Case, Excluded
from benchmarks.published.cells import (
    Row,
    build_llama,
    integer,
    number,
    number_format,
    read_machine,
    read_recomputation,
    sharding,
)
from benchmarks.published.convert import case_of, layout_of_row, read, seconds_of_tokens, split_into_nodes
from fivefold.errors import UserError
from fivefold.job import Recipe, get_recipe
from fivefold.layout.spec import Layout
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.stack.catalog import build_stack
from fivefold.units import GIB

SOURCE = "kempnerforge"
NO_STEP = "the source prints no time and no memory of a step"
NO_WIDTH = "the source does not print the feed-forward width"
WHOLE_EXPERTS = "every tensor-parallel rank computes all experts on the same tokens"
PADDED = "each expert is padded to the tokens of the busiest: how unevenly the router fills them is not printed"
WHOLE_LOGITS = "with tp each rank holds the full embedding and, for the loss, full logits"
GRADIENTS_AND_SUMS = "without FSDP torch.compile hands out all gradients of a micro-batch at once, next to their sums"
SAME_TOKENS = "expert-parallel ranks read the same batch, so they are no data-parallel ranks"

# On 24 GPUs their own trace shows 205 reductions of a 13B block's gradients: 338 MB over 6 nodes in 14.4 ms, 20 GB/s.
NIC_GIGABITS, NIC_SOURCE = 165.0, "KempnerForge@a7f8346:benchmarks/profiling/13b_24gpu_profiling.md"
STATES: Recipe = get_recipe("bf16-full")
SUMMED: Recipe = STATES.replace(name="bf16-full-sum32", accumulated_bytes=4)


def _rule(row: Row) -> str:
    """Return why a row is left out; empty if it is not."""
    if not number(row, "step_s") and not number(row, "peak_allocated_gib"):
        return NO_STEP
    if not integer(row, "ffn"):
        return NO_WIDTH
    if integer(row, "experts") and integer(row, "tp") > 1:
        return WHOLE_EXPERTS
    if integer(row, "ep") > 1:
        return SAME_TOKENS
    return PADDED if integer(row, "experts") else ""  # model/moe.py@195da59, grouped_expert_forward


def _model(row: Row) -> Model:
    return build_llama(row, name=row["model"], rope_theta=500_000.0)


def _machine(row: Row) -> Machine:
    """Return the cluster of a row, whose nodes may have fewer GPUs than the catalog's."""
    cluster = read_machine(row, nic_gigabits=NIC_GIGABITS, source=NIC_SOURCE)
    ranks = integer(row, "gpus_per_node") or 4
    if ranks >= cluster.ranks_per_node:
        return cluster
    cluster = split_into_nodes(cluster, ranks)
    near = cluster.links[0].replace(direct=True, reduction_bandwidth=None)  # an HGX board of four has no switch
    return cluster.replace(links=(near, *cluster.links[1:]))


def _unscored_peak(row: Row, layout: Layout) -> str:
    """Return the rule by which a row's peak memory is not scored, or ""."""
    if not number(row, "peak_allocated_gib"):
        return ""
    return WHOLE_LOGITS if layout.tp > 1 else GRADIENTS_AND_SUMS if layout.dp == 1 else ""


def _case(row: Row) -> Case:
    """Return the case of a row in bf16, sharded where there are replicas."""
    model, machines = _model(row), _machine(row)
    if number_format(row["precision"]) != "bf16":
        raise UserError(f"precision {row['precision']!r}, of which the source's recipe was not read")
    zero = sharding(row, silent=3)
    layout = layout_of_row(row, zero=0, ac=read_recomputation(row))
    layout = layout.replace(zero=zero if layout.dp > 1 else 0)
    compiled = row["torch_compile"] == "true"
    unscored = _unscored_peak(row, layout)
    rate = number(row, "tokens_per_s")
    return case_of(
        SOURCE,
        row,
        stack=build_stack("kempnerforge").replace(kernels="fused" if compiled else "plain", compile=compiled),
        model=model,
        machine=machines,
        layout=layout,
        recipe=SUMMED if layout.dp > 1 else STATES,
        seconds=lambda job: seconds_of_tokens(job, rate=rate, ranks=1),
        memory_bytes=None if unscored else number(row, "peak_allocated_gib") * GIB,
        left_out=(("peak", unscored),) if unscored else (),
        rivals=f"{model.name} on {machines.ranks}, batch {row['gbs']}",
    )


def cases() -> Iterator[Case | Excluded]:
    """Yield one case, or one exclusion, per measured row."""
    return read(SOURCE, rule=_rule, case=_case)

"""The Ultra-Scale Playbook's heat maps: nanotron's best layouts on 8 to 512 H100, MFU and peak memory.

huggingface/nanotron@c252843:docs/benchmark_summary.svg; scripts/scaling_benchmarks.py@0e0a27e: fp32 gradient sums,
no recomputation, 1F1B without hidden messages, FlashAttention's norms and rotary, loss in fp32 on copies. A layer's
input is sent during the matmul of the rank's own tokens alone, 1/tp of it (functional.py@00708b8), and weights after
the update (optim/zero.py@069c21c). MFU counts full attention of 989 TFLOP/s. Memory is GiB of rank 0, allocated or
reserved (helpers.py@31aa4c4 writes both): above what lives at once by its buffers (nccl's, ZeRO's), so reserved.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.published.case import Case, Excluded
from benchmarks.published.cells import Row, build_llama, number, read_machine, sharding
from benchmarks.published.convert import case_of, layout_of_row, read, seconds_of_flops
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.stack.catalog import build_stack
from fivefold.stack.spec import Stack
from fivefold.units import GIB

PEAK_FLOPS = 989e12


def model_of(row: Row) -> Model:
    """Return the model of the printed fields."""
    return build_llama(row, name=f"nanotron-{row['model'].lower()}", tied_embeddings=row["tied_embeddings"] == "y")


def stages_of(model: Model, pp: int) -> tuple[int, ...]:
    """Return the stages of nanotron.

    A stage ends with the layer that exceeds its share of all layers and the head, by elements of their weights
    (models/base.py@01de8d9, build_model; models/llama.py@03b83fc, get_block_compute_costs).
    """
    layer = 4 * model.width * model.width + 3 * model.ffn * model.width
    total, stages = model.layers * layer + model.vocab * model.width, [0] * pp
    for index in range(model.layers):
        stages[next(stage for stage in range(pp) if index * layer * pp <= total * (stage + 1))] += 1
    return tuple(stages)


def _case(row: Row) -> Case:
    """Return the case of a row, timed by its MFU."""
    model = model_of(row)
    layout = layout_of_row(row, zero=sharding(row, silent=0))
    if layout.pp > 1 and layout.v == 1:
        layout = layout.replace(stages=stages_of(model, layout.pp))
    machines = read_machine(row)
    rate = number(row, "mfu_pct") / 100 * PEAK_FLOPS
    return case_of(
        "ultrascale_playbook",
        row,
        stack=stack_of(layout),
        model=model,
        machine=machines,
        layout=layout,
        seconds=lambda job: seconds_of_flops(model, job, rate=rate, ranks=machines.ranks, count="full"),
        memory_bytes=number(row, "peak_mem_gib") * GIB,
        memory="reserved",
    )


def stack_of(layout: Layout) -> Stack:
    """Return nanotron's stack.

    Without ZeRO-1 it coalesces no weights, and several replicas are PyTorch's DistributedDataParallel
    (trainer.py@004a89c, _init_model).
    """
    stack = build_stack("nanotron")
    if layout.zero:
        return stack
    return stack.replace(flat_copies=(), wgrad_accumulation="deferred" if layout.dp == 1 else "deferred_buckets")


def cases() -> Iterator[Case | Excluded]:
    """Yield one case, or one exclusion, per measured row."""
    return read("ultrascale_playbook", rule=lambda row: "", case=_case)

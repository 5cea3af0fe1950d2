"""How tensor parallelism cuts frozen weights in few bits: between elements that share a scale, never through them.

    int8    a scale for each row: columns have the scales of full rows, so any slice is allowed
    nf4     a scale for each 64 elements of the weight's rows, one after another; fp4 too
    fp8     a scale for each block of 128 x 128
    mxfp4   a scale for each 32 elements of a row, of routed experts alone, which etp cuts

Codes and scales of a slice are then those of the full weight, and a run under tp computes with the same base as one
process.
"""

from __future__ import annotations

from functools import lru_cache

from fivefold.base_format import FOUR_BIT_BLOCK, FP8_BLOCK, MXFP4_BLOCK, BaseFormat
from fivefold.job import Job
from fivefold.layout.sharding import shard_weight
from fivefold.layout.spec import Layout, list_divisors
from fivefold.model.spec import Model
from fivefold.model.weight import is_quantized
from fivefold.model.weights import Weight, list_block_weights


def explain_cut_block(model: Model, job: Job, *, tp: int) -> str | None:
    """Return why tp cannot cut the job's base where its blocks end, in one line; None if it can."""
    base = job.base_format
    if base is None or base.name in ("int8", "mxfp4") or tp == 1 or not job.stack.kernel_facts.fuses_linears:
        return None
    return _explain_cut_block(model, base, tp)


def explain_cut_experts(model: Model, job: Job, *, etp: int) -> str | None:
    """Return why etp cannot cut experts of the job's base where its blocks end, in one line; None if it can."""
    base = job.base_format
    if etp == 1 or model.moe is None or base is None or not base.quantizes_experts:
        return None
    block, what = (
        (FP8_BLOCK, f"block of {FP8_BLOCK} x {FP8_BLOCK}") if base.name == "fp8" else (MXFP4_BLOCK, "32 elements")
    )
    if (columns := model.moe.ffn // etp) % block == 0:
        return None
    return (
        f"adapter.base={base.name} has a scale for each {what}, and etp{etp} cuts experts into slices of {columns}; "
        "use etp1, or a base in 16 bits"
    )


@lru_cache(maxsize=1024)
def _explain_cut_block(model: Model, base: BaseFormat, tp: int) -> str | None:
    """Return the line of ``explain_cut_block`` for a base with blocks."""
    if (cut := _find_cut_block(model, base, tp)) is None:
        return None
    aligned = [degree for degree in list_divisors(tp)[1:-1] if _find_cut_block(model, base, degree) is None]
    instead = f"tp{aligned[-1]}" if aligned else "dp, cp or pp"
    block = f"{FOUR_BIT_BLOCK} elements" if base.is_four_bit else f"block of {FP8_BLOCK} x {FP8_BLOCK}"
    return (
        f"adapter.base={base.name} has a scale for each {block}, and tp{tp} cuts {cut}; use {instead}, "
        "adapter.base=int8, or a base in 16 bits"
    )


def _find_cut_block(model: Model, base: BaseFormat, tp: int) -> str | None:
    """Return a weight that tp cuts within a block, and where; None if there is none."""
    layout, seen = Layout(tp=tp), set[Weight]()
    block = FOUR_BIT_BLOCK if base.is_four_bit else FP8_BLOCK
    for layer in range(model.layers):
        for weight in list_block_weights(model, layer):
            if weight in seen or not is_quantized(weight, base) or weight.kind.startswith("expert"):
                continue
            seen.add(weight)
            rows, columns = shard_weight(weight, model=model, layout=layout, vocab=0).shape
            slices, what = [], "rows"
            if columns < weight.shape[1]:
                slices, what = [columns], "columns"
            elif rows < weight.shape[0]:  # of each part of a weight that has several
                slices = [size // tp for size in weight.parts] or [rows]
            row = columns if base.is_four_bit and what == "rows" else 1  # elements that follow one another
            if (uneven := next((size for size in slices if size * row % block), None)) is not None:
                name = f"{weight.name} [{weight.shape[0]}, {weight.shape[1]}]"
                return f"{name} into slices of {uneven} {what}"
    return None

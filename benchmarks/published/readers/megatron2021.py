"""Narayanan et al. 2021, arXiv:2104.04473, table 2: PTD-P against DeepSpeed ZeRO-3 on 384 to 2240 A100.

Printed is TFLOP/s per GPU, of hardware FLOPs with the repeated forward: 96·B·s·l·h²·(1 + s/6h + V/16lh).
Model-parallel size 96 is tp8 pp12, 280 is tp8 pp35 (§5.1: tp8 and the layers of 105/35). Table 1 prints no micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.published.case import Case, Excluded
from benchmarks.published.cells import (
    Row,
    integer,
    number,
    read_machine,
    read_recomputation,
    read_required_integer,
    sharding,
)
from benchmarks.published.convert import case_of, layout_of_row, read
from benchmarks.published.readers.gpt import gpt_of
from fivefold.errors import UserError
from fivefold.stack.catalog import build_stack

SOURCE = "megatron2021"
# of 2021: no row says fp32 gradients, all messages of tensor parallelism are waited for, and gradients are added by
# kernels of their own (megatron-lm's fusion is of February 2022)
MEGATRON = build_stack("megatron-lm").replace(reduce_in_fp32=False, async_tp=False, wgrad_accumulation="separate")
DEEPSPEED = build_stack("megatron-deepspeed").replace(family="deepspeed")


def cases() -> Iterator[Case | Excluded]:
    """Yield the cases of table 2. Alternatives share model, GPUs and batch."""
    return read(SOURCE, rule=_rule, case=_case)


def _rule(row: Row) -> str:
    if not row["layers"]:
        return "a remark in the text, not a step"
    return "" if row["mbs"] else "the micro-batch size is not printed"


def hardware_flops(row: Row) -> float:
    """Return the FLOPs of one iteration as the paper counts them.

    Attention is the full square, the layers' forward counts twice, the head's once.
    """
    batch, s, layers, h, vocab = (
        read_required_integer(row, key) for key in ("gbs", "seq", "layers", "hidden", "vocab")
    )
    return 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h))


def _case(row: Row) -> Case:
    """Return the case of a row, whose tp and pp follow from its model-parallel size."""
    zero = sharding(row, silent=0)
    tp = integer(row, "tp") or (1 if zero == 3 else 8)
    size = read_required_integer(row, "model_parallel_size")
    if size % tp:
        raise UserError(f"model-parallel size {size} is not divisible by tp{tp}")
    degrees = {"tp": str(tp), "pp": row["pp"] or str(size // tp)}
    layout = layout_of_row(row | degrees, zero=zero, ac=read_recomputation(row), sp=tp == 1)
    model = gpt_of(row, vocab=read_required_integer(row, "vocab"))
    machines = read_machine(row)
    rate = number(row, "hw_tflops_per_gpu") * 1e12 * machines.ranks
    case = case_of(
        SOURCE,
        row,
        stack=DEEPSPEED if zero == 3 else MEGATRON,
        model=model,
        machine=machines,
        layout=layout,
        seconds=hardware_flops(row) / rate if rate else None,
        rivals=f"{SOURCE} {model.name} {machines.ranks} {row['gbs']}",
    )
    return case._replace(listed=zero == 3)

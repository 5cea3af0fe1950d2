"""SimuMax's measurements on one node of B200: Megatron-Core, shortened Llama 3 and DeepSeek-V2, all four axes.

Facts of MooreThreads/SimuMax@1b8ca90:docs/b200/b200_real_repro_guide.md and simu_tools/megatron_scripts: peaks are
max_memory_allocated over all ranks, nothing overlaps, fused cross entropy, context parallelism by all-to-all.
DeepSeek pads every expert to an even share (capacity 1). Its "405B" has 16 key/value heads. In loops its B200 hold 1070
to 1100 TFLOP/s of large matmuls in bf16 (@e691807:configs/system/b200_bf16_ceperm.json, 0.475 to 0.49 of 2250), where
others of 1000 W hold 1390.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.published.case import Case, Excluded
from benchmarks.published.cells import (
    Row,
    degree,
    integer,
    number,
    read_machine,
    read_recomputation,
    read_required_integer,
    sharding,
)
from benchmarks.published.convert import batch, case_of, layout_of_row, read
from fivefold.machine.spec import Machine
from fivefold.model import catalog
from fivefold.model.spec import Model
from fivefold.spelling import make_unknown_name_error
from fivefold.stack.catalog import build_stack
from fivefold.units import GIB

SOURCE = "simumax_b200"
FLOPS_PER_JOULE = 1.085e12
NAMES = {
    "llama3-8b": "llama3-8b",
    "llama3-70b": "llama3-70b",
    "llama3-405b": "llama3-405b",
    "deepseekv2": "deepseek-v2",
    "deepseekv3": "deepseek-v3",
}


def cases() -> Iterator[Case | Excluded]:
    """Yield every run; rivals share model and tokens per step."""
    return read(SOURCE, rule=lambda row: "", case=_case)


def _model(row: Row) -> Model:
    """Return the shortened model, with the key/value heads and experts that the row prints."""
    if row["model"] not in NAMES:
        raise make_unknown_name_error(row["model"], list(NAMES), kind="model")
    model = catalog.resolve(NAMES[row["model"]]).replace(
        layers=read_required_integer(row, "layers"), vocab=read_required_integer(row, "vocab")
    )
    if model.moe is None:
        return model.replace(kv_heads=integer(row, "kv_heads") or model.kv_heads)
    experts = integer(row, "experts") or model.moe.experts
    return model.replace(moe=model.moe.replace(experts=experts, capacity=1.0))


def _machine(row: Row) -> Machine:
    where = read_machine(row)
    joules = {**where.chip.flops_per_joule, "bf16": FLOPS_PER_JOULE}
    return where.replace(chip=where.chip.replace(flops_per_joule=joules))


def _case(row: Row) -> list[Case]:
    """Return the cases of a row: with its allocated and with its reserved memory."""
    model, cp = _model(row), degree(row, "cp")
    layout = layout_of_row(
        row,
        zero=sharding(row, silent=1),
        ac=read_recomputation(row, silent="none"),
        cp_kind="ulysses" if cp > 1 else "ring",
    )
    # megatron_scripts: fused cross entropy, nothing overlaps. That the gather of a layer's input does, with a product
    # of its backward, is what Megatron-Core does, and was not read of these runs.
    stack = build_stack("megatron-core").replace(loss="fused", overlap=(), async_tp=False)
    case = case_of(
        SOURCE,
        row,
        stack=stack,
        model=model,
        machine=_machine(row),
        layout=layout,
        seconds=number(row, "iteration_ms") / 1e3,
        memory_bytes=number(row, "peak_allocated_gib") * GIB,
        rivals=f"{SOURCE} {model.name} {read_required_integer(row, 'seq') * batch(row, layout)}",
    )
    return [case, *case.with_reserved(number(row, "peak_reserved_gib") * GIB)]

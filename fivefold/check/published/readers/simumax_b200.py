"""SimuMax's measurements on one node of B200: Megatron-Core, shortened Llama 3 and DeepSeek-V2, all four axes.

Facts of MooreThreads/SimuMax@1b8ca90:docs/b200/b200_real_repro_guide.md and simu_tools/megatron_scripts: peaks are
max_memory_allocated over all ranks, nothing overlaps, fused cross entropy, context parallelism by all-to-all.
DeepSeek pads every expert to an even share (capacity 1). Its "405B" has 16 key/value heads.
"""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.check.published.case import Case, Excluded, regime
from fivefold.check.published.cells import Row, degree, integer, needed, number, precision, recomputed, sharding, where
from fivefold.check.published.convert import TRANSFORMER_ENGINE, batch, layout_of_row, read
from fivefold.model import catalog
from fivefold.model.spec import Model
from fivefold.record import nearest
from fivefold.units import GIB

SOURCE = "simumax_b200"
NAMES = {
    "llama3-8b": "llama3-8b",
    "llama3-70b": "llama3-70b",
    "llama3-405b": "llama3-405b",
    "deepseekv2": "deepseek-v2",
    "deepseekv3": "deepseek-v3",
}


def cases() -> Iterator[Case | Excluded]:
    """Every run; rivals share model and tokens per step."""
    return read(SOURCE, rule=lambda row: "", case=_case)


def _model(row: Row) -> Model:
    """The shortened model, with the key/value heads and experts that the row prints."""
    if row["model"] not in NAMES:
        raise nearest(row["model"], list(NAMES), kind="model")
    model = catalog.resolve(NAMES[row["model"]]).replace(layers=needed(row, "layers"), vocab=needed(row, "vocab"))
    if model.moe is None:
        return model.replace(kv_heads=integer(row, "kv_heads") or model.kv_heads)
    experts = integer(row, "experts") or model.moe.experts
    return model.replace(moe=model.moe.replace(experts=experts, capacity=1.0))


def _case(row: Row) -> Case:
    model, cp = _model(row), degree(row, "cp")
    layout = layout_of_row(
        row,
        zero=sharding(row, silent=1),
        ac=recomputed(row, silent="none"),
        cp_kind="ulysses" if cp > 1 else "ring",
    )
    job = TRANSFORMER_ENGINE.replace(
        sequence=needed(row, "seq"),
        global_batch=batch(row, layout),
        precision=precision(row["precision"], sums="fp32"),
        overlap=(),
    )
    machines = where(row)
    return Case(
        SOURCE,
        row["row_id"],
        regime("megatron", model, machines, layout),
        model,
        machines,
        layout,
        job,
        step_seconds=number(row, "iteration_ms") / 1e3,
        memory_bytes=number(row, "peak_allocated_gib") * GIB,
        rivals=f"{SOURCE} {model.name} {job.tokens_per_step}",
    )

"""SimuMax's measurements on one node of B200: Megatron-Core, shortened Llama 3 and DeepSeek-V2, all four axes.

Facts of MooreThreads/SimuMax@1b8ca90:docs/b200/b200_real_repro_guide.md and simu_tools/megatron_scripts: peaks are
max_memory_allocated over all ranks, nothing overlaps, fused cross entropy, context parallelism by all-to-all.
DeepSeek pads every expert to an even share (capacity 1). Its "405B" has 16 key/value heads.
"""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.check.published.case import Case, Excluded, machine, regime, rows
from fivefold.check.published.convert import TRANSFORMER_ENGINE
from fivefold.job import recipe
from fivefold.layout.spec import Layout
from fivefold.model import catalog
from fivefold.model.spec import Model
from fivefold.units import GIB

SOURCE = "simumax_b200"
NAMES = {"llama3-70b": "llama3-70b", "llama3-405b": "llama3-405b", "deepseekv2": "deepseek-v2"}


def cases() -> Iterator[Case | Excluded]:
    """Every run; rivals share model and tokens per step."""
    for row in rows(SOURCE):
        yield _case(row)


def _model(row: dict[str, str]) -> Model:
    model = catalog.resolve(NAMES[row["model"]]).replace(layers=int(row["layers"]), vocab=int(row["vocab"]))
    if model.moe is None:
        return model.replace(kv_heads=int(row["kv_heads"]))
    return model.replace(moe=model.moe.replace(capacity=1.0))


def _case(row: dict[str, str]) -> Case:
    model, gpus, cp = _model(row), int(row["gpus"]), int(row["cp"])
    layout = Layout(
        dp=int(row["dp"]),
        tp=int(row["tp"]),
        pp=int(row["pp"]),
        cp=cp,
        ep=int(row["ep"]),
        zero=1,
        mbs=1,
        cp_kind="ulysses" if cp > 1 else "ring",
    )
    job = TRANSFORMER_ENGINE.replace(
        sequence=int(row["seq"]),
        global_batch=int(row["gbs"]),
        precision=recipe("bf16"),
        overlap=(),
    )
    machines = machine("b200", gpus)
    return Case(
        SOURCE,
        row["row_id"],
        regime("megatron", model, machines, layout),
        model,
        machines,
        layout,
        job,
        step_seconds=float(row["iteration_ms"]) / 1e3,
        memory_bytes=float(row["peak_allocated_gib"]) * GIB,
        rivals=f"{SOURCE} {model.name} {job.tokens_per_step}",
    )

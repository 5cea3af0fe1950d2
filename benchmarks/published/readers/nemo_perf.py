"""NeMo 24.07 and 24.12 on DGX H100, fp8 pre-training (NVIDIA/NeMo performance_summary.md; table of tokens/s/GPU).

What the table leaves out is in NVIDIA's published configurations of the same runs (NVIDIA/dgxc-benchmarking@35a9aec:
nemo_megatron/gpt3_175b_hydra.yaml): Transformer Engine fp8 with delayed per-tensor scaling, distributed optimizer,
16-bit gradients (grad_sync_dtype), no recomputation, userbuffers where tp > 1, fused cross-entropy.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.published.case import Case, Excluded
from benchmarks.published.cells import Row, apply_printed_shape, find_model, number
from benchmarks.published.convert import (
    ADAPTERS,
    PACKED,
    case_of,
    cluster,
    layout_of_row,
    read,
    seconds_of_tokens,
)
from fivefold.model.spec import Model
from fivefold.stack.catalog import build_stack

NO_BATCH = "the table of long sequences prints neither the batch nor, without context parallelism, the layout"


def _nemotron3(name: str, *, layers: int, width: int) -> Model:
    """Return a model of Nemotron 3 by its layers and its width."""
    # NVIDIA/NeMo@01d03c1:nemo/collections/llm/recipes (nemotron3_8b, nemotron3_22b); the row's FLOPs/token agree.
    return Model(
        name=name,
        layers=layers,
        width=width,
        heads=width // 128,
        kv_heads=width // 128,
        head_dim=128,
        ffn=4 * width,
        vocab=256_000,
        norm="layernorm",
        norm_plus_one=True,
        mlp="plain",
        activation="relu2",
        rope_fraction=0.5,
    )


NEMOTRON3 = {
    "Nemotron-8B": _nemotron3("nemotron-8b", layers=32, width=4096),
    "Nemotron-22B": _nemotron3("nemotron-22b", layers=40, width=6144),
}


def _model(row: Row) -> Model:
    if row["model"] in NEMOTRON3:
        return NEMOTRON3[row["model"]]
    return find_model(row["model"])


def _rule(row: Row) -> str:
    job = row["job"]
    return {"LoRA": ADAPTERS, "SFT": PACKED, "long sequence": NO_BATCH}.get(job, "")


def _case(row: Row) -> Case:
    """Return the case of a row, under ZeRO-1."""
    model = apply_printed_shape(_model(row), row)
    layout = layout_of_row(row, zero=1)
    where = cluster(row)
    return case_of(
        "nemo_perf",
        row,
        stack=build_stack("nemo"),
        model=model,
        machine=where,
        layout=layout,
        seconds=lambda job: seconds_of_tokens(job, rate=number(row, "tokens_per_s_per_gpu"), ranks=where.ranks),
    )


def cases() -> Iterator[Case | Excluded]:
    """Yield one case, or one exclusion, per measured row."""
    return read("nemo_perf", rule=_rule, case=_case)

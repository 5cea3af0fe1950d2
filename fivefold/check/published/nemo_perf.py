"""NeMo 24.07 and 24.12 on DGX H100, fp8 pre-training (NVIDIA/NeMo performance_summary.md; table of tokens/s/GPU).

What the table leaves out is in NVIDIA's published configurations of the same runs (NVIDIA/dgxc-benchmarking@35a9aec:
nemo_megatron/gpt3_175b_hydra.yaml): Transformer Engine fp8 with delayed per-tensor scaling, distributed optimizer,
16-bit gradients (grad_sync_dtype), no recomputation, userbuffers where tp > 1, fused cross-entropy.
"""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.check.published.case import Case, Excluded, machine, regime
from fivefold.check.published.convert import (
    ADAPTERS,
    PACKED,
    TRANSFORMER_ENGINE,
    Row,
    megatron_overlap,
    narrow_gradients,
    number,
    read,
    seconds_of_tokens,
    spread,
    whole,
)
from fivefold.model.catalog import resolve
from fivefold.model.spec import Model

NO_BATCH = "the table of long sequences prints neither the batch nor, without context parallelism, the layout"


def _nemotron3(name: str, *, layers: int, width: int) -> Model:
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


def _model(row: Row) -> Model:
    if row["model"].startswith("Nemotron"):
        small = row["model"] == "Nemotron-8B"
        return _nemotron3(row["model"].lower(), layers=32 if small else 40, width=4096 if small else 6144)
    return resolve(row["model"].lower())


def _rule(row: Row) -> str:
    job = row["job"]
    return {"LoRA": ADAPTERS, "SFT": PACKED, "long sequence": NO_BATCH}.get(job, "")


def _case(row: Row) -> Case:
    model, layout = _model(row), spread(row, zero=1)
    job = TRANSFORMER_ENGINE.replace(
        sequence=whole(row, "seq"),
        global_batch=whole(row, "gbs"),
        precision=narrow_gradients("fp8"),
        overlap=megatron_overlap(layout, tensor=True),
    )
    where = machine("h100", whole(row, "gpus"))
    return Case(
        source="nemo_perf",
        row=row["row_id"],
        regime=regime("megatron", model, where, layout),
        model=model,
        machine=where,
        layout=layout,
        job=job,
        step_seconds=seconds_of_tokens(job, rate=number(row, "tokens_per_s_per_gpu"), ranks=where.ranks),
    )


def cases() -> Iterator[Case | Excluded]:
    """One per measured row."""
    return read("nemo_perf", rule=_rule, case=_case)

"""Megatron-Bridge's recompute studies and model cards: milliseconds and peak allocated memory.

NVIDIA-NeMo/Megatron-Bridge@067f987: skills/nemo-mbridge-perf-*/SKILL.md, examples/model_verification_cards. Its "GB"
are 1e9 bytes. Moonlight's recipe (src/megatron/bridge/recipes/moonlight/moonlight_16b.py@08de997) reduces gradients
and keeps both moments in 16 bits, hides no expert or tensor messages; the rest is as in ``megatron_bridge_perf``.
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
    spread,
    whole,
)
from fivefold.check.published.megatron_bridge_perf import HYBRID, PREDICTS_MORE, cluster, job_of, recomputed
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.spec import Machine
from fivefold.model.catalog import resolve
from fivefold.model.spec import Model

SOURCE = "megatron_bridge_memory"
NOT_TUNED = "a functional run of a model card, whose recomputation and precision are not stated"
NO_SETUP = "the study prints neither GPUs nor batch"
UNKNOWN_MODEL = "the model is not in our catalog"
NO_STAGES = "virtual stages are not printed"

# moonshotai/Moonlight-16B-A3B config.json, where it differs from DeepSeek-V2-Lite.
MOONLIGHT = {"name": "moonlight-16b-a3b", "ffn": 11_264, "vocab": 163_840, "positions": 8192}
RECOMPUTED = {
    "selective: [] (none)": "none",
    "selective: core_attn": "selective",
    "selective: core_attn + expandable_segments": "selective",
    "selective: mlp": "mlp",
    "selective: moe_act": "act",
    "selective: mla_up_proj, mlp": "up+rope+mlp",
}
CARDS = {
    "qwen3_30b_a3b": "qwen3-30b-a3b",
    "qwen3_235b_a22b": "qwen3-235b-a22b",
    "gpt_oss_120b": "gpt-oss-120b",
}
PRECISIONS = {"bf16": "bf16", "fp8_mx": "mxfp8", "fp8 current scaling": "fp8"}


def _rule(row: Row) -> str:
    name, table = row["model"], row["table"]
    if table.startswith("model card"):
        return _card_rule(name, row)
    if "Nemotron" in name:
        return HYBRID
    if "LoRA" in name:
        return ADAPTERS
    if name == "not named":
        return NO_SETUP
    if name == "Qwen3-30B-A3B SFT":
        return PACKED
    return ""


def _card_rule(name: str, row: Row) -> str:
    if not row["table"].endswith("pretrain_performance"):
        return NOT_TUNED
    if name == "deepseek_v3":
        return PREDICTS_MORE
    if name not in CARDS:
        return UNKNOWN_MODEL
    if not whole(row, "gbs"):
        return NO_SETUP
    return NO_STAGES if whole(row, "pp") > 1 and not whole(row, "vp") else ""


def _case(row: Row) -> Case:
    name = row["model"]
    if name.startswith("Moonlight"):
        return _moonlight(row)
    if name.startswith("Llama3-70B"):
        return _llama(row)
    model = resolve(CARDS.get(name, "qwen3-30b-a3b"))
    chip, precision = row["hardware"].removesuffix("-80GB").lower(), PRECISIONS[row["precision"]]
    layout = spread(row, zero=1, ac=recomputed(model, chip=chip, precision=precision))
    sequence = whole(row, "seq") or 4096  # the length of all its performance recipes
    job = job_of(model, layout, sequence=sequence, batch=whole(row, "gbs"), precision=precision, chip=chip)
    return _made(row, model=model, layout=layout, job=job, where=cluster(chip, whole(row, "gpus")))


def _moonlight(row: Row) -> Case:
    model = resolve("deepseek-v2-lite").replace(**MOONLIGHT, source="moonshotai/Moonlight-16B-A3B config.json")
    layout = spread(row, zero=1, ac=RECOMPUTED[row["recompute"]])
    half = narrow_gradients("bf16").replace(name="bf16-states16", moments_bytes=(2, 2))
    job = TRANSFORMER_ENGINE.replace(
        sequence=whole(row, "seq"),
        global_batch=whole(row, "gbs"),
        precision=half,
        overlap=megatron_overlap(layout),
    )
    where = machine("h100", whole(row, "gpus"))
    made = _made(row, model=model, layout=layout, job=job, where=where)
    return made._replace(rivals="moonlight recomputation")


def _llama(row: Row) -> Case:
    # Packed samples shorten attention and so the time, but no tensor that is kept.
    model, layout = resolve("llama3-70b"), spread(row, zero=1, ac=RECOMPUTED[row["recompute"]])
    precision = PRECISIONS[row["precision"]]
    job = job_of(model, layout, sequence=whole(row, "seq"), batch=whole(row, "gbs"), precision=precision, chip="h100")
    made = _made(row, model=model, layout=layout, job=job, where=machine("h100", whole(row, "gpus")))
    return made._replace(rivals="llama3-70b fine-tuning")


def _made(row: Row, *, model: Model, layout: Layout, job: Job, where: Machine) -> Case:
    gigabytes = number(row, "peak_allocated_gb") or number(row, "peak_gb")
    milliseconds = number(row, "iteration_ms")
    return Case(
        source=SOURCE,
        row=row["row_id"],
        regime=regime("megatron", model, where, layout),
        model=model,
        machine=where,
        layout=layout,
        job=job,
        step_seconds=milliseconds / 1e3 if milliseconds else None,
        memory_bytes=gigabytes * 1e9 if gigabytes else None,
    )


def cases() -> Iterator[Case | Excluded]:
    """One per measured row."""
    return read(SOURCE, rule=_rule, case=_case)

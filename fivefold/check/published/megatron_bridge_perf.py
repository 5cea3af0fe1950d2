"""Megatron-Bridge release tables 25.09 to 26.08: tokens/s and model TFLOP/s (causal attention) per GPU.

Configurations: NVIDIA-NeMo/Megatron-Bridge scripts/performance/configs, read at 00919dc (llama3), 0013c9a (llama31),
01b2977 (qwen3), 07eea52 (gpt_oss), 0fa501a and 0132842 (deepseek), and utils/overrides.py at 00538e2: distributed
optimizer, grad_reduce_in_fp32 off, fused cross-entropy, experts forced into balance, recomputation only as below.
"""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.check.published.case import Case, Excluded, machine, regime
from fivefold.check.published.convert import (
    ADAPTERS,
    PACKED,
    Row,
    in_nodes,
    megatron_overlap,
    narrow_gradients,
    number,
    read,
    seconds_of_flops,
    seconds_of_tokens,
    spread,
    whole,
)
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.spec import Machine
from fivefold.model.catalog import resolve
from fivefold.model.spec import Model

REGRESSION = "a known regression of that release"
HYBRID = "state-space layers are no part of our models"
PREDICTS_MORE = "trains a multi-token prediction module, 4 % of its FLOPs, which our models lack"
UNKNOWN_RECOMPUTE = "which modules this layout recomputes is not established"
OFFLOADED = "activations of some of the layers are offloaded (cpu_offloading_num_layers); ours are all or none"
EMPTY_STAGE = "more pipeline stages than layers: embedding and loss are stages of their own"

RACK_RANKS = 64

MODELS = {
    "LLAMA3_8B": "llama3-8b",
    "LLAMA3_70B": "llama3-70b",
    "LLAMA3.1_405B": "llama3-405b",
    "Qwen3_30B_a3B": "qwen3-30b-a3b",
    "Qwen3_235B_a22B": "qwen3-235b-a22b",
    "GPT OSS 120B": "gpt-oss-120b",
    "DeepSeekV3": "deepseek-v3",
}
PRECISIONS = {"BF16": "bf16", "MXFP8": "mxfp8", "FP8-MX": "mxfp8", "NVFP4": "nvfp4"}


def model_of(name: str) -> Model:
    """The catalog's model; token dropping is a capacity of one even share per expert, padded."""
    model = resolve(MODELS[name.partition(" (")[0]])
    if "tokendrop" in name and model.moe:
        return model.replace(moe=model.moe.replace(capacity=1.0))
    return model


def precision_of(text: str) -> str:
    """FP8 without a letter is current scaling per tensor; the parenthesised figures of 25.09 on Blackwell are MX."""
    return "mxfp8" if "MX" in text else PRECISIONS.get(text, "fp8")


def cluster(chip: str, ranks: int) -> Machine:
    """NVLink joins the 72 GPUs of a rack, of which Slurm gives a job segments of 16 nodes of 4 (executors.py)."""
    found = machine(chip, ranks)
    return in_nodes(found, RACK_RANKS) if found.ranks_per_node > RACK_RANKS else found


def chip_of(text: str) -> str:
    """``DGX-GB300`` → ``gb300``."""
    return text.removeprefix("DGX-").lower()


def recomputed(model: Model, *, chip: str, precision: str) -> str:
    """What the performance recipes recompute, in our groups."""
    if model.name == "gpt-oss-120b" and precision == "bf16" and chip in ("gb200", "b200", "h100"):
        return "norm+act"  # ["layernorm", "moe_act"]
    return "up+rope" if model.mla else "none"  # ["mla_up_proj"]


def job_of(model: Model, layout: Layout, *, sequence: int, batch: int, precision: str, chip: str) -> Job:
    """What the performance scripts set for all runs of a model."""
    # Userbuffers serve the dense models except under NVFP4 (llama3_llm_pretrain.py); of the mixtures only H100's
    # Qwen3-235B has tp > 1, without them. moe_a2a_overlap: that one too, and GPT-OSS in MXFP8.
    hides_experts = (model.name, chip) == ("qwen3-235b-a22b", "h100") or (model.name, precision) == (
        "gpt-oss-120b",
        "mxfp8",
    )
    tensor = model.moe is None and precision != "nvfp4"
    return Job(
        sequence=sequence,
        global_batch=batch,
        precision=narrow_gradients(precision),
        overlap=megatron_overlap(layout, tensor=tensor, expert=hides_experts),
        vocab_multiple=128,
    )


def _rule(row: Row) -> str:
    name, stages = row["model"], (whole(row, "pp") or 1) * (whole(row, "vp") or 1)
    if row["job"] != "Pre-Training Performance":
        return ADAPTERS if row["job"].startswith("LoRA") else PACKED
    if row["trust"] == "low":
        return REGRESSION
    if name.startswith("Nemotron"):
        return HYBRID
    if name.startswith("DeepSeek") and "w/o MTP" not in name:
        return PREDICTS_MORE
    if whole(row, "fsdp"):
        return OFFLOADED  # 20 to 40 of 80 layers in every such recipe
    if stages > model_of(name).layers:
        return EMPTY_STAGE
    if name.startswith("DeepSeek") and (row["hardware"] != "DGX-GB200" or stages != 16):
        return UNKNOWN_RECOMPUTE
    return ""


def _case(row: Row) -> Case:
    model, chip, precision = model_of(row["model"]), chip_of(row["hardware"]), precision_of(row["precision"])
    # deepseek_v3.py: four layers on each of 15 stages, the last layer with the loss.
    stages = (*(4,) * 15, 1) if model.mla else ()
    layout = spread(row, zero=1, ac=recomputed(model, chip=chip, precision=precision), stages=stages)
    job = job_of(model, layout, sequence=whole(row, "seq"), batch=whole(row, "gbs"), precision=precision, chip=chip)
    where = cluster(chip, whole(row, "gpus"))
    # From 26.02.01 on token rates are rounded, by up to 3 %; the TFLOP/s are not. GPT-OSS's count has changed.
    if model.name == "gpt-oss-120b":
        seconds = seconds_of_tokens(job, rate=number(row, "tokens_per_s_per_gpu"), ranks=where.ranks)
    else:
        rate = number(row, "model_tflops_per_gpu") * 1e12
        seconds = seconds_of_flops(model, job, rate=rate, ranks=where.ranks, count="causal")
    return Case(
        source="megatron_bridge_perf",
        row=row["row_id"],
        regime=regime("megatron", model, where, layout),
        model=model,
        machine=where,
        layout=layout,
        job=job,
        step_seconds=seconds,
    )


def cases() -> Iterator[Case | Excluded]:
    """One per measured row."""
    return read("megatron_bridge_perf", rule=_rule, case=_case)

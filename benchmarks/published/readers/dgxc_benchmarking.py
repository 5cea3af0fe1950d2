"""NVIDIA DGX Cloud benchmark recipes v24.11 to v25.05: seconds per step (NVIDIA/dgxc-benchmarking).

Configurations at 35a9aec: nemo_megatron/gpt3_175b_hydra.yaml, nemotron/*.yaml + configure.sh, grok1/grok1_314b.yaml;
at 741c886: llama3.1/pretrain_llama31.py, which takes NVIDIA/NeMo's recipes in performance mode (grad_reduce_in_fp32
off, userbuffers on where tp > 1, no recomputation). All: distributed optimizer, fused kernels, padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.published.case import Case, Excluded
from benchmarks.published.cells import (
    NO_STAGES,
    Row,
    apply_printed_shape,
    degree,
    find_model,
    integer,
    number,
    read_recomputation,
)
from benchmarks.published.convert import (
    ADAPTERS,
    PACKED,
    case_of,
    cluster,
    layout_of_row,
    read,
    seconds_of_tokens,
)
from fivefold.model.catalog import resolve
from fivefold.model.experts import MoE
from fivefold.model.spec import Model
from fivefold.stack.catalog import build_stack
from fivefold.stack.spec import Stack

XLA = "XLA schedules and recomputes by its own rules (MaxText's save_qkv_proj, PaxML's policy is not stated)"
UNKNOWN_MODEL = {
    "Nemotron-H": "Nemotron-H 56B is not in our catalog",
    "LLAMA4": "dense and mixture layers alternate, with chunked attention: no part of our models",
    "Deepseek": "a multi-token prediction module, and what is recomputed is not stated",
}
NEW_GROK = "v25.05 trains Grok by another recipe, whose token capacity and expert kernels are not stated"

# Experts of one token capacity, padded (moe_expert_capacity_factor 1.0, moe_pad_expert_input_to_capacity).
GROK = Model(
    name="grok1-314b",
    layers=64,
    width=6144,
    heads=48,
    kv_heads=8,
    head_dim=128,
    ffn=32_768,
    vocab=128_256,
    activation="gelu",
    moe=MoE(experts=8, topk=2, ffn=32_768, capacity=1.0),
    source="NVIDIA/dgxc-benchmarking@35a9aec:grok1/grok1_314b.yaml",
)


def _model(row: Row) -> Model:
    if row["model"].startswith("Grok"):
        return GROK
    return resolve("gpt3-175b") if row["model"].startswith("NeMo Megatron") else find_model(row["model"])


def _hydra(row: Row) -> bool:
    """Return whether a release runs from yaml files.

    Releases before v25.04 run GPT-3, Nemotron and Grok from them, later ones from NeMo 2 recipes.
    """
    return row["release"] < "v25.04"


def _stack(row: Row, model: Model) -> Stack:
    stack = build_stack("nemo")
    if model.moe:
        stack = stack.replace(overlap=("dp", "cp", "pp"))  # grok1_314b.yaml: ub_tp_comm_overlap false
    # nemotron4-15b-synth.yaml sets no grad_sync_dtype, which NeMo then reads as fp32.
    return stack.replace(reduce_in_fp32=model.name == "nemotron4-15b" and _hydra(row))


def _rule(row: Row) -> str:
    """Return why a row is left out; empty if it is not."""
    if "Finetuning" in row["model"]:
        return ADAPTERS if "LORA" in row["model"] else PACKED
    if row["framework"] != "NeMo/Megatron":
        return XLA
    if row["model"].startswith("Grok") and not _hydra(row):
        return NEW_GROK
    if unknown := next((rule for start, rule in UNKNOWN_MODEL.items() if row["model"].startswith(start)), ""):
        return unknown
    return NO_STAGES if degree(row, "pp") > 1 and not integer(row, "vp") else ""


def _case(row: Row) -> Case:
    """Return the case of a row, with the recomputation and the expert degrees of NVIDIA's recipes."""
    model = apply_printed_shape(_model(row), row)
    # nemotron4-340b-synth.yaml: activations_checkpoint_granularity selective, which is the attention core.
    selective = model.name == "nemotron4-340b" and _hydra(row)
    # The expert tensor degree of NeMo 1 is that of the rest.
    etp = degree(row, "etp" if row["etp"] else "tp") if model.moe else 1
    layout = layout_of_row(
        row, zero=1, etp=etp, ac=read_recomputation(row, silent="selective" if selective else "none")
    )
    where = cluster(row)
    return case_of(
        "dgxc_benchmarking",
        row,
        stack=_stack(row, model),
        model=model,
        machine=where,
        layout=layout,
        seconds=lambda job: number(row, "step_s") or seconds_of_tokens(job, rate=number(row, "tokens_per_s"), ranks=1),
    )


def cases() -> Iterator[Case | Excluded]:
    """Yield one case, or one exclusion, per measured row."""
    return read("dgxc_benchmarking", rule=_rule, case=_case)

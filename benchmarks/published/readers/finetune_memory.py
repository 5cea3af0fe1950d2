"""Fine-tuning memory: torchtune's ladder of Llama 3.2 3B on one A100, and LitGPT's LoRA of Llama 2 7B.

meta-pytorch/torchtune@bd2a0fc:README.md. Weights, gradients and both moments are bf16, without a master; each rung
keeps the ones before: packed data, torch.compile, a loss in chunks (all logits are made first, in bf16; each chunk is
widened in a compiled kernel: modules/loss, CEWithChunkedOutputLoss), recomputed blocks. The counter is the peak of
active GiB. One micro-batch a step: with gradients kept over several, the last rung could not be as low as it is.

Lightning-AI/litgpt@2685705:tutorials/resource-tables.md states hardware, precision, tokens of the longest sample
(1,304, to which the largest micro-batch is padded) and trainable parameters, which are those of rank 8 on the query and
the value; finetune/lora.py has alpha 16, dropout 0.05, AdamW and no recomputation on one GPU. ``torch.cuda``'s peak is
in GB of 10⁹ bytes. No constant is set by these rows, and no interval learns from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from benchmarks.published.case import Case, Excluded
from benchmarks.published.cells import (
    Row,
    apply_printed_shape,
    find_model,
    integer,
    number,
    number_format,
    read_machine,
)
from benchmarks.published.convert import case_of, layout_of_row, read
from fivefold.adapter import Adapter
from fivefold.errors import UserError
from fivefold.job import get_recipe
from fivefold.stack.catalog import build_stack
from fivefold.units import GIB

SHORT_SAMPLES = "samples are shorter than the printed length"
NOT_STATED = "optimizer, offloading and recomputation of the run are not printed"
EARLY_UPDATE = "the optimizer runs within the backward, so that gradients never live together"
ENCODER = "an encoder; our models are decoders"
LOOSE = "the unit is printed loosely (GB or GiB) and the counter not at all"
SHARED = "its samples' lengths are not printed, and so not what attention computes"
# torch warns of it: torch/distributed/fsdp/_wrap_utils.py, _validate_frozen_params
FLAT_GRADIENTS = "FSDP1 keeps gradients of frozen weights that share a flat weight with trained ones"
NO_BATCH = "batch and sequence length are not printed"
NOT_A_PEAK = "a counter of unknown meaning in a log"


class FinetuneSettings(NamedTuple):
    """The settings of one row in torchtune's table of memory optimizations."""

    compile: bool
    loss: Literal["plain", "fused"]
    ac: str


LADDER = {
    "+ packed dataset": FinetuneSettings(compile=False, loss="plain", ac="none"),
    "+ chunked cross entropy": FinetuneSettings(compile=True, loss="fused", ac="none"),
    "+ activation checkpointing": FinetuneSettings(compile=True, loss="fused", ac="full"),
}


def _rule(row: Row) -> str:
    """Return why a row is excluded; empty if it is not."""
    method, framework = row["method"], row["framework"]
    if "LoRA" in method or "lora" in method or "LoRA" in row["quantity"]:
        return _rule_of_adapters(row)
    if row["model"].startswith("bert"):
        return ENCODER
    if framework == "torchtune" and row["technique"]:
        if row["technique"] == "Baseline":
            return SHORT_SAMPLES
        return "" if row["technique"] in LADDER else EARLY_UPDATE
    if framework == "torchtune":
        return NOT_STATED
    if framework.startswith("litgpt"):
        return SHORT_SAMPLES
    return NOT_A_PEAK if framework == "NeMo" else LOOSE


def _rule_of_adapters(row: Row) -> str:
    """Return why a row of adapters is not scored, or nothing."""
    framework = row["framework"]
    if framework == "litgpt":
        return FLAT_GRADIENTS if (integer(row, "gpus") or 1) > 1 else ""
    if framework.startswith("litgpt"):  # its config_hub: at most 512 tokens
        return SHORT_SAMPLES
    if framework == "torchtune":
        return NOT_STATED
    return NOT_A_PEAK if framework == "NeMo" else NO_BATCH


LONGEST_SAMPLE = {"llama2-7b": 1304}  # tokens; resource-tables.md


def _adapter_case(row: Row) -> Case:
    """Return the case of a row on LoRA in litgpt."""
    size, _, name = row["model"].replace(" B ", "B ").partition(" ")
    model = find_model(f"{name} {size}")
    adapter = Adapter(
        rank=8,
        alpha=16,
        dropout=0.05,
        targets=("q_proj", "v_proj"),
        base="nf4" if row["quantization"].startswith("nf4") else None,
        double_quantization=row["quantization"] != "nf4",
    )
    layout = layout_of_row(row, zero=0, ac="none")
    case = case_of(
        "finetune_memory",
        row | {"gbs": "128"},
        stack=build_stack("torchtune").replace(loss="low_precision"),  # the logits' dtype: litgpt/utils.py
        model=model,
        machine=read_machine(row | {"hardware": "A100-40GB"}),
        layout=layout,
        recipe=get_recipe("bf16-full"),
        sequence=LONGEST_SAMPLE[model.name],
        memory_bytes=(number(row, "peak_gb") or 0) * 1e9,
        quantity="adapters",
    )
    return case._replace(job=case.job.replace(adapter=adapter))


def _case(row: Row) -> Case:
    """Return the case of a row: a technique of the ladder of one GPU, or an adapter."""
    if row["framework"] == "litgpt" and "LoRA" in row["method"]:
        return _adapter_case(row)
    model = apply_printed_shape(find_model(row["model"]), row)
    rung = LADDER[row["technique"]]
    if number_format(row["precision"]) != "bf16":
        raise UserError(f"precision {row['precision']!r} of an optimizer that keeps all in bf16")
    layout = layout_of_row(row, zero=0, ac=rung.ac)
    stack = build_stack("torchtune").replace(
        early_stop=False,  # PyTorch's checkpoints stop early since 2.1; whether torchtune's do was not read
        loss=rung.loss,
        kernels="fused" if rung.compile else "plain",
        compile=rung.compile,
    )
    return case_of(
        "finetune_memory",
        row | {"gbs": str(layout.dp * layout.mbs)},
        stack=stack,
        model=model,
        machine=read_machine(row),
        layout=layout,
        recipe=get_recipe("bf16-full"),
        memory_bytes=number(row, "peak_gib") * GIB,
        left_out=(("time", SHARED),) if number(row, "tokens_per_s") else (),
    )


def cases() -> Iterator[Case | Excluded]:
    """Yield one case, or one exclusion, per measured row."""
    return read("finetune_memory", rule=_rule, case=_case)

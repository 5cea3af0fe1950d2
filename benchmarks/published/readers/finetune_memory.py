"""Fine-tuning memory; of it torchtune's ladder of Llama 3.2 3B on one A100 trains every weight on unpacked samples.

meta-pytorch/torchtune@bd2a0fc:README.md. Weights, gradients and both moments are bf16, without a master; each rung
keeps the ones before: packed data, torch.compile, a loss in chunks (all logits are made first, in bf16; each chunk is
widened in a compiled kernel: modules/loss, CEWithChunkedOutputLoss), recomputed blocks. The counter is the peak of
active GiB. One micro-batch a step: with gradients kept over several, the last rung could not be as low as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from benchmarks.published.case import Case, Excluded
from benchmarks.published.cells import Row, apply_printed_shape, find_model, number, number_format, read_machine
from benchmarks.published.convert import ADAPTERS, case_of, layout_of_row, read
from fivefold.job import recipe
from fivefold.record import UserError
from fivefold.stack.catalog import build_stack
from fivefold.units import GIB

SHORT_SAMPLES = "samples are shorter than the printed length"
NOT_STATED = "optimizer, offloading and recomputation of the run are not printed"
EARLY_UPDATE = "the optimizer runs within the backward, so that gradients never live together"
ENCODER = "an encoder; our models are decoders"
LOOSE = "the unit is printed loosely (GB or GiB) and the counter not at all"
SHARED = "its samples' lengths are not printed, and so not what attention computes"
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
    method, framework = row["method"], row["framework"]
    if "LoRA" in method or "lora" in method or "LoRA" in row["quantity"]:
        return ADAPTERS
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


def _case(row: Row) -> Case:
    model, rung = apply_printed_shape(find_model(row["model"]), row), LADDER[row["technique"]]
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
        recipe=recipe("bf16-pure").replace(name="bf16-all", moments_bytes=(2, 2)),
        memory_bytes=number(row, "peak_gib") * GIB,
        left_out=(("time", SHARED),) if number(row, "tokens_per_s") else (),
    )


def cases() -> Iterator[Case | Excluded]:
    """Yield one case, or one exclusion, per measured row."""
    return read("finetune_memory", rule=_rule, case=_case)

"""PaddleNLP's table of pre-training on eight A100: tokens/s/GPU and peak allocated MiB under tp and ZeRO-2.

PaddlePaddle/PaddleNLP@74569c0:llm/docs/pretrain.md, with each run's configuration (the data's notes name it):
FlashAttention, fused norms and rotary embeddings, bf16 with gradients of 16 bits (amp_master_grad is off), no sequence
parallelism, nothing hidden. Qwen has q, k and v in one layer (paddlenlp/transformers/qwen/modeling.py). The counter is
paddle.device.cuda.max_memory_allocated. Half of the rows are held out.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.published.case import Case, Excluded
from benchmarks.published.cells import (
    Row,
    build_llama,
    number,
    read_machine,
    read_recomputation,
    sharding,
)
from benchmarks.published.convert import case_of, layout_of_row, read, seconds_of_tokens
from fivefold.errors import UserError
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.stack.catalog import build_stack
from fivefold.stack.spec import Stack
from fivefold.units import MIB

ALIBI = "its positions are slopes of attention (ALiBi): no part of our models"


def model_of(row: Row) -> Model:
    """Return a model of Llama's shape by the fields that the row prints; Qwen's q, k and v have biases."""
    return build_llama(row, name=row["model"].lower(), qkv_bias=row["model"].startswith("Qwen"))


def layout_of(row: Row) -> Layout:
    """Return a layout without sequence parallelism, as all of Paddle's rows say."""
    if row["sp"] != "n":
        raise UserError(f"sp is {row['sp']!r}, where these runs have none")
    layout = layout_of_row(row, zero=sharding(row, silent=0), ac=read_recomputation(row))
    return layout.replace(sp=layout.tp == 1)


def rule_of(row: Row) -> str:
    """Return the rule of Paddle's models that a row breaks."""
    return ALIBI if row["model"].startswith("Baichuan2-13B") else ""


def _stack(row: Row) -> Stack:
    stack = build_stack("paddlenlp")
    return stack.replace(input_grad_all_reduces=(1, 2)) if row["model"].startswith("Qwen") else stack


def _case(row: Row) -> Case:
    """Return the case of a row, timed by its tokens per second."""
    machines, rate = read_machine(row), number(row, "tokens_per_s_per_gpu")
    return case_of(
        "paddlenlp",
        row,
        stack=_stack(row),
        model=model_of(row),
        machine=machines,
        layout=layout_of(row),
        seconds=lambda job: seconds_of_tokens(job, rate=rate, ranks=machines.ranks),
        memory_bytes=number(row, "peak_allocated_mib") * MIB,
    )


def cases() -> Iterator[Case | Excluded]:
    """Yield one case, or one exclusion, per measured row."""
    return read("paddlenlp", rule=rule_of, case=_case, halved=True)

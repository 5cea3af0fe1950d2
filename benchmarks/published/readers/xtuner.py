"""xtuner's tables: tokens/s/GPU of DeepSpeed ZeRO-3 with Ulysses on A100, and of Megatron's experts on H800.

InternLM/xtuner@4d2758e:docs/zh_cn/acceleration/benchmark.rst; configs/llama_speed_benchmark: fp16, each layer
recomputed, one pack a rank and as many accumulated as ranks share a sequence. The packs' samples are one sequence to
attention, as the printed TFLOP/s count them. Qwen3 235B under Pai-Megatron-Patch@2b201af: 94 layers of which embedding
and loss take the room of two. Half of the rows are held out.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.published.case import Case, Excluded
from benchmarks.published.cells import (
    Row,
    apply_printed_shape,
    find_model,
    number,
    read_machine,
    read_recomputation,
    sharding,
)
from benchmarks.published.convert import case_of, layout_of_row, read, seconds_of_tokens
from benchmarks.published.readers.megatron_moe_zoo import layout_of
from fivefold.layout.names import Axis
from fivefold.model.spec import Model
from fivefold.stack.catalog import build_stack

SILENT = "precision and accumulation of the table are not printed"
UNBALANCED = "experts as the router fills them: how unevenly is not printed"

YI = Model(
    name="yi-34b",
    layers=60,
    width=7168,
    heads=56,
    kv_heads=8,
    head_dim=128,
    ffn=20_480,
    vocab=64_000,
    source="Hugging Face config.json of 01-ai/Yi-34B-200K",
)
# Of one layout the notes tell what was hidden: nothing, the messages of ZeRO, and those of tp besides.
HIDDEN: dict[str, tuple[Axis, ...]] = {
    "without overlap": (),
    "zero overlap": ("dp",),
    "zero and tp overlap": ("dp", "tp"),
}


def _rule(row: Row) -> str:
    if row["table"] == "llama3_8b":
        return SILENT
    return UNBALANCED if row["note"].startswith("unbalanced") else ""


def _case(row: Row) -> Case:
    """Return the case of a row, in XTuner or in the Megatron that it is compared with."""
    machines, rate = read_machine(row), number(row, "tokens_per_s_per_gpu")
    if row["table"] == "Megatron MoE":
        model = apply_printed_shape(find_model(row["model"]), row)
        layout, stack = layout_of(row, model), build_stack("megatron-core")
        stack = stack.replace(
            overlap=HIDDEN.get(row["note"], stack.overlap),
            dispatcher="fused" if row["dispatcher"] == "DeepEP" else "all_to_all",
        )
    else:
        model = YI if row["model"] == "Yi-34B-200K" else apply_printed_shape(find_model(row["model"]), row)
        layout = layout_of_row(row, zero=sharding(row, silent=0), ac=read_recomputation(row))
        stack = build_stack("deepspeed")
        layout = layout.replace(cp_kind="ulysses" if layout.cp > 1 else "ring")
    return case_of(
        "xtuner",
        row,
        stack=stack,
        model=model,
        machine=machines,
        layout=layout,
        seconds=lambda job: number(row, "step_s") or seconds_of_tokens(job, rate=rate, ranks=machines.ranks),
        rivals=f"{model.name}, batch {row['gbs']}" if row["gbs"] else "",
    )


def cases() -> Iterator[Case | Excluded]:
    """Yield one case, or one exclusion, per measured row."""
    return read("xtuner", rule=_rule, case=_case, halved=True)

"""NeMo AutoModel's performance tables: seconds of a step under FSDP2 with Transformer Engine on H100.

NVIDIA-NeMo/Automodel@01926a5 and @2861c41:docs/performance-summary; its recipes as they were when a row was last
changed: Qwen3 30B (qwen3_moe_30b_te_deepep.yaml@51d4df5), GPT-OSS 20B (gptoss_20b_te_deepep.yaml@9af7a77: flex
attention, fused linear cross entropy), Llama 3 70B (custom_llama3_1_70b_pretrain_benchmark_8nodes.yaml@f5b942f:
compile), Nemotron 3 Nano 30B (nemotron_nano_v3_te_deepep.yaml@9af7a77: blocks are recomputed, which the table does not
print), DeepSeek-V3 and GPT-OSS 120B (deepseek_v3_te_deepep.yaml and gptoss_120b_te_deepep.yaml@822effa), LoRA on one
GPU (llama3_1_8b_peft_benchmark.yaml@507bfb7 and qwen2_5_7b_peft_benchmark.yaml@822effa: with Liger's kernels) and on
more (custom_llama3_3_70b_instruct_peft_benchmark.yaml and others of @2013a4d: blocks are recomputed and compiled).
Parameters are bf16 (of mixtures models/qwen3_moe/model.py@05e0902, ``cast_model_to_dtype``). Experts lie over ep ranks
(DeepEP) and the rest of the group shards them; a token's experts are consecutive (``fake_balanced_gate``). Half of the
rows are held out, and all whose recipe was read after all constants were set.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.published.case import Case, Excluded
from benchmarks.published.cells import (
    Row,
    apply_printed_shape,
    degree,
    find_model,
    integer,
    number,
    read_machine,
    read_recomputation,
)
from benchmarks.published.convert import case_of, layout_of_row, read
from fivefold.adapter import Adapter
from fivefold.job import get_recipe
from fivefold.model.spec import Model
from fivefold.stack.catalog import build_stack

UNREAD = "what its recipe recomputes was not read"
FLUSHED = "its pipeline is emptied several times in a step, after each local batch"


class RecipeFacts(NamedTuple):
    """The facts of a row's recipe that differ from its stack, or that the table does not print."""

    stack: dict[str, Any] = {}
    recomputes: bool = False  # full blocks
    zero: int = 3  # 2: ``reshard_after_forward`` is off
    ep: str = ""
    dropout: float = 0.0  # of LoRA
    is_late: bool = True  # read after all constants were set


COMPILED = {"compile": True}
UPCAST = {"loss": "plain"}  # MaskedCrossEntropy's default
RECIPES = {
    ("Qwen3 30B A3B", "full"): RecipeFacts(is_late=False),
    ("GPT-OSS 20B", "full"): RecipeFacts({"attention": "flash2", "loss": "chunked"}, is_late=False),
    ("Llama 3 70B", "full"): RecipeFacts(COMPILED, is_late=False),
    ("Nemotron V3 Nano 30B", "full"): RecipeFacts(recomputes=True),
    ("DeepSeek V3", "full"): RecipeFacts(recomputes=True, zero=2),
    ("GPT-OSS 120B", "full"): RecipeFacts({"attention": "flash2"}, ep="64"),
    ("Llama 3 8B", "LoRA"): RecipeFacts(UPCAST, dropout=0.1),
    ("Qwen2.5 7B", "LoRA"): RecipeFacts(UPCAST),
    ("Llama 3 70B", "LoRA"): RecipeFacts(COMPILED | UPCAST, recomputes=True),
    ("Qwen2.5 32B", "LoRA"): RecipeFacts(COMPILED | UPCAST, recomputes=True),
}


def _rule(row: Row) -> str:
    if (row["model"], row["method"]) not in RECIPES:
        return UNREAD
    return FLUSHED if degree(row, "pp") > 1 and (integer(row, "grad_accum") or 1) > 1 else ""


def _route_to_consecutive(model: Model) -> Model:
    """Return the model with experts as FakeBalancedGate chooses them (@89e3a9f:components/moe/layers.py): in a row."""
    moe = model.moe
    if moe is None:
        return model
    size = next(size for size in range(moe.topk, moe.experts + 1) if moe.experts % size == 0)
    return model.replace(moe=moe.replace(groups=moe.experts // size, topk_groups=1))


def _case(row: Row) -> Case:
    """Return the case of a row, with the ZeRO stage and the recomputation of its recipe."""
    recipe = RECIPES[row["model"], row["method"]]
    row = row | {"ep": row["ep"] or recipe.ep}
    model = _route_to_consecutive(apply_printed_shape(find_model(row["model"]), row))
    layout = layout_of_row(
        row,
        zero=recipe.zero,
        ac=read_recomputation(row, silent="full" if recipe.recomputes else "none"),
    )
    case = case_of(
        "nemo_automodel",
        row,
        stack=build_stack("nemo-automodel").replace(**recipe.stack),
        model=model,
        machine=read_machine(row),
        layout=layout,
        recipe=get_recipe("bf16-pure"),
        seconds=number(row, "step_s"),
    )._replace(held_out=recipe.is_late)
    if row["method"] == "full":
        return case
    adapter = Adapter(rank=16, alpha=32, dropout=recipe.dropout)  # of all linear layers
    return case._replace(job=case.job.replace(adapter=adapter))


def cases() -> Iterator[Case | Excluded]:
    """Yield one case, or one exclusion, per measured row."""
    return read("nemo_automodel", rule=_rule, case=_case, halved=True)

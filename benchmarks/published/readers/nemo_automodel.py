"""NeMo AutoModel's performance tables: seconds of a step under FSDP2 with Transformer Engine on H100.

NVIDIA-NeMo/Automodel@01926a5 and @2861c41:docs/performance-summary; of its recipes four were read: Qwen3 30B
(qwen3_moe_30b_te_deepep.yaml@51d4df5), GPT-OSS 20B (gptoss_20b_te_deepep.yaml@9af7a77: flex attention, fused linear
cross entropy), Llama 3 70B (custom_llama3_1_70b_pretrain_benchmark_8nodes.yaml@f5b942f: compile),
Nemotron 3 Nano 30B (nemotron_nano_v3_te_deepep.yaml@9af7a77: blocks are recomputed, which the table does not print).
Parameters are bf16 (of mixtures models/qwen3_moe/model.py@05e0902, ``cast_model_to_dtype``). Experts lie over ep ranks
(DeepEP) and the rest of the group shards them. Half of the rows are held out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.published.case import Case, Excluded
from benchmarks.published.cells import Row, apply_printed_shape, find_model, number, read_machine, read_recomputation
from benchmarks.published.convert import ADAPTERS, case_of, layout_of_row, read
from fivefold.job import get_recipe
from fivefold.stack.catalog import build_stack

UNREAD = "what its recipe recomputes was not read"

# What each recipe that was read sets otherwise than its stack.
RECIPES: dict[str, dict[str, Any]] = {
    "Qwen3 30B A3B": {},
    "GPT-OSS 20B": {"attention": "flash2", "loss": "chunked"},
    "Llama 3 70B": {"compile": True},
    "Nemotron V3 Nano 30B": {},
}
HYBRIDS = ("Nemotron V3 Nano 30B",)  # their recipe recomputes blocks where the table prints nothing


def _rule(row: Row) -> str:
    if row["method"] != "full":
        return ADAPTERS
    return "" if row["model"] in RECIPES else UNREAD


def _case(row: Row) -> Case:
    model = apply_printed_shape(find_model(row["model"]), row)
    return case_of(
        "nemo_automodel",
        row,
        stack=build_stack("nemo-automodel").replace(**RECIPES[row["model"]]),
        model=model,
        machine=read_machine(row),
        layout=layout_of_row(
            row, zero=3, ac=read_recomputation(row, silent="full" if row["model"] in HYBRIDS else None)
        ),
        recipe=get_recipe("bf16-pure"),
        seconds=number(row, "step_s"),
    )._replace(held_out=row["model"] in HYBRIDS)  # read after all constants were set


def cases() -> Iterator[Case | Excluded]:
    """Yield one case, or one exclusion, per measured row."""
    return read("nemo_automodel", rule=_rule, case=_case, halved=True)

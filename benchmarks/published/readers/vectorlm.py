"""vectorlm's reference throughput of Llama 3 8B on 1 to 4 A100: tokens/s under PyTorch's FSDP.

VectorInstitute/vectorlm@9045f08: profiling/benchmark.py (bfloat16 weights, torch.optim.AdamW, tokens are counted on all
GPUs), vectorlm/utils/model_utils.py (reductions in bf16, blocks recomputed without reentry, FlashAttention-2 in
transformers' Llama), profiling/configs (four micro-batches per step; adapters of rank 8, of peft's targets of Llama:
q_proj and v_proj). All tokens are zeros, whose matrix multiplications draw less power than those of text. Read after
all constants were set, so all rows are held out.
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
from fivefold.adapter import Adapter
from fivefold.job import get_recipe
from fivefold.stack.catalog import build_stack

STACK = build_stack("fsdp2").replace(
    attention="flash2",
    flat_shards=True,
    comm_buffers="freed",
    backward_all_gather="needed",
    zero2_shards="view",
    reduce_in_fp32=False,
)
ADAPTER = Adapter(rank=8, alpha=32, dropout=0.1, targets=("q_proj", "v_proj"))


def _case(row: Row) -> Case:
    """Return the case of a row, under FSDP."""
    case = case_of(
        "vectorlm",
        row,
        stack=STACK,
        model=apply_printed_shape(find_model(row["model"]), row),
        machine=read_machine(row),
        layout=layout_of_row(row, zero=sharding(row, silent=3), ac=read_recomputation(row)),
        recipe=get_recipe("bf16-full"),
        seconds=lambda job: seconds_of_tokens(job, rate=number(row, "tokens_per_s"), ranks=1),
    )._replace(held_out=True)
    return case if row["method"] == "full" else case._replace(job=case.job.replace(adapter=ADAPTER))


def cases() -> Iterator[Case | Excluded]:
    """Yield one case per measured row."""
    return read("vectorlm", rule=lambda row: "", case=_case)

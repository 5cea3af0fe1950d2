"""Megatron-LM's defaults on the GH200 of Alps: TFLOP/s (causal attention) and tokens/s per GPU of real shapes.

Zeltrxn2333/lsaie-ss26-gipfelsturm@7644e91:launch-mp.sh: core_v0.16.1 with the distributed optimizer, gradients summed
and reduced in bf16 (--main-grads-dtype), the native fused cross entropy, no norms of queries and keys, heads of
width / heads, the vocabulary of GPT-2. Read after all constants were set, so all rows are held out.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.published.case import Case, Excluded
from benchmarks.published.cells import Row, build_llama, number, read_machine, read_recomputation
from benchmarks.published.convert import case_of, layout_of_row, read, seconds_of_flops, seconds_of_tokens
from fivefold.job import Job
from fivefold.model.spec import Model
from fivefold.stack.catalog import build_stack


def _model(row: Row) -> Model:
    return build_llama(row, name=row["model"])


def _case(row: Row) -> Case:
    """Return the case of a row, timed by its tokens or its FLOPs per second."""
    model, machine = _model(row), read_machine(row)

    def seconds(job: Job) -> float:
        if rate := number(row, "tokens_per_s_per_gpu"):
            return seconds_of_tokens(job, rate=rate, ranks=machine.ranks)
        rate = number(row, "model_tflops_per_gpu") * 1e12
        return seconds_of_flops(model, job, rate=rate, ranks=machine.ranks, count="causal")

    attention = "flash2" if row["technique"] == "FlashAttention-2" else "flash"
    return case_of(
        "gipfelsturm",
        row,
        stack=build_stack("megatron-core").replace(reduce_in_fp32=False, attention=attention),
        model=model,
        machine=machine,
        layout=layout_of_row(row, zero=1, ac=read_recomputation(row)),
        seconds=seconds,
    )._replace(held_out=True)


def cases() -> Iterator[Case | Excluded]:
    """Yield one case per measured row."""
    return read("gipfelsturm", rule=lambda row: "", case=_case)

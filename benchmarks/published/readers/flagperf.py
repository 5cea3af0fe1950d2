"""FlagPerf's NVIDIA baselines: tokens/s/GPU of LLaMA under PaddleNLP and Megatron-Core on A100 and H100.

FlagOpen/FlagPerf:training/nvidia/*/README.md, each row with its commit. PaddleNLP 2.6.0rc0 has no fused rotary
embedding, and whether norms are fused is printed. Megatron-Core: sequence parallel with tp, --recompute-activations,
which is the attention core. Whether its optimizer is sharded is not printed: of the time that
is little (taken as sharded), of the memory most, which so is left out. Half of the rows are held out.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.published.case import Case, Excluded
from benchmarks.published.cells import Row, apply_printed_shape, find_model, number, read_machine, read_recomputation
from benchmarks.published.convert import CHECK, case_of, layout_of_row, read, seconds_of_tokens
from benchmarks.published.readers import paddlenlp
from fivefold.stack.catalog import build_stack
from fivefold.stack.spec import Stack

COUNTER = "the counter of memory is not named, and its unit loosely"
UNSHARDED = "whether the optimizer is sharded is not printed"
NOT_READ = "kernels and precision of this software's run are not established"


def _rule(row: Row) -> str:
    if row["framework"].startswith("PaddleNLP"):
        # of one configuration the row says ZeRO-2 over four ranks, its name pipeline of four and none
        return paddlenlp.rule_of(row) if row["zero"] else CHECK
    return "" if row["framework"].startswith("megatron-core") else NOT_READ


def _stack(row: Row) -> Stack:
    """Return PaddleNLP with the norms that a row prints, or Megatron-Core."""
    if not row["framework"].startswith("PaddleNLP"):
        return build_stack("megatron-core")
    kernels = "norms" if row["fused_norm"] == "y" else "plain"
    return build_stack("paddlenlp").replace(kernels=kernels, rope="unfused")


def _case(row: Row) -> Case:
    """Return the case of a row, in PaddleNLP or Megatron-Core."""
    paddle = row["framework"].startswith("PaddleNLP")
    machines, rate = read_machine(row), number(row, "tokens_per_s_per_gpu")
    memory = number(row, "mem_gb_first_stage") or number(row, "mem_gib_nvidia_smi")
    return case_of(
        "flagperf",
        row,
        stack=_stack(row),
        model=paddlenlp.model_of(row) if paddle else apply_printed_shape(find_model(row["model"]), row),
        machine=machines,
        layout=paddlenlp.layout_of(row) if paddle else layout_of_row(row, zero=1, ac=read_recomputation(row)),
        seconds=lambda job: seconds_of_tokens(job, rate=rate, ranks=machines.ranks),
        left_out=(("peak", COUNTER if paddle else UNSHARDED),) if memory else (),
    )


def cases() -> Iterator[Case | Excluded]:
    """Yield one case, or one exclusion, per measured row."""
    return read("flagperf", rule=_rule, case=_case, halved=True)

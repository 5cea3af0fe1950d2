"""MosaicGPT under Composer's FSDP on 8 to 256 A100: tokens/s in January 2023 (PyTorch 1.12) and in April (1.13.1).

mosaicml/examples@bf232bf:examples/llm/throughput/FULL_TABLES.md, of runs that differ in the batch alone the first; and
@9fa3ceb:examples/llm/throughput/README.md, without its runs on A100-40GB, which llm-foundry prints again. Models as in
src/mosaic_gpt.py and src/models/mosaic_gpt: biases (as many parameters as are printed), PyTorch's cross entropy, the
vocabulary of GPT-2 as it is in January and padded in April. Attention (attn_impl of yamls/mosaic_gpt) is FlashAttention
0.2.2 in January and the same in Triton in April. mp_mode as in llm_foundry; checkpoints of these versions run all
again. Read after all constants were set, so all rows are held out.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.published.case import Case, Excluded
from benchmarks.published.cells import Row, number, read_machine, read_recomputation, sharding
from benchmarks.published.convert import case_of, layout_of_row, read, seconds_of_tokens
from benchmarks.published.readers.llm_foundry import model_of
from fivefold.stack.catalog import build_stack

STACK = build_stack("llm-foundry").replace(loss="plain", early_stop=False)


def _case(row: Row) -> Case:
    """Return the case of a row, whose step follows from the printed tokens per second of a GPU."""
    return case_of(
        "mosaicgpt",
        row,
        stack=STACK.replace(
            reduce_in_fp32=row["mp_mode"] != "PURE",
            attention="flash1" if row["table"] == "January 2023" else "flash1_triton",
        ),
        model=model_of(row),
        machine=read_machine(row),
        layout=layout_of_row(row, zero=sharding(row, silent=3), ac=read_recomputation(row)),
        seconds=lambda job: seconds_of_tokens(job, rate=number(row, "tokens_per_s"), ranks=1),
    )._replace(held_out=True, release=row["table"])


def cases() -> Iterator[Case | Excluded]:
    """Yield one case per measured row."""
    return read("mosaicgpt", rule=lambda row: "", case=_case)

"""A GPT of 4B in eight pipeline stages on A100, with vocabularies of 32,000 to 256,000: MFU and reserved GiB.

sail-sg/VocabularyParallelism@6191c3b:artifact (Yeung et al. 2024, arXiv:2411.05288): Megatron-LM with Transformer
Engine, fp16 with gradients in 16 bits, FlashAttention-2, no dropout, untied embeddings, learned positions, 1F1B without
virtual stages. MFU counts full attention and the head, of 312 TFLOP/s; memory is the largest "max reserved" of a rank,
in MB of 2^20 bytes over 1024 (show_result_full_exp.py). ``redis`` moves layers off the last stage
(transformer_block.py, get_num_layers_to_build), down to none. The head in parts over all stages, which the other
methods have, is no layout of ours. Read after all constants were set, so all rows are held out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from benchmarks.published.case import Case, Excluded
from benchmarks.published.cells import Row, number, read_machine, read_recomputation, read_required_integer
from benchmarks.published.convert import case_of, layout_of_row, read, seconds_of_flops
from benchmarks.published.readers.gpt import gpt_of
from fivefold.errors import UserError
from fivefold.job import get_recipe
from fivefold.stack.catalog import build_stack

SPREAD_HEAD = "the head is spread over all pipeline stages, which no layout of ours says"
STACK = build_stack("megatron-core").replace(attention="flash2")


def _rule(row: Row) -> str:
    return "" if row["stages"] else SPREAD_HEAD


def _read_stages(row: Row) -> tuple[int, ...]:
    """Return the layers of each stage in ``4-4-4-5-5-5-5-0``; none if all have as many."""
    if not re.fullmatch(r"\d+(-\d+)*", row["stages"]):
        raise UserError(f"stages is {row['stages']!r}, which are no layers of stages")
    stages = tuple(map(int, row["stages"].split("-")))
    return () if len(set(stages)) == 1 else stages


def _case(row: Row) -> Case:
    """Return the case of a row, timed by its MFU on A100."""
    vocab = read_required_integer(row, "vocab")
    model = gpt_of(row, vocab=vocab).replace(tied_embeddings=False, dropout=0.0)
    where = read_machine(row)
    rate = number(row, "mfu_pct") / 100 * 312e12
    return case_of(
        "vocabulary_parallelism",
        row,
        stack=STACK,
        model=model,
        machine=where,
        layout=layout_of_row(row, zero=1, ac=read_recomputation(row), stages=_read_stages(row)),
        recipe=get_recipe("fp16"),
        seconds=lambda job: seconds_of_flops(model, job, rate=rate, ranks=where.ranks, count="full"),
        memory_bytes=number(row, "peak_reserved_gib") * 2**30,
        memory="reserved",
        rivals=f"vocabulary_parallelism {vocab} {row['seq']}",
    )._replace(held_out=True)


def cases() -> Iterator[Case | Excluded]:
    """Yield one case, or one exclusion, per measured row."""
    return read("vocabulary_parallelism", rule=_rule, case=_case)

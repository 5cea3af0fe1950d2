"""DeepSeek-V3 on 2048 H800 (arXiv:2412.19437): 2.664e6 GPU hours for 14.8e12 tokens; held out of every fit.

§2.2 and 3 print one more predicted token, pp16 ep64 and ZeRO-1, DualPipe, whose pairs hide the experts' messages, fp8
on tiles in matmuls and dispatches, moments in bf16; norms, up-projections of latent attention and SwiGLU computed
again; inputs of SwiGLU kept in fp8 and outputs of attention in 12 bits; no tp.
Assumed, as not printed: micro-batches of one sequence; that every step took what the average at the final batch took
(97 % of the tokens, §4.2), restarts and evaluation included; its own kernels are as quick as Megatron's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from benchmarks.published.case import Case, Excluded
from benchmarks.published.cells import Row, apply_printed_shape, read_machine, read_required_integer, sharding
from benchmarks.published.convert import case_of, layout_of_row, read
from fivefold.errors import UserError
from fivefold.job import get_recipe
from fivefold.model.catalog import resolve
from fivefold.stack.catalog import build_stack

SOURCE = "deepseek_v3"


def _seconds(row: Row) -> float:
    """Return the seconds of a step at the final batch size."""
    match = re.fullmatch(r"(\S+) H800 h / (\S+) tokens", row["value"])
    if not match:
        raise UserError(f"value {row['value']!r} is not read")
    hours, tokens = float(match[1]), float(match[2])
    return (
        read_required_integer(row, "gbs")
        * read_required_integer(row, "seq")
        * hours
        * 3600
        / tokens
        / read_required_integer(row, "gpus")
    )


def _case(row: Row) -> Case:
    """Return the case of a row, with the recomputation of the paper and micro-batches of one sequence."""
    model = apply_printed_shape(resolve("deepseek-v3-mtp"), row)
    layout = layout_of_row(row | {"mbs": "1"}, zero=sharding(row, silent=1), ac="norm+up+rope+act")
    return case_of(
        SOURCE,
        row | {"mbs": "1"},
        stack=build_stack("deepseek"),
        model=model,
        machine=read_machine(row),
        layout=layout,
        recipe=get_recipe("fp8-tiles").replace(name="fp8-tiles of DeepSeek-V3", dispatches="fp8", moments_bytes=(2, 2)),
        seconds=_seconds(row),
    )._replace(held_out=True)


def cases() -> Iterator[Case | Excluded]:
    """Yield one case, or one exclusion, per measured row."""
    return read(SOURCE, rule=lambda row: "", case=_case)

"""Korthikanti et al. 2022, arXiv:2205.05198: GPT of 22B to 1T on A100, full recomputation against selective with sp.

Table 5 gives seconds per iteration. Figure 1 gives the states and activations of the layers of the first stage, as
calculon read them (calculon-ai/calculon@caa4b11:calculon/llm/validation.py): 18 bytes per parameter, no embedding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from benchmarks.published.case import Case, Excluded
from benchmarks.published.cells import (
    Row,
    integer,
    number,
    number_format,
    read_machine,
    read_recomputation,
    read_required_integer,
)
from benchmarks.published.convert import case_of, layout_of_row, read
from benchmarks.published.readers.gpt import FP16_FP32_GRADIENTS, gpt_of
from fivefold.errors import UserError
from fivefold.stack.catalog import build_stack
from fivefold.units import GIB

SOURCE = "korthikanti2022"


NOT_A_STEP = "the time of one layer, a saving or a share: not a step"


def cases() -> Iterator[Case | Excluded]:
    """Yield the cases of table 5, and those of the two columns of figure 1."""
    return read(SOURCE, rule=_rule, case=_cases, kinds=("measured", "analytic"))


def _rule(row: Row) -> str:
    return "" if row["iteration_s"] or row["parameter_and_optimizer_gib"] else NOT_A_STEP


def _cases(row: Row) -> Case | list[Case]:
    if not row["iteration_s"]:
        return list(_figure_1(row))
    return _case(row, row["row_id"], sp=row["sp"] == "y", seconds=number(row, "iteration_s"))


FIGURE_1: tuple[tuple[str, Literal["states", "activations"], str, bool], ...] = (
    ("parameter_and_optimizer_gib", "states", "none", False),
    ("activation_none_gib", "activations", "none", False),
    ("activation_selective_sp_gib", "activations", "selective", True),
)


def _figure_1(row: Row) -> Iterator[Case]:
    """Yield a case for each bar of figure 1: activations under a kind of recomputation, with or without sp."""
    for column, quantity, ac, sp in FIGURE_1:
        case = _case(row | {"recompute": ac}, f"{row['row_id']} {column}", sp=sp)
        yield case._replace(
            model=case.model.replace(
                vocab=read_required_integer(row, "tp"), position="none"
            ),  # the layers alone, as they count
            job=case.job.replace(vocab_multiple=1),
            memory_bytes=number(row, column) * GIB,
            quantity=quantity,
        )


def _case(row: Row, name: str, *, sp: bool, seconds: float | None = None) -> Case:
    """Return the case ``name`` of a row of a table or a figure, with or without sequence parallelism."""
    if not row["schedule"].startswith("1f1b"):
        raise UserError(f"schedule {row['schedule']!r} is none of the paper's")
    if number_format(row["precision"]) != "fp16":
        raise UserError(f"precision {row['precision']!r} is not the paper's")
    model = gpt_of(row, vocab=read_required_integer(row, "vocab"))
    interleaved = "interleaved" if integer(row, "vp") > 1 else "1f1b"  # the cell speaks of all models
    layout = layout_of_row(row | {"schedule": interleaved}, zero=0, ac=read_recomputation(row), sp=sp)
    return case_of(
        SOURCE,
        row,
        name=name,
        stack=build_stack("megatron-lm"),
        model=model,
        machine=read_machine(row),
        layout=layout,
        recipe=FP16_FP32_GRADIENTS,
        seconds=seconds,
    )

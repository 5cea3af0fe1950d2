"""Korthikanti et al. 2022, arXiv:2205.05198: GPT of 22B to 1T on A100, full recomputation against selective with sp.

Table 5 gives seconds per iteration. Figure 1 gives the states and activations of the layers of the first stage, as
calculon read them (calculon-ai/calculon@caa4b11:calculon/llm/validation.py): 18 bytes per parameter, no embedding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from fivefold.check.published.case import Case, Excluded, machine, regime, rows
from fivefold.check.published.gpt import FP16_FP32_GRADIENTS, PLAIN_MEGATRON, gpt
from fivefold.layout.spec import Layout
from fivefold.units import GIB

SOURCE = "korthikanti2022"


def cases() -> Iterator[Case | Excluded]:
    """Table 5, and the two columns of figure 1."""
    for row in rows(SOURCE):
        if row["iteration_s"]:
            yield _case(row, row["row_id"], ac=row["recompute"], sp=row["sp"] == "y", seconds=float(row["iteration_s"]))
        elif row["parameter_and_optimizer_gib"]:
            yield from _figure_1(row)
        elif row["kind"] == "measured":
            yield Excluded(SOURCE, row["row_id"], "the time of one layer, or a saving: not a step")


FIGURE_1: tuple[tuple[str, Literal["states", "activations"], str, bool], ...] = (
    ("parameter_and_optimizer_gib", "states", "none", False),
    ("activation_none_gib", "activations", "none", False),
    ("activation_selective_sp_gib", "activations", "selective", True),
)


def _figure_1(row: dict[str, str]) -> Iterator[Case]:
    for column, quantity, ac, sp in FIGURE_1:
        case = _case(row, f"{row['row_id']} {column}", ac=ac, sp=sp)
        yield case._replace(
            model=case.model.replace(vocab=int(row["tp"]), position="none"),  # the layers alone, as they count
            job=case.job.replace(vocab_multiple=1),
            memory_bytes=float(row[column]) * GIB,
            quantity=quantity,
        )


def _case(row: dict[str, str], name: str, *, ac: str, sp: bool, seconds: float | None = None) -> Case:
    model = gpt(
        layers=int(row["layers"]),
        width=int(row["hidden"]),
        heads=int(row["heads"]),
        vocab=int(row["vocab"]),
        positions=int(row["seq"]),
    )
    v = int(row["vp"] or 1)
    layout = Layout(
        dp=int(row["dp"]),
        tp=int(row["tp"]),
        pp=int(row["pp"]),
        v=v,
        schedule="interleaved" if v > 1 else "1f1b",
        mbs=int(row["mbs"]),
        ac=ac,
        sp=sp,
    )
    job = PLAIN_MEGATRON.replace(
        sequence=int(row["seq"]),
        global_batch=int(row["gbs"]),
        precision=FP16_FP32_GRADIENTS,
        vocab_multiple=128,
        async_tp=True,
    )
    machines = machine("a100", int(row["gpus"]))
    return Case(SOURCE, name, regime("megatron", model, machines, layout), model, machines, layout, job, seconds)

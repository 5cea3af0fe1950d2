"""Documents that are packed into one sequence and kept apart stay apart, however the sequence is cut."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from tests.agree.parity.cases import ShortCase
from tests.agree.parity.compare import judge
from tests.agree.parity.rank import train_rank
from tests.processes import run_forked
from tests.selection import mark_share


@pytest.mark.parametrize(
    "case",
    mark_share(
        4,
        [
            ShortCase("dense", "dp2 mbs2 ac=selective"),
            ShortCase("few-kv", "cp4 mbs2"),
            ShortCase("biased", "tp2 cp2 mbs1 cp=ulysses ac=core"),
            ShortCase(
                "mla", "cp2 pp2 zb1p mbs2 ac=full"
            ),  # several micro-batches are underway, each with its documents
        ],
    ),
    ids=str,
)
def test_no_token_attends_to_another_document(case: ShortCase) -> None:
    apart = case.job.replace(documents="separate")
    (alone,) = run_forked(1, train_rank, case.model, Layout(), apart, seconds=120.0)
    verdict = judge(
        case, run_forked(case.layout.world, train_rank, case.model, case.layout, apart, seconds=120.0), like=alone
    )
    assert verdict.is_equal, verdict
    (joined,) = run_forked(1, train_rank, case.model, Layout(), case.job, seconds=120.0)
    assert max(abs(a - b) for a, b in zip(alone.losses, joined.losses, strict=True)) > 1e-4


@pytest.mark.parametrize(
    ("layout", "apart"),
    mark_share(
        3,
        [
            ("cp2 zero3 mbs2 cp=ulysses ac=selective", True),
            ("tp2 cp2 zero3 mbs2 cp=ulysses ac=selective", True),
            ("tp2 cp2 zero3 mbs2 cp=ulysses ac=selective", False),
        ],
    ),
)
def test_unfused_attention_equals_flash_attention(layout: str, apart: bool) -> None:
    """Against one process with flash attention, on every axis that it runs under."""
    case = ShortCase("dense", layout)
    job = case.job.replace(documents="separate" if apart else "joined")
    (flash,) = run_forked(1, train_rank, case.model, Layout(), job, seconds=120.0)
    unfused = Unfused(case.model, case.layout, job.replace(attention="unfused"))
    told = run_forked(case.layout.world, train_rank, *unfused, seconds=120.0)
    verdict = judge(unfused, told, like=flash)
    assert verdict.is_equal, verdict
    assert verdict.said == (), verdict.said
    assert apart or verdict.flops[0] == verdict.flops[1]


class Unfused(NamedTuple):
    model: Model
    layout: Layout
    job: Job

"""Dry-run tapes of small layouts, made once for all tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from fivefold.dry_run.fake.world import list_representatives
from fivefold.dry_run.rank_tapes import run_rank
from fivefold.dry_run.record.tape import Tape
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.catalog import build_model
from fivefold.model.spec import Model

TINY = build_model("tiny").replace(width=64, heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=256)


@cache
def _make_tapes(
    layout: str, model: Model | None = None, *, job: Job | None = None, all_ranks: bool = True
) -> list[Tape]:
    result = Layout.parse(layout)
    model = model or TINY.replace(layers=max(2, result.pp * result.v))
    if job is None:
        job = Job(sequence=36 if result.cp == 3 else 32, global_batch=4 * (result.dp if result.pp > 1 else 1))
    ranks = range(result.world) if all_ranks else list_representatives(result)
    return [run_rank(model=model, layout=result, job=job, rank=rank, streams=True).steady for rank in ranks]


@pytest.fixture(scope="session")
def make_tapes() -> Callable[..., list[Tape]]:
    """``make_tapes(layout, model, job=, all_ranks=)``: the steady step of all ranks, or of the representatives."""
    return _make_tapes

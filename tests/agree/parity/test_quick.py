"""Parity in a minute: each axis and kind of recomputation once or more; ``matrix.py`` has all models and schedules."""

from __future__ import annotations

import pytest

from fivefold.layout.schedule.pipeline_schedule import SCHEDULES
from fivefold.layout.spec import Layout
from tests.agree.parity.cases import END, MODELS, ShortCase, batch, text
from tests.agree.parity.compare import run
from tests.agree.parity.covering import build_cases, list_cases
from tests.selection import mark_share

pytestmark = pytest.mark.slow

CASES = (
    ShortCase("biased", "dp1 mbs3 ac=full/2"),
    ShortCase("few-kv", "tp4 zero0 mbs1 ac=norm+act"),
    ShortCase("dense", "dp2 tp2 zero1 mbs1 nosp ac=rope+out"),
    ShortCase("mla", "cp2 zero3 mbs1 ac=selective cp=ulysses"),
    ShortCase("moe-biased", "dp2 tp2 ep2 etp2 zero2 mbs1 ac=moe+norm"),
    ShortCase("moe", "tp2 cp2 ep4 zero3/2 mbs1 ac=selective"),
    ShortCase("delta", "dp2 pp2 ep2 zb1p zero2 mbs1"),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_layout_equals_one_process(case: ShortCase) -> None:
    verdict = run(case)
    assert verdict.is_equal, verdict
    assert verdict.said == (), verdict.said
    assert verdict.flops[0] == verdict.flops[1]


@pytest.mark.parametrize(
    ("ac", "forwards", "cores"), mark_share(3, [("none", 1, 1), ("selective", 1, 2), ("full", 2, 2)])
)
@pytest.mark.parametrize("schedule", mark_share(3, ["dualpipev v2", "1f1b", "zb1p"]))
def test_blocks_run_forward_once_and_again_where_they_are_recomputed(
    schedule: str, ac: str, forwards: int, cores: int
) -> None:
    verdict = run(ShortCase("dense", f"pp2 {schedule} ac={ac}"))
    assert (verdict.forwards, verdict.cores) == (forwards, cores)
    assert verdict.is_equal


@pytest.mark.long  # the matrix itself is for `make parity`
def test_the_cases_have_every_pair_of_features() -> None:
    """As many layouts as promised, every schedule, and only pairs left out that no layout of eight ranks can have."""
    cases, impossible = build_cases()
    layouts = [case.layout for case in cases]
    assert len(list_cases()) >= 120
    assert {layout.world for layout in (case.layout for case in list_cases())} >= {1, 2, 4, 8}
    assert {layout.schedule for layout in layouts if layout.pp > 1} == set(SCHEDULES)
    assert {case.model_name for case in cases} == set(MODELS)
    for one, other in impossible:
        assert not any(_has(layout, one) and _has(layout, other) for layout in layouts)


def _has(layout: Layout, factor: tuple[str, str]) -> bool:
    name, value = factor
    return name in ("dp", "tp", "pp", "ep", "etp") and f"{name}{getattr(layout, name)}" == (value or f"{name}1")


def test_the_batch_has_the_stated_size() -> None:
    job = CASES[0].job
    assert int((text() == END).sum()) == 101
    first, second = batch(job, step=0), batch(job, step=1)
    assert first.shape == (job.global_batch, job.sequence + 1)
    assert first[0, -1] == first[1, 0]
    assert first[-1, -1] == second[0, 0]

"""Planner and dry run agree on gathers and dispatches in fp8, under each axis that sends them."""

from __future__ import annotations

import pytest

from fivefold.job import RECIPES
from fivefold.planner.counts.counts import Counts
from tests.agree.dry_run.cases import Case
from tests.agree.dry_run.compare import count_expected, run
from tests.agree.dry_run.matrix import WORST
from tests.selection import mark_share

pytestmark = pytest.mark.slow

CASES = (
    Case("grouped", 4, "dp2 zero1 mbs1", 192, 4, "fp8-wire"),
    Case("grouped", 4, "dp4 zero3/2 mbs1", 192, 8, "fp8-wire"),
    Case("grouped", 4, "dp2 zero3 mbs1 ac=full", 192, 4, "fp8-tiles-wire", "gloo"),
    Case("odd", 4, "dp3 pp2 zero2 mbs1 zb1p", 192, 12, "fp8-wire"),
    Case("llama3-8b", 2, "dp2 tp4 zero3 mbs1", 768, 4, "fp8-tiles-wire"),  # blocks of 128
    Case("qwen3-30b-a3b", 2, "dp4 ep2 zero3 mbs1", 768, 4, "fp8-wire"),
    Case("mixtral-8x7b", 2, "dp4 ep4 zero1 mbs1", 768, 8, "fp8-tiles-wire"),
    Case("mixtral-8x7b", 2, "dp2 tp2 ep2 etp2 zero1 mbs1 ac=full", 768, 4, "fp8-tiles-wire"),
    Case("llama3-8b", 2, "dp2 tp2 zero1 mbs1", 768, 4, "fp8-nanotron"),
    Case("grouped", 4, "dp2 zero3 mbs1", 192, 4, "fp8-lm"),
    Case("odd", 4, "dp3 pp2 zero2 mbs1 zb1p", 192, 12, "fp8-lm"),
    Case("mixtral-8x7b", 2, "dp2 ep2 zero1 mbs1", 768, 4, "fp8-deepseek"),
    Case("deepseek-v2-lite", 3, "dp2 pp2 ep2 zero1 mbs1 ac=moe+norm", 768, 6, "fp8-tiles-wire"),
)


@pytest.mark.parametrize("case", mark_share(18, CASES), ids=str)
def test_planned_fp8_messages_equal_the_dry_run(case: Case) -> None:
    verdict = run(case)
    assert verdict.unequal == ()
    assert abs(verdict.worst_stage) <= WORST, verdict.stages
    wide = RECIPES[case.precision].replace(gathers="weights", dispatches="rows", weights_bytes=2)
    more, less = (
        count_expected(Counts(case.model, job), case.layout, stages=(0,))
        for job in (case.job.replace(precision=wide), case.job)
    )
    assert less["dp", "all_gather"][1] < 0.9 * more["dp", "all_gather"][1]  # the embedding's stay

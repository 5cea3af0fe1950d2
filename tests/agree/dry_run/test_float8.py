"""Planner and dry run agree where products are computed in eight bits: casts are temporaries of both."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.planner.predict import Planner, predict
from tests.agree.drawn import Drawn
from tests.agree.dry_run.cases import Case
from tests.agree.dry_run.compare import run
from tests.agree.dry_run.drawn import list_miscounts
from tests.agree.dry_run.matrix import WORST
from tests.agree.parity.families import model_of
from tests.selection import mark_share

pytestmark = pytest.mark.slow

CASES = (
    Case("llama2-7b", 3, "dp2 cp2 zero3 mbs2", 1536, 8, "fp8"),
    Case("llama3-8b", 2, "dp2 zero3 mbs1 ac=full", 1536, 4, "fp8-tiles"),
    Case("llama3-8b", 3, "dp2 tp2 zero2 mbs1 ac=selective nosp", 1536, 4, "fp8-rowwise"),
    Case("llama3-8b", 2, "dp4 tp4 zero2 mbs3", 1536, 24, "fp8-rowwise-gw", "gloo"),
    Case("llama3-8b", 4, "dp2 tp2 pp2 zero1 zb1p mbs1", 1536, 8, "fp8-rowwise"),
    Case("biased", 5, "dp2 tp2 cp2 zero1 mbs3 ac=full", 64, 12, "fp8-tiles"),
    Case("mixtral-8x7b", 2, "dp2 tp2 ep2 etp2 zero1 mbs1", 768, 4, "fp8-rowwise"),
    Case("qwen3-30b-a3b", 3, "dp2 pp2 zero1 zb1p mbs1 ac=mlp", 768, 8, "fp8-rowwise"),
    Case("deepseek-v2-lite", 4, "dp2 tp2 ep2 zero1 mbs2 ac=norm+act", 768, 8, "fp8"),
    Case("deepseek-v3", 4, "dp2 ep2 pp2 zero1 zbv v2 mbs1", 768, 8, "fp8-rowwise-gw"),
    Case("deepseek-v3", 2, "dp2 tp2 ep4 zero3 mbs1 ac=moe+norm", 768, 4, "fp8-tiles"),
    Case("grouped", 3, "dp2 tp2 zero3 mbs1", 96, 4, "tf32"),  # nothing is cast: as fp32
    Case("llama3-8b", 2, "dp2 tp2 zero1 mbs1", 1536, 4, "mxfp8"),
    Case("odd", 3, "dp2 zero3 mbs1 ac=selective", 96, 4, "nvfp4"),
    Case("qwen3-30b-a3b", 2, "dp2 ep2 zero1 mbs1", 768, 4, "mxfp8"),
    Case("mixtral-8x7b", 2, "dp2 tp2 ep2 etp2 zero1 mbs1", 768, 4, "nvfp4"),
)


@pytest.mark.parametrize("case", mark_share(18, CASES), ids=str)
def test_planned_bytes_of_casts_equal_the_dry_run(case: Case) -> None:
    verdict = run(case)
    assert verdict.unequal == ()
    assert abs(verdict.worst_stage) <= WORST, verdict.stages


def test_the_planned_peak_includes_fp8_casts() -> None:
    """It is where the gradient of the last down-projection is made, of m [1536, 11008] and g [1536, 4096]: both in fp8,
    each with one scale."""
    case = CASES[0]
    peaks = [
        Planner(model=item.model, machine=item.machine, job=item.job).step(item.layout).memory.peak_bytes
        for item in (case, case._replace(precision="bf16"))
    ]
    assert peaks[0] - peaks[1] == 1536 * (11008 + 4096) + 2 * 4


@pytest.mark.parametrize("recipe", mark_share(4, ["fp8", "fp8-tiles", "mxfp8", "nvfp4"]))
def test_experts_of_attention_stay_in_16_bits(recipe: str) -> None:
    """They are counted as the trainer runs them, and take as long as in bf16."""
    layout, machine = Layout.parse("dp2 zero2 mbs1"), resolve("b200:2", local=Path("/nowhere"))
    model = model_of("jetmoe", layout).replace(layers=2)
    jobs = [Job(sequence=16, global_batch=4, precision=get_recipe(name)) for name in (recipe, "bf16")]
    assert list_miscounts(Drawn(0, model, layout, jobs[0])) == []
    seconds = [
        {
            operation.name: operation.forward_seconds
            for operation in predict(model=model, machine=machine, layout=layout, job=job).operations
            if operation.name.startswith(("attention.experts", "attention.router"))
        }
        for job in jobs
    ]
    assert len(seconds[0]) == 3
    assert seconds[0] == seconds[1]

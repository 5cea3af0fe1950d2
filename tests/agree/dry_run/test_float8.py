"""Planner and dry run agree where products are computed in eight bits: casts are temporaries of both."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.machine.spec import Machine
from fivefold.model.catalog import build_model
from fivefold.model.spec import Model
from fivefold.model.vision_weights import PREFIX
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


IN_16_BITS = {  # of a family: beginnings of the names of its matmuls that stay in 16 bits, besides head and router
    "jetmoe": ("attention.experts.", "attention.router"),
    "deepseek_v32": ("attention.indexer.", "attention.core.absorb"),
    "deepseek_v4": ("mixer.indexer.", "mixer.compress.", "mixer.out_down"),
    "gemma3n_text": ("laurel.", "per_layer.", "altup.", "embed.per_layer", "embed.altup", "head.altup"),
    "axk2": ("norm1.gate_", "norm2.gate_", "attention.indexer."),
}


@pytest.mark.parametrize("recipe", mark_share(4, ["fp8", "fp8-tiles", "mxfp8", "nvfp4"]))
@pytest.mark.parametrize("family", mark_share(3, IN_16_BITS))
def test_matmuls_in_16_bits_are_counted_and_take_as_long_as_in_bf16(family: str, recipe: str) -> None:
    """The dry run counts the FLOPs of those that run in few bits."""
    layout, machine = Layout.parse("dp2 zero2 mbs1"), resolve("b200:2", local=Path("/nowhere"))
    model = model_of(family, layout)
    jobs = [Job(sequence=16, global_batch=4, precision=get_recipe(name)) for name in (recipe, "bf16")]
    assert list_miscounts(Drawn(0, model, layout, jobs[0])) == []
    seconds = [list_forward_seconds(IN_16_BITS[family], model=model, machine=machine, job=job) for job in jobs]
    assert seconds[0]
    assert seconds[0] == seconds[1]


def test_a_vision_tower_takes_as_long_in_fp8_as_in_bf16() -> None:
    model, machine = build_model("gemma3-4b"), resolve("b200:2", local=Path("/nowhere"))
    jobs = [Job(sequence=512, global_batch=4, precision=get_recipe(name), images=1) for name in ("fp8", "bf16")]
    seconds = [list_forward_seconds((PREFIX,), model=model, machine=machine, job=job) for job in jobs]
    assert seconds[0]
    assert seconds[0] == seconds[1]


def list_forward_seconds(beginnings: tuple[str, ...], *, model: Model, machine: Machine, job: Job) -> dict[str, float]:
    """Of the operations whose names begin so."""
    operations = predict(model=model, machine=machine, layout=Layout.parse("dp2 zero2 mbs1"), job=job).operations
    return {part.name: part.forward_seconds for part in operations if part.name.startswith(beginnings)}

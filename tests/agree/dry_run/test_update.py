"""The update of every optimizer: the planner's messages, products, states and memory equal those of the dry run."""

from __future__ import annotations

from typing import Literal

import pytest

from fivefold.dry_run.fake.world import list_representatives
from fivefold.dry_run.memory.breakdown import sum_stage_memory
from fivefold.dry_run.rank_tapes import run_rank
from fivefold.dry_run.record.tape import ALLOC, FREE, SCOPE, Tape
from fivefold.planner.counts.update import count_scratch_bytes
from fivefold.planner.predict import Planner
from fivefold.update import Optimizer
from tests.agree.dry_run.cases import OWN, Case
from tests.agree.dry_run.compare import EXACT, count_expected, differences, stages_held, sum_traffic, work
from tests.selection import mark_share

pytestmark = pytest.mark.slow

LAYOUTS = (
    Case("grouped", 3, "dp2 tp2 zero1 mbs1", 64, 2),
    Case("biased", 2, "dp3 zero3 mbs1", 64, 3, "fp32"),
    Case("odd", 2, "dp2 pp2 zero2 mbs1", 64, 4, "bf16-grad16"),  # a table at each end
    Case("grouped", 2, "tp8 mbs1", 64, 1),  # copies of key heads
    Case("odd", 4, "pp2 dualpipe mbs1", 64, 4, "bf16-pure"),  # stages that two ranks hold
    Case("mixtral-8x7b", 1, "dp2 tp2 ep2 etp2 zero1 mbs1", 64, 2),
    Case("qwen3-30b-a3b", 1, "dp4 zero1/2 ep2 mbs1", 64, 4),
)


def scratch(tape: Tape) -> int:
    """Return the most bytes that the update allocates and holds."""
    sizes: dict[int, int] = {}
    live = start = most = 0
    updating = False
    for kind, first, second, _ in tape:
        if kind == ALLOC:
            sizes[first] = second
            live += second
        elif kind == FREE:
            live -= sizes.pop(first)
        elif kind == SCOPE:
            updating = tape.scopes[first].phase == "update"
            start = live if updating else start
        most = max(most, live - start) if updating else most
    return most


@pytest.mark.parametrize(
    ("case", "kind"),
    mark_share(24, [(case, kind) for case in LAYOUTS for kind in ("muon", "adafactor", "adamw8bit", "adamw", "sgd")]),
    ids=str,
)
def test_planned_memory_of_the_update_equals_the_dry_run(
    case: Case, kind: Literal["muon", "adafactor", "adamw8bit", "adamw", "sgd"]
) -> None:
    optimizer = Optimizer(kind=kind, momentum=0.9 if case.layout.tp > 1 else 0.0)
    model, layout, job = case.model, case.layout, case.job.replace(optimizer=optimizer)
    planner = Planner(model=model, machine=case.machine, job=job)
    step, first = planner.step(layout), list_representatives(layout)
    tapes = {  # Muon's ranks differ in their products: some have no matrix in the last round
        rank: run_rank(model=model, layout=layout, job=job, rank=rank, streams=case.streams).steady
        for rank in (range(layout.world) if kind == "muon" else first)
    }
    if kind == "muon":
        assert sum(map(work, tapes.values())) == step.work.hardware_flops
    held = stages_held(layout, micro_batches=layout.micro_batches(job))
    for stage, (rank, stages) in enumerate(zip(first, held, strict=True)):
        plan, ours = step.memory.stages[stage], sum_stage_memory(tapes[rank], stage)
        assert [(name, getattr(plan, name)) for name in EXACT] == [(name, getattr(ours, name)) for name in EXACT]
        assert differences(sum_traffic(tapes[rank]), count_expected(planner.counts, layout, stages=stages)) == []
        assert plan.peak_bytes == pytest.approx(ours.peak_bytes, rel=0.02)
        expected = count_scratch_bytes(planner.counts, layout, chunks=stages)
        assert expected == pytest.approx(scratch(tapes[rank]), rel=0.05, abs=2000), (rank, kind)


def test_cases_have_the_features_that_they_name() -> None:
    assert OWN["odd"].tied_embeddings
    assert OWN["grouped"].kv_heads < LAYOUTS[3].layout.tp

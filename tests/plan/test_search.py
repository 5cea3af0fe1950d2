"""The search against brute force, and what predict refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

import fivefold
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.model.catalog import named
from fivefold.plan.predict import predict
from fivefold.plan.search import search
from fivefold.record import Mistake

JOB = Job(sequence=4096, global_batch=64)
NODE = resolve("h100:8", local=Path("/nowhere"))


def test_the_best_is_the_best_of_all() -> None:
    model = named("llama3-8b")
    found = search(model=model, machine=NODE, job=JOB)
    every = [
        predict(model=model, machine=NODE, layout=Layout(dp=8, zero=zero, mbs=mbs), job=JOB)
        for zero in range(4)
        for mbs in (1, 2, 4, 8)
    ]
    fitting = [step for step in every if step.memory.fits]
    assert min(step.time.step_seconds for step in fitting) == found.steps[0].time.step_seconds
    assert len(found.steps) == len(fitting)
    assert len(found.steps) + len(found.refused) == len(every)
    assert all("needs" in reason for _, reason in found.refused)


def test_what_does_not_fit_says_by_how_much() -> None:
    found = search(model=named("llama3-70b"), machine=NODE, job=JOB)
    assert found.steps == []
    assert "of 79" in found.refused[0][1] or "of 80" in found.refused[0][1] or "of 74" in found.refused[0][1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dp2 tp2x2 mbs1", "2D tensor parallelism is not counted; try 'dp2 tp4"),
        ("dp16 mbs1", "needs 16 ranks"),
        ("dp8 mbs16", "gbs 128"),
    ],
)
def test_a_layout_that_cannot_run_is_refused_in_one_line(text: str, said: str) -> None:
    with pytest.raises(Mistake, match=said) as caught:
        predict(model=named("llama3-8b"), machine=NODE, layout=Layout.parse(text), job=JOB)
    assert "\n" not in str(caught.value)


def test_a_batch_that_the_ranks_cannot_share_is_refused() -> None:
    with pytest.raises(Mistake, match="try gbs 16"):
        search(model=named("llama3-8b"), machine=NODE, job=JOB.replace(global_batch=12))


def test_a_faster_chip_and_a_longer_step() -> None:
    model, layout = named("llama3-8b"), Layout.parse("dp8 zero3 mbs1")
    step = predict(model=model, machine=NODE, layout=layout, job=JOB)
    double = NODE.replace(chip=NODE.chip.replace(peak_flops={k: 2 * v for k, v in NODE.chip.peak_flops.items()}))
    assert predict(model=model, machine=double, layout=layout, job=JOB).time.step_seconds < step.time.step_seconds
    parts = step.time.compute_seconds + sum(step.time.exposed_seconds.values()) + step.time.optimizer_seconds
    assert parts == pytest.approx(step.time.step_seconds)
    assert 0.2 < step.mfu.causal < step.mfu.full < 0.75


def test_the_short_way_in_python() -> None:
    step = fivefold.predict("llama3-8b", "h100:8", "dp8 zero3 mbs1", sequence=4096, global_batch=64)
    assert step == predict(model=named("llama3-8b"), machine=NODE, layout=Layout.parse("dp8 zero3 mbs1"), job=JOB)

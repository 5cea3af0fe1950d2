"""What holds for every question, and for the layouts that questions choose."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fivefold as ff
from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.model.catalog import build_model
from fivefold.planner.compare import ComparedCase, compare
from fivefold.planner.predict import Planner, predict
from fivefold.planner.questions.batches import list_reasonable_batches
from fivefold.planner.questions.changes import list_changes
from fivefold.planner.questions.fewest_gpus import find_fewest_gpus
from fivefold.planner.questions.largest_model import find_largest_model
from fivefold.planner.questions.micro_batch import find_largest_micro_batch
from fivefold.planner.questions.sequence import search_longest_sequence
from fivefold.planner.ratios import compute_ratios
from fivefold.planner.search.neighbours import walk
from tests.planner.questions.cases import NODE, SMALL


def test_a_job_that_does_not_fit_the_model_is_rejected_before_layouts_are_tried() -> None:
    for question in (find_fewest_gpus, find_largest_model):
        with pytest.raises(UserError, match="images=4: small has no vision tower that is read; leave images out"):
            question(model=SMALL, machine=NODE, job=Job(global_batch=8, images=4))


@pytest.mark.parametrize(
    ("model", "machine", "layout", "why"),
    [
        ("tiny", "h200:8", "dp2 pp4 v3 ac=full", "12 stages are more than layers=6"),
        (
            "gpt-oss-20b",
            "h100-pcie:128",
            "dp8 tp2x2 pp4 gpipe zero1",
            "2D tensor parallelism is not supported with expert",
        ),
        (
            "deepseek-v3",
            "h800:24",
            "dp2 tp2x2 pp3 zb2p zero3 mbs4",
            "2D tensor parallelism is not supported with expert",
        ),
        ("nemotron4-15b", "l40s:16", "dp2 tp8 zero1 mbs4", "rows are not divisible by tp=8"),
        ("llama3-8b", "h100:4", "dp8", "needs 8 ranks, but h100 has 4"),
    ],
)
def test_every_question_rejects_a_layout_that_predict_rejects(model: str, machine: str, layout: str, why: str) -> None:
    """In the words of ``predict``, whatever is asked; the planner itself has no other way in."""
    job = Job(sequence=3 if model == "nemotron4-15b" else 512, global_batch=64)
    chips, spec, chosen = resolve(machine, local=Path("/nowhere")), build_model(model), Layout.parse(layout)
    with pytest.raises(UserError, match=re.escape(why)):
        predict(model=spec, machine=chips, layout=chosen, job=job)
    planner = Planner(model=spec, machine=chips, job=job)
    about = {"model": spec, "machine": chips, "job": job, "layout": chosen}
    asks: dict[str, Callable[[], object]] = {
        "estimate": lambda: planner.estimate(chosen),
        "step": lambda: planner.step(chosen),
        "changes": lambda: list_changes(**about),
        "ratios": lambda: compute_ratios(spec, machine=chips, job=job, layout=chosen),
        "walk": lambda: walk(planner, chosen),
        "compare": lambda: compare([ComparedCase(spec, chips, chosen, item) for item in (job, job.replace(steps=2))]),
    }
    if "rows" not in why:  # else another micro-batch, sequence or batch is the answer
        asks |= {
            "micro-batch": lambda: find_largest_micro_batch(**about),
            "sequence": lambda: search_longest_sequence(**about),
            "batch": lambda: list_reasonable_batches(**about, tokens=1e12),
        }
    for name, ask in asks.items():
        with pytest.raises(UserError) as caught:
            ask()
        assert why in str(caught.value), name


@pytest.mark.slow
def test_each_global_batch_has_its_fastest_layout_and_one_is_recommended() -> None:

    batches = ff.ask("batch", "llama3.2-1b", "h100:2", tokens=1e12)
    assert [batch.recommended for batch in batches].count(True) == 1
    fastest = ff.search("llama3.2-1b", "h100:2", gbs=batches[0].global_batch, top=1).best[0].step
    assert batches[0].step_seconds == pytest.approx(fastest.time.step_seconds, rel=0.01)  # which also varies ``reduce``
    given = ff.ask("batch", "llama3.2-1b", "h100:2", "dp2 zero3 mbs1", tokens=1e12)
    assert {batch.layout for batch in given} == {"dp2 zero3 mbs1"}
    assert not any(batch.recommended for batch in given)


def test_where_nothing_fits_the_layout_of_least_risk_comes_first() -> None:
    """A faster layout of a higher risk is named with it, not alone."""

    result = ff.search("llama3-8b", "h100:2", seq=8192)
    assert not result.best
    assert result.tight is not None
    least = min(result.misses, key=lambda miss: miss.risk or 1.0)
    assert least.risk is not None
    assert least.risk < result.tight.risk
    line = result.describe_tight()
    assert line.index(f"accepts {least.layout}") < line.index(
        f"--risk {result.tight.option} also {result.tight.layout}"
    )


@pytest.mark.long  # two searches of 64 GPUs; `test_each_global_batch…` compares those of two
@pytest.mark.slow
def test_the_fastest_layout_of_a_question_is_the_first_of_search() -> None:
    """``search`` balances the stages of pipelines; the questions did not."""

    asked: dict[str, Any] = {"seq": 8192, "gbs": 64, "stack": "megatron-core"}
    first = ff.search("llama3-70b", "h100:64", **asked).best[0].step
    run = ff.ask("run", "llama3-70b", "h100:64", tokens=15e12, **asked)[0]
    assert (run.layout, run.step_seconds) == (first.layout, pytest.approx(first.time.step_seconds))

"""Preference optimization (DPO): counts as planned, and losses and rewards that no layout changes."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from fivefold.adapter import Adapter
from fivefold.job import Job, LearningRate, get_recipe
from fivefold.layout.spec import Layout
from fivefold.planner.predict import predict
from fivefold.results.step_comparison import compare
from fivefold.trainer.data.prepare import prepare
from fivefold.trainer.run import Data, Run
from tests.agree.test_measured import MACHINE
from tests.agree.test_supervised import MODEL, train
from tests.processes import run_forked
from tests.selection import mark_share
from tests.trainer.data.conversations import preferences, write_lines, write_tokenizer

CASES = [
    ("dp2 zero3 mbs2 ac=full", None),
    ("dp2 zero1 mbs2", None),
    ("tp2 mbs4", None),
    ("dp2 zero3 mbs2 ac=full", Adapter(rank=4, base="nf4")),
    ("dp2 tp2 zero2 mbs2 ac=selective", Adapter(rank=4)),
    ("dp2 mbs2", Adapter(rank=3, targets=("q_proj", "down_proj"))),
    ("cp2 pp2 mbs2 ac=full", None),
    ("dp2 pp2 zero3 mbs2", Adapter(rank=4)),
    ("cp2 mbs4 cp=ulysses", Adapter(rank=4, base="nf4")),
]


def run_of(folder: Path, adapter: Adapter | None) -> Run:
    job = Job(
        objective="dpo",
        dpo_beta=0.5,
        sequence=96,
        global_batch=8,
        steps=5,
        precision=get_recipe("fp32"),
        adapter=adapter,
        learning_rate=LearningRate(peak=1e-3, warmup_steps=1),
    )
    data = Data(corpus=str(folder / "a.jsonl"), tokenizer=str(folder / "tokenizer"), format="preferences", heldout=0.2)
    return Run(folder=folder / "run", job=job, data=data, evaluate_sequences=8, sample="")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("preferences")
    write_tokenizer(place / "tokenizer")
    write_lines(place / "a.jsonl", preferences(80, chat=True))
    run = run_of(place, None)
    prepare(
        run.data.corpus,
        tokenizer=run.data.tokenizer,
        directory=run.folder / "data",
        holdout=run.data.heldout,
        samples=run.samples(),
    )
    return place


@cache
def train_alone(run: Run) -> tuple[list[float], float | None]:
    ((losses, heldout, _),) = run_forked(1, train, run, "dp1 mbs2", seconds=120.0)
    return losses, heldout


@pytest.mark.parametrize(("text", "adapter"), mark_share(3, CASES))
def test_a_layout_changes_no_loss_and_counts_are_as_planned(folder: Path, text: str, adapter: Adapter | None) -> None:
    run, layout = run_of(folder, adapter), Layout.parse(text)
    expected, heldout = train_alone(run)
    predicted = predict(model=MODEL, machine=MACHINE, layout=layout, job=run.job)
    for number, (losses, held, step) in enumerate(run_forked(layout.world, train, run, text, seconds=120.0)):
        assert step is not None
        if number == 0:
            assert losses == pytest.approx(expected, rel=1e-5)
            assert held == pytest.approx(heldout, rel=1e-5)
        rows = compare(predicted, step)
        assert [row for row in rows if row.is_wrong] == []
        assert next(row for row in rows if row.quantity == "peak memory").error == pytest.approx(0, abs=0.05)
    assert min(abs(loss - expected[0]) for loss in expected[1:]) > 1e-5

"""Supervised runs and preference optimization (DPO): counts as planned, and losses that no layout changes.

Ranks of supervised runs have unequally many targets.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from fivefold.adapter import Adapter
from fivefold.job import Job, LearningRate, Objective, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.planner.predict import predict
from fivefold.profiling.closed_loop import build_measured_step
from fivefold.results.step_comparison import compare
from fivefold.step import Step
from fivefold.trainer.build import build
from fivefold.trainer.data.prepare import prepare
from fivefold.trainer.logs.run_log import NoLogs
from fivefold.trainer.loop import Loop
from fivefold.trainer.process import Process
from fivefold.trainer.run import Data, Run
from tests.agree.test_measured import MACHINE
from tests.processes import run_forked
from tests.selection import mark_share
from tests.trainer.data.conversations import conversations, preferences, write_lines, write_tokenizer

MODEL = Model(name="dense", layers=2, width=48, heads=4, kv_heads=2, head_dim=12, ffn=64, vocab=400)
SUPERVISED = [
    ("tp2 mbs4 ac=full", Adapter(rank=4, base="int8")),
    ("dp2 zero3 mbs2 ac=full", Adapter(rank=4, base="nf4")),
    ("cp2 mbs2", Adapter(rank=4, base="nf4")),
    ("dp2 pp2 zero2 mbs1 ac=selective", Adapter(rank=4)),
    ("tp2 mbs4", None),
    ("cp2 pp2 mbs2 cp=ulysses", Adapter(rank=3, targets=("q_proj", "down_proj"), base="nf4")),
    ("dp2 cp2 zero3/2 mbs1 ac=full", None),
]
PREFERENCES = [
    ("cp2 pp2 mbs4 ac=full", None),
    ("dp2 zero3 mbs2 ac=full", None),
    ("dp2 zero1 mbs2", None),
    ("tp2 mbs4", None),
    ("dp2 zero3 mbs2 ac=full", Adapter(rank=4, base="nf4")),
    ("dp2 tp2 zero2 mbs2 ac=selective", Adapter(rank=4)),
    ("dp2 mbs2", Adapter(rank=3, targets=("q_proj", "down_proj"))),
    ("dp2 pp2 zero3 mbs2", Adapter(rank=4)),
    ("tp2 mbs4", Adapter(rank=4, base="int8")),
    ("cp2 mbs4 cp=ulysses", Adapter(rank=4, base="nf4")),
]
TRAIN_ALONE: dict[Objective, str] = {"sft": "dp1 mbs2", "dpo": "dp1 mbs4"}


def run_of(folder: Path, objective: Objective, adapter: Adapter | None) -> Run:
    job = Job(
        objective=objective,
        dpo_beta=0.5,
        sequence=96,
        global_batch=8,
        steps=5,
        precision=get_recipe("fp32"),
        adapter=adapter,
        learning_rate=LearningRate(peak=1e-3, warmup_steps=1),
    )
    data = Data(
        corpus=str(folder / f"{objective}.jsonl"),
        tokenizer=str(folder / "tokenizer"),
        format="messages" if objective == "sft" else "preferences",
        heldout=0.2,
    )
    return Run(folder=folder / objective, job=job, data=data, evaluate_sequences=4, sample="")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("fine_tuning")
    write_tokenizer(place / "tokenizer")
    write_lines(place / "sft.jsonl", conversations(160))
    write_lines(place / "dpo.jsonl", preferences(80, chat=True))
    for objective in TRAIN_ALONE:
        run = run_of(place, objective, None)
        prepare(
            run.data.corpus,
            tokenizer=run.data.tokenizer,
            directory=run.folder / "data",
            holdout=run.data.heldout,
            samples=run.samples(),
        )
    return place


def train(run: Run, text: str) -> tuple[list[float], float | None, Step | None]:
    """The losses of all steps, the held-out loss, and the metered step."""
    layout, losses = Layout.parse(text), []

    class Losses(NoLogs):
        def write(self, line: dict[str, object]) -> None:
            if "loss" in line:
                losses.append(line["loss"])

    built = build(model=MODEL, layout=layout, job=run.job, device=torch.device("cpu"))
    shards = run.shards(MODEL)
    run = run.replace(folder=run.folder / text / str(run.job.adapter))
    run.folder.mkdir(parents=True, exist_ok=True)
    loop = Loop(run, model=MODEL, layout=layout, built=built, shards=shards, logs=Losses(), ideal_seconds=1.0)
    outcome = loop.train()
    process = Process(rank=built.ranks.rank, world=layout.world)
    step = build_measured_step(outcome, run=run, model=MODEL, machine=MACHINE, layout=layout, process=process)
    return losses, outcome.heldout_loss, step  # type: ignore[return-value]


@cache
def train_alone(run: Run) -> tuple[list[float], float | None]:
    ((losses, heldout, _),) = run_forked(1, train, run, TRAIN_ALONE[run.job.objective], seconds=120.0)
    return losses, heldout


@pytest.mark.parametrize(
    ("objective", "text", "adapter"),
    [
        *mark_share(7, [("sft", *case) for case in SUPERVISED]),
        *mark_share(10, [("dpo", *case) for case in PREFERENCES]),
    ],
)
def test_a_layout_changes_no_loss_and_counts_are_as_planned(
    folder: Path, objective: Objective, text: str, adapter: Adapter | None
) -> None:
    run, layout = run_of(folder, objective, adapter), Layout.parse(text)
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
    if objective == "sft":
        assert expected[-1] < expected[0]
    else:
        assert min(abs(loss - expected[0]) for loss in expected[1:]) > 1e-5

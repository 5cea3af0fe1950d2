"""A batch that grows: the same run under every layout, its own schedule for each size, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.errors import UserError
from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.layout.validity import refuse
from fivefold.model.experts import MoE
from fivefold.model.spec import Model
from fivefold.trainer.build import build
from fivefold.trainer.checkpoint.checkpoint import RunProgress, find_latest, load, save
from fivefold.trainer.engine import Engine
from fivefold.trainer.run import Run
from fivefold.update import LearningRate, Ramp
from tests import processes
from tests.selection import mark_share

Fork = Callable[..., list[Any]]
MODEL = Model(
    name="odd",
    layers=4,
    width=24,
    heads=4,
    kv_heads=2,
    head_dim=6,
    ffn=48,
    vocab=83,
    tied_embeddings=True,
    moe=MoE(experts=4, topk=2, ffn=20, shared_experts=1, dense_layers=1),
)
JOB = Job(
    sequence=16,
    global_batch=16,
    precision=get_recipe("fp32"),
    ramp=Ramp(first=8, step=4, every=2),
    steps=6,
    learning_rate=LearningRate(peak=1e-2),
)
SIZES = [8, 8, 12, 12, 16, 16]


def train(layout: Layout, folder: Path | None = None, last: int = 6) -> list[tuple[float, float]]:
    """Loss and norm of each step; from the checkpoint of ``folder`` on and into it, if there is one."""
    built = build(model=MODEL, layout=layout, job=JOB, device=torch.device("cpu"))
    step = taken = 0
    if folder and (path := find_latest(folder)):
        progress = load(path, built=built, model=MODEL, job=JOB)
        step, taken = progress.step, progress.samples
    engine, results = Engine(built, model=MODEL, layout=layout, job=JOB), []
    while step < last:
        size = JOB.batch(taken)
        rows = torch.stack(
            [torch.randint(0, 83, (17,), generator=torch.Generator().manual_seed(taken + row)) for row in range(size)]
        )
        done = engine.step(rows.view(-1, layout.dp, layout.mbs, 17)[:, built.ranks["dp"].rank])
        engine.zero_grad()
        results.append((done.loss, done.norm))
        step, taken = step + 1, taken + size
    if folder:
        progress = RunProgress(step=step, samples=taken, tokens=16 * taken)
        save(folder, built=built, progress=progress, model=MODEL, layout=layout, job=JOB)
    return results


@cache
def train_in_one_process() -> list[tuple[float, float]]:
    (result,) = processes.run_forked(1, train, Layout.parse("mbs4"))
    return result


LAYOUTS = ["dp2 zero3 mbs2", "dp2 tp2 ep2 zero1 mbs1", "dp2 pp2 zero2 mbs1", "pp2 dualpipe mbs2", "pp2 v2 zbv mbs1"]


@pytest.mark.parametrize("text", mark_share(5, LAYOUTS))
def test_a_batch_ramp_is_equal_under_every_layout(forked: Fork, text: str) -> None:
    """With too many or too few gradients awaited a weight would be reduced too early or never."""
    layout, alone = Layout.parse(text), train_in_one_process()[:5]  # of every size
    assert forked(layout.world, train, layout, None, 5)[0] == [pytest.approx(item, rel=2e-4) for item in alone]


@pytest.mark.long  # as tests/agree/loop: test_a_resumed_run_continues…
def test_a_run_resumes_within_its_batch_ramp_under_another_layout(forked: Fork, tmp_path: Path) -> None:
    first = forked(1, train, Layout.parse("mbs4"), tmp_path, 3)[0]
    second = forked(2, train, Layout.parse("dp2 zero3 mbs2"), tmp_path, 6)[0]
    assert [*first, *second] == [pytest.approx(item, rel=2e-4) for item in train_in_one_process()]


@pytest.mark.parametrize(
    ("ramp", "text", "line"),
    [
        (Ramp(first=8, step=4, every=1), "dp8 mbs1", "ramp: batch 12 is not divisible by dp·mbs=8·1=8; let first"),
        (Ramp(first=8, step=3, every=1), "dp1", "ramp: from first=8 by step=3 no batch becomes the global batch 16"),
        (Ramp(first=16, step=4, samples=9), "dp1", "ramp: from first=16 by step=4 no batch becomes the global"),
        (Ramp(first=2, step=2, every=1), "pp2 dualpipe mbs1", "ramp: batch 2: dualpipe needs 4 micro-batches or more"),
    ],
)
def test_a_ramp_to_a_batch_that_a_layout_cannot_divide_is_an_error(ramp: Ramp, text: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        refuse(Layout.parse(text), model=MODEL, job=JOB.replace(ramp=ramp))


def test_a_custom_schedule_has_a_fixed_batch(tmp_path: Path) -> None:
    run = Run(job=JOB, schedule=tmp_path / "mine.csv")
    with pytest.raises(
        UserError, match=r"mine.csv has a fixed number of micro-batches, but a ramp changes it; drop either"
    ):
        run.table(Layout.parse("pp2 mbs1"))

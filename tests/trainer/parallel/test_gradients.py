"""Gradients reduced after every backward: the same updates as once a step, no full gradients between micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.experts import MoE
from fivefold.model.spec import Model
from fivefold.trainer.build import build
from fivefold.trainer.checkpoint.checkpoint import RunProgress, load, save
from fivefold.trainer.engine import Engine
from fivefold.trainer.measure.meter import Meter
from fivefold.update import Optimizer
from tests.selection import mark_share

DENSE = Model(name="dense", layers=2, width=64, heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=96)
TIED = DENSE.replace(name="tied", layers=4, tied_embeddings=True)
ROUTED = DENSE.replace(name="routed", moe=MoE(experts=4, topk=2, ffn=32, shared_experts=1, shared_ffn=32))
STEPS = 2


def engine_of(model: Model, layout: Layout, job: Job) -> Engine:
    return Engine(
        build(model=model, layout=layout, job=job, device=torch.device("cpu")), model=model, layout=layout, job=job
    )


def tokens(engine: Engine, step: int) -> torch.Tensor:
    layout, job = engine.layout, engine.job
    drawn = torch.randint(0, 96, (job.global_batch, 33), generator=torch.Generator().manual_seed(step))
    return drawn.view(layout.micro_batches(job), layout.dp, layout.mbs, 33)[:, engine.built.ranks["dp"].rank]


def train(model: Model, layout: Layout, jobs: list[Job]) -> list[tuple[list[float], int, int]]:
    """For each job: losses and norms, most full sums between two forwards, and reduce_scatters of the last step."""
    return [train_one(engine_of(model, layout, job)) for job in jobs]


def train_one(engine: Engine) -> tuple[list[float], int, int]:
    said, whole = list[float](), list[int]()
    units = engine.built.units

    def note(action: Any) -> None:
        if action.kind == "F":
            whole.append(sum(unit.gradients._sums is not None for unit in units))

    engine.pipeline.on_action = note
    for step in range(STEPS):
        meter = Meter([], axis=engine.built.ranks.axis)
        with meter:
            done = engine.step(tokens(engine, step))
        engine.zero_grad()
        said += [done.loss, done.norm]
    scatters = sum(line.calls for line in meter.traffic if (line.axis, line.collective) == ("dp", "reduce_scatter"))
    return said, max(whole), scatters


@pytest.mark.parametrize(
    ("model", "text", "precision", "optimizer"),
    mark_share(
        7,
        [
            (DENSE, "dp2 zero2 mbs1", "fp32", Optimizer(clip=0.1)),
            (TIED, "dp2 zero3 mbs1", "fp32", Optimizer(kind="adamw8bit")),
            (DENSE, "dp2 zero3 mbs1", "fp32", Optimizer(kind="muon")),
            (DENSE, "dp2 zero3 mbs1", "fp8-wire", Optimizer()),
            (ROUTED, "dp2 zero3 mbs1", "bf16", Optimizer()),
            (DENSE, "dp2 pp2 zb1p zero3 mbs1", "bf16", Optimizer(clip=0.1)),
            (TIED, "dp2 pp2 zbv zero2 mbs1", "fp32", Optimizer()),
        ],
    ),
    ids=lambda value: getattr(value, "kind", getattr(value, "name", value)),
)
def test_reducing_gradients_per_micro_batch_equals_reducing_once_per_step(
    forked: Callable[..., list[Any]], model: Model, text: str, precision: str, optimizer: Optimizer
) -> None:
    layout = Layout.parse(text)
    jobs = [
        Job(
            sequence=32,
            global_batch=4 * layout.dp,
            precision=get_recipe(precision),
            optimizer=optimizer,
            reduce=reduce,
            emulate=precision.startswith("fp8"),
        )
        for reduce in ("step", "micro_batch", "micro_batch")
    ]
    for (once, whole, few), (often, none, many), again in forked(layout.world, train, model, layout, jobs):
        assert often == pytest.approx(once, rel=1e-5 if precision == "fp32" else 2e-3)
        assert (often, none, many) == again  # to the bit
        assert few < many
        # but of a tied table whose ends are two stages of this rank, between whose gradients other passes lie
        assert none <= int(model.tied_embeddings and "zbv" in text) < whole


def resume_under_other_job(folder: Path, model: Model, layout: Layout, jobs: list[Job]) -> list[float]:
    """The loss of a third step, and that after a checkpoint was taken up under another job."""
    before, after = (engine_of(model, layout, job) for job in jobs)
    for step in range(2):
        before.step(tokens(before, step))
        before.zero_grad()
    progress = RunProgress(step=2, samples=0, tokens=0, facts={})
    path = save(folder, built=before.built, progress=progress, model=model, layout=layout, job=jobs[0])
    load(path, built=after.built, model=model, job=jobs[1])
    return [engine.step(tokens(engine, 2)).loss for engine in (before, after)]


@pytest.mark.long  # test_checkpoint.py goes from layout to layout
@pytest.mark.parametrize("first", mark_share(2, ["step", "micro_batch"]))
def test_a_checkpoint_resumes_with_the_other_reduction_frequency(
    forked: Callable[..., list[Any]], tmp_path: Path, first: str
) -> None:
    layout = Layout.parse("dp2 zero3 mbs1")
    job = Job(sequence=32, global_batch=8, precision=get_recipe("fp32"))
    jobs = [job.replace(reduce=reduce) for reduce in sorted(("step", "micro_batch"), key=lambda item: item != first)]
    for there, here in forked(2, resume_under_other_job, tmp_path / "saved", DENSE, layout, jobs):
        assert here == pytest.approx(there, rel=1e-6)

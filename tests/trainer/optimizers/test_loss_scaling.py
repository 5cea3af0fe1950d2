"""fp16: the scale grows and shrinks, an overflow on any rank skips the step on all, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.job import Job, LearningRate, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.experts import MoE
from fivefold.model.spec import Model
from fivefold.trainer.build import Built, build
from fivefold.trainer.checkpoint.checkpoint import RunProgress, find_latest, load, save
from fivefold.trainer.engine import Engine, StepResult
from fivefold.trainer.optimizers.loss_scaling import GROWTH_INTERVAL, INITIAL_SCALE, MIN_SCALE, LossScaler
from tests import processes
from tests.selection import mark_share

Fork = Callable[..., list[Any]]
DENSE = Model(name="odd", layers=2, width=24, heads=4, kv_heads=2, head_dim=6, ffn=44, vocab=83)
SPARSE = DENSE.replace(
    name="sparse", moe=MoE(experts=4, topk=2, ffn=20, dense_layers=1, score="sigmoid", balance="free")
)
JOB = Job(
    sequence=16,
    global_batch=8,
    precision=get_recipe("fp16"),
    steps=9,
    learning_rate=LearningRate(kind="constant", peak=1e-2),
)


def test_the_loss_scale_halves_on_overflow_and_doubles_after_good_steps() -> None:
    scaler = LossScaler()
    scaler.update(finite=False)
    assert (scaler.scale, scaler.skipped) == (INITIAL_SCALE / 2, 1)
    for _ in range(GROWTH_INTERVAL - 1):
        scaler.update(finite=True)
    assert scaler.scale == INITIAL_SCALE / 2
    scaler.update(finite=False)  # the count starts again
    for _ in range(GROWTH_INTERVAL):
        scaler.update(finite=True)
    assert (scaler.scale, scaler.finite, scaler.skipped) == (INITIAL_SCALE / 2, 0, 2)
    for _ in range(40):
        scaler.update(finite=False)
    assert scaler.scale == MIN_SCALE


def start_engine(model: Model, layout: Layout, job: Job = JOB) -> tuple[Built, Engine]:
    built = build(model=model, layout=layout, job=job, device=torch.device("cpu"))
    return built, Engine(built, model=model, layout=layout, job=job)


def step(engine: Engine, number: int) -> StepResult:
    built, layout, job = engine.built, engine.layout, engine.job
    tokens = torch.randint(0, DENSE.vocab, (8, 17), generator=torch.Generator().manual_seed(number))
    mine = tokens.view(layout.micro_batches(job), layout.dp, layout.mbs, 17)[:, built.ranks["dp"].rank]
    done = engine.step(mine)
    engine.zero_grad()
    return done


def bits(built: Built) -> list[Tensor]:
    kept = [shard.weight for shard in built.shards] + built.moments() + [moe.bias for moe in built.moe_layers.values()]
    return [tensor.detach().clone() for tensor in kept]


def run_steps(model: Model, text: str, precision: str) -> list[StepResult]:
    _, engine = start_engine(model, Layout.parse(text), JOB.replace(precision=get_recipe(precision)))
    return [step(engine, number) for number in range(3)]


@cache
def run_in_one_process(model: Model, precision: str) -> list[StepResult]:
    (result,) = processes.run_forked(1, run_steps, model, "mbs8", precision)
    return result


CASES = [
    (DENSE, "dp2 tp2 zero3 mbs2"),
    (DENSE, "pp2 zb1p mbs1"),
    (SPARSE, "dp2 ep2 zero2 mbs1"),
    (SPARSE, "tp2 cp2 mbs2"),
]


@pytest.mark.parametrize(
    ("model", "text", "precision"),
    mark_share(12, [(*case, precision) for case in CASES for precision in ("fp16", "bf16-pure")]),
    ids=lambda value: getattr(value, "name", value),
)
def test_fp16_training_is_equal_under_every_layout_and_close_to_fp32(
    forked: Fork, model: Model, text: str, precision: str
) -> None:
    """Errors are those of the format: 2^-11 and 2^-8 of a number."""
    error = {"fp16": 2**-11, "bf16-pure": 2**-8}[precision]
    alone, plain = run_in_one_process(model, precision), run_in_one_process(model, "fp32")
    for ours in forked(Layout.parse(text).world, run_steps, model, text, precision):
        for done, one, wide in zip(ours, alone, plain, strict=True):
            assert not done.skipped
            assert done.loss_scale == (INITIAL_SCALE if precision == "fp16" else 1)
            assert done.loss == pytest.approx(one.loss, rel=error)
            assert done.norm == pytest.approx(one.norm, rel=6 * error)
            assert done.loss == pytest.approx(wide.loss, rel=2 * error)
            assert done.norm == pytest.approx(wide.norm, rel=12 * error)


def overflow(model: Model, text: str, *, everywhere: bool) -> list[bool]:
    """One good step, one that overflows by its scale or by one gradient on the last rank alone, one good step."""
    built, engine = start_engine(model, Layout.parse(text))
    assert built.scaler is not None
    first = step(engine, 0)
    before, backward = bits(built), engine.backward
    if everywhere:
        built.scaler.scale = 2.0**60
    else:

        def backward_broken(tokens: Tensor) -> Tensor:
            total = backward(tokens)
            last = next(shard for shard in reversed(built.shards) if shard.rows)
            if built.ranks.rank == built.ranks.world - 1:
                last.weight.grad.view(-1)[-1] = torch.inf
            return total

        engine.backward = backward_broken
    scale = built.scaler.scale
    second = step(engine, 1)
    still = all(map(torch.equal, before, bits(built)))
    halved = built.scaler.scale == scale / 2
    engine.backward = backward
    built.scaler.scale = INITIAL_SCALE
    third = step(engine, 2)
    moved = not all(map(torch.equal, before, bits(built)))
    return [
        not first.skipped,
        second.skipped,
        second.loss_scale == scale,
        still,
        halved,
        built.scaler.skipped == 1,
        not third.skipped,
        moved,
    ]


@pytest.mark.parametrize(
    ("model", "text", "everywhere"),
    mark_share(9, [(*case, everywhere) for case in CASES for everywhere in (True, False)]),
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_an_overflow_skips_the_step_on_all_ranks(forked: Fork, model: Model, text: str, everywhere: bool) -> None:
    def run_overflow() -> list[bool]:
        return overflow(model, text, everywhere=everywhere)

    for result in forked(Layout.parse(text).world, run_overflow):
        assert result == [True] * 8


def test_the_scale_does_not_change_the_step(forked: Fork) -> None:
    def step_scaled(scale: float, largest: float) -> tuple[float, float, list[Tensor]]:
        job = JOB.replace(optimizer=JOB.optimizer.replace(kind="sgd", clip=largest))  # AdamW would not see a factor
        built, engine = start_engine(DENSE, Layout.parse("mbs8"), job)
        assert built.scaler is not None
        built.scaler.scale = scale
        done = step(engine, 0)
        return done.loss, done.norm, [shard.weight.detach().clone() for shard in built.shards]

    for largest in (0.0, 0.5):
        ((loss, norm, weights),), ((other_loss, other_norm, others),) = (
            forked(1, step_scaled, scale, largest) for scale in (2.0**9, 2.0**14)
        )
        assert loss == pytest.approx(other_loss, rel=1e-6)
        assert norm == pytest.approx(other_norm, rel=1e-4)
        moved = torch.cat([(a - b).abs().flatten() for a, b in zip(weights, others, strict=True)])
        start = torch.cat([weight.flatten() for weight in forked(1, step_scaled, 2.0**9, 1e-9)[0][2]])
        change = (torch.cat([weight.flatten() for weight in weights]) - start).abs().max()
        assert moved.max() < 0.02 * change  # gradients below 2^-24 differ


def resume_across_layouts(folder: Path) -> tuple[Tensor, Tensor, float]:
    """The scaler of a run goes on under another layout; a run that had none gives none."""
    layout = Layout.parse("dp2 zero1 mbs2")
    built, engine = start_engine(DENSE, layout)
    assert built.scaler is not None
    built.scaler.scale = 2.0**60
    for number in range(3):
        step(engine, number)
    done = RunProgress(step=3, samples=0, tokens=0)
    save(folder / "a", built=built, progress=done, model=DENSE, layout=layout, job=JOB)
    other, _ = start_engine(DENSE, Layout.parse("tp2 mbs2"))
    result = find_latest(folder / "a")
    assert result is not None
    assert other.scaler is not None
    load(result, built=other, model=DENSE, job=JOB)
    wide = JOB.replace(precision=get_recipe("fp32"))
    plain, _ = start_engine(DENSE, layout, wide)
    save(folder / "b", built=plain, progress=done, model=DENSE, layout=layout, job=wide)
    result = find_latest(folder / "b")
    assert result is not None
    fresh, _ = start_engine(DENSE, layout)
    assert fresh.scaler is not None
    load(result, built=fresh, model=DENSE, job=JOB)
    return built.scaler.state(), other.scaler.state(), fresh.scaler.scale


def test_the_scaler_is_in_checkpoints(forked: Fork, tmp_path: Path) -> None:
    for left, result, fresh in forked(2, resume_across_layouts, tmp_path):
        assert left.tolist() == result.tolist() == [2.0**57, 0, 3]
        assert fresh == INITIAL_SCALE

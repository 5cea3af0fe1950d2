"""The learning rate as a function, and the global gradient norm over shards."""

from __future__ import annotations

import pytest
import torch

from fivefold.job import Job, LearningRate, Optimizer
from fivefold.layout.spec import Layout
from fivefold.model.catalog import named
from fivefold.record import Mistake
from fivefold.train.build import build
from fivefold.train.optimizer import clip, learning_rate, sum_over_ranks
from fivefold.train.supported import check_supported


def rates(schedule: LearningRate, steps: int) -> list[float]:
    return [learning_rate(schedule, step=step, steps=steps) for step in range(steps)]


def test_warm_up_is_linear_and_reaches_the_peak() -> None:
    found = rates(LearningRate(kind="constant", peak=1.0, warmup_steps=4), 8)
    assert found == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1])


def test_cosine_goes_from_peak_to_floor_by_way_of_the_middle() -> None:
    found = rates(LearningRate(kind="cosine", peak=2.0, floor=0.1, warmup_steps=0), 101)
    assert (found[0], found[50], found[100]) == pytest.approx((2.0, 1.1, 0.2))
    assert found == sorted(found, reverse=True)


def test_wsd_is_flat_then_falls_in_a_line() -> None:
    found = rates(LearningRate(kind="wsd", peak=1.0, floor=0.0, warmup_steps=10, decay_steps=21), 100)
    assert found[10:80] == pytest.approx([1.0] * 70)
    assert found[99] == pytest.approx(0.0)
    assert found[89] == pytest.approx(0.5)


def norm_and_clipped(layout: str) -> tuple[float, float, float]:
    job = Job(sequence=8, global_batch=4, optimizer=Optimizer(clip=0.5))
    built = build(model=named("nano"), layout=Layout.parse(layout), job=job, device=torch.device("cpu"))
    for shard in built.shards:
        shard.weight.grad = torch.full_like(shard.weight, 1e-3)
    norm, (total,) = sum_over_ranks(built.shards, 2.0, ranks=built.ranks)
    clip(built.shards, norm, largest=0.05)
    after, _ = sum_over_ranks(built.shards, ranks=built.ranks)
    return norm.item(), total.item(), after.item()


@pytest.mark.parametrize("layout", ["dp1 mbs1", "dp2 zero0 mbs1", "dp2 zero3 mbs1", "dp4 zero1/2 mbs1"])
def test_the_norm_is_that_of_the_whole_gradient(forked, layout: str) -> None:
    world = Layout.parse(layout).world
    expected = 1e-3 * named("nano").parameters ** 0.5
    for norm, total, after in forked(world, norm_and_clipped, layout):
        assert norm == pytest.approx(expected, rel=1e-5)
        assert total == 2.0 * world
        assert after == pytest.approx(0.05, rel=1e-4)


def test_what_is_not_built_is_refused() -> None:
    job = Job(optimizer=Optimizer(kind="adamw8bit"))
    with pytest.raises(Mistake, match=r"has optimizer.kind=adamw, muon, .* not adamw8bit"):
        check_supported(Layout(), job, model=named("nano"))

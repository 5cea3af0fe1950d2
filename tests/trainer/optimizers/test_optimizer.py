"""The learning rate as a function, and the global gradient norm over shards."""

from __future__ import annotations

import pytest
import torch

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.catalog import build_model
from fivefold.model.experts import MoE
from fivefold.model.spec import Model
from fivefold.model.weights import Weight, list_weights
from fivefold.trainer.build import build
from fivefold.trainer.optimizers.optimizer import clip, compute_learning_rate, sum_over_ranks
from fivefold.update import LearningRate, Optimizer
from tests.selection import mark_share


def rates(schedule: LearningRate, steps: int) -> list[float]:
    return [compute_learning_rate(schedule, step=step, steps=steps) for step in range(steps)]


def test_learning_rate_warm_up_is_linear_to_the_peak() -> None:
    result = rates(LearningRate(kind="constant", peak=1.0, warmup_steps=4), 8)
    assert result == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1])


def test_the_cosine_schedule_goes_from_peak_to_floor() -> None:
    result = rates(LearningRate(kind="cosine", peak=2.0, floor=0.1, warmup_steps=0), 101)
    assert (result[0], result[50], result[100]) == pytest.approx((2.0, 1.1, 0.2))
    assert result == sorted(result, reverse=True)


def test_the_wsd_schedule_is_constant_then_decays_linearly() -> None:
    result = rates(LearningRate(kind="wsd", peak=1.0, floor=0.0, warmup_steps=10, decay_steps=21), 100)
    assert result[10:80] == pytest.approx([1.0] * 70)
    assert result[99] == pytest.approx(0.0)
    assert result[89] == pytest.approx(0.5)


def norm_and_clipped(layout: str) -> tuple[float, float, float]:
    job = Job(sequence=8, global_batch=4, optimizer=Optimizer(clip=0.5))
    built = build(model=build_model("nano"), layout=Layout.parse(layout), job=job, device=torch.device("cpu"))
    for shard in built.shards:
        shard.weight.grad = torch.full_like(shard.weight, 1e-3)
    norm, (total,) = sum_over_ranks(built.shards, 2.0, ranks=built.ranks)
    clip(built.shards, norm, largest=0.05)
    after, _ = sum_over_ranks(built.shards, ranks=built.ranks)
    return norm.item(), total.item(), after.item()


@pytest.mark.parametrize("layout", ["dp1 mbs1", "dp2 zero0 mbs1", "dp2 zero3 mbs1", "dp4 zero1/2 mbs1"])
def test_the_gradient_norm_is_that_of_the_full_gradient(forked, layout: str) -> None:
    world = Layout.parse(layout).world
    expected = 1e-3 * build_model("nano").parameters ** 0.5
    for norm, total, after in forked(world, norm_and_clipped, layout):
        assert norm == pytest.approx(expected, rel=1e-5)
        assert total == 2.0 * world
        assert after == pytest.approx(0.05, rel=1e-4)


def measure_clipping(sharded_weights: list[tuple[float, float]]) -> list[float]:
    """How much ``largest`` and ``scale`` leave of a gradient whose norm, but for the scale of the loss, is 2."""
    job = Job(sequence=8, global_batch=4)
    built = build(model=build_model("nano"), layout=Layout(), job=job, device=torch.device("cpu"))
    results = []
    for largest, scale in sharded_weights:
        for shard in built.shards:
            shard.weight.grad = torch.full_like(shard.weight, 0.75)
        clip(built.shards, torch.tensor(2.0), largest=largest, scale=scale)
        (left,) = {value for shard in built.shards for value in shard.weight.grad.unique().tolist()}
        results.append(left / 0.75)
    return results


def test_gradient_within_the_norm_is_not_scaled_up(forked) -> None:
    """As of torch.nn.utils.clip_grad_norm_: the factor is at most 1."""
    sharded_weights = [(0.5, 1.0), (1.9, 1.0), (2.1, 1.0), (50.0, 1.0), (0.0, 1.0), (50.0, 4.0), (0.5, 4.0)]
    assert forked(1, measure_clipping, sharded_weights)[0] == pytest.approx(
        [0.25, 0.95, 1.0, 1.0, 1.0, 0.25, 0.0625], rel=1e-6
    )


MODEL = Model(
    name="odd",
    layers=4,
    width=24,
    heads=4,
    kv_heads=2,
    head_dim=6,
    ffn=44,
    vocab=83,
    tied_embeddings=True,
    qkv_bias=True,
    moe=MoE(experts=4, topk=2, ffn=20, shared_experts=1, dense_layers=1, expert_bias=True),
)
PLAIN = MODEL.replace(moe=MODEL.moe.replace(expert_bias=False) if MODEL.moe else None)


def gradient(weight: Weight) -> torch.Tensor:
    drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(weight.name)))
    return drawn * (1 + weight.name.count("e"))


def norm_and_cut(model: Model, layout: str) -> tuple[float, float]:
    """Of gradients given in full, and how much of the first one clipping has left."""
    job = Job(sequence=16, global_batch=8)
    built = build(model=model, layout=Layout.parse(layout), job=job, device=torch.device("cpu"))
    for shard in built.shards:
        shard.weight.grad = shard.select_rows(gradient(shard.local_weight.weight)).to(shard.weight.dtype)
    shard = next(shard for shard in built.shards if shard.rows)
    before = shard.weight.grad.norm()
    norm, _ = sum_over_ranks(built.shards, ranks=built.ranks)
    clip(built.shards, norm, largest=0.5)
    return norm.item(), (shard.weight.grad.norm() / before).item()


MIXED = [
    "cp2 zero0 mbs8", "cp2 tp2 zero3 mbs8", "dp2 ep2 zero0 mbs4", "dp2 tp2 ep2 etp2 zero1 mbs4", "cp2 cp=ulysses mbs8",
    "dp4 ep2 zero1/2 mbs2", "tp4 zero0 mbs8", "tp4 ep2 etp2 mbs8", "pp2 zero0 mbs4", "pp2 dualpipe mbs2",
    "pp2 v2 zbv mbs4", "dp2 pp2 ep2 zero2 mbs2", "dp2 cp2 tp2 ep4 zero3 mbs4",
]  # fmt: skip


@pytest.mark.parametrize("layout", mark_share(8, MIXED))
def test_each_element_counts_once_in_the_gradient_norm_under_every_layout(forked, layout: str) -> None:
    """Whatever several ranks hold: replicas, copies of key heads, norms over tp, a tied table, DualPipe's replicas."""
    parsed = Layout.parse(layout)
    model = MODEL if parsed.etp == 1 else PLAIN
    expected = float(torch.cat([gradient(weight).flatten() for weight in list_weights(model)]).norm())
    for norm, left in forked(parsed.world, norm_and_cut, model, layout):
        assert norm == pytest.approx(expected, rel=2e-6)
        assert left == pytest.approx(0.5 / expected, rel=1e-5)

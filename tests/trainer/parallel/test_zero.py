"""Prefetched gathers and overlapped reductions change when messages are sent, but not the messages nor any bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.experts import MoE
from fivefold.model.spec import Model
from fivefold.step import Traffic
from fivefold.trainer.build import build
from fivefold.trainer.engine import Engine
from fivefold.trainer.measure.meter import Meter
from fivefold.trainer.parallel.gradients import Gradients
from tests.selection import mark_share

DENSE = Model(name="dense", layers=3, width=24, heads=4, kv_heads=2, head_dim=6, ffn=48, vocab=83, tied_embeddings=True)
ROUTED = DENSE.replace(name="routed", tied_embeddings=False, moe=MoE(experts=4, topk=2, ffn=20))
Ran = tuple[list[float], tuple[Traffic, ...], list[str], list[str]]


def ran(model: Model, layout: Layout, ahead: bool, precision: str, reduce: str) -> Ran:
    """Losses, what was said in the second step, the units whose weights were underway when another was ready, and those
    whose gradients were when another's were summed up.
    """
    job = Job(sequence=16, global_batch=8, precision=get_recipe(precision), reduce=reduce)
    built = build(model=model, layout=layout, job=job, device=torch.device("cpu"), streams=ahead)
    engine, losses, in_flight_reduction = Engine(built, model=model, layout=layout, job=job), [], []
    begin, reducing = Gradients._reduce, list[str]()

    def note_gradients(gradients: Gradients) -> None:
        every = [unit.gradients for unit in built.units]
        running = [item for item in every if item._reducing is not None and item._reducing._works]
        assert sum(not item.keeps_full_gradients for item in running) <= 1
        reducing.extend(item.shards[0].name for item in running)
        begin(gradients)

    Gradients._reduce = note_gradients  # type: ignore[method-assign]

    def note(*_: object) -> None:
        in_flight_reduction.extend(unit.shards[0].name for unit in built.units if unit._gathering is not None)

    for block in built.module.blocks:
        block.register_forward_pre_hook(note)
    meter = Meter([], axis=built.ranks.axis)
    for step in range(2):
        tokens = torch.randint(0, 83, (8, 17), generator=torch.Generator().manual_seed(step))
        mine = tokens.view(layout.micro_batches(job), layout.dp, layout.mbs, 17)[:, built.ranks["dp"].rank]
        if step == 1:
            with meter:
                losses.append(engine.step(mine).loss)
        else:
            losses.append(engine.step(mine).loss)
        engine.zero_grad()
    return losses, meter.traffic, in_flight_reduction, reducing


@pytest.mark.parametrize(
    ("model", "text", "precision", "reduce"),
    mark_share(
        8,
        [
            (DENSE, "dp2 zero3 mbs2", "fp32", "micro_batch"),
            (DENSE, "dp2 zero3 mbs1 ac=full", "bf16", "step"),
            (DENSE, "dp4 zero3/2 mbs1", "fp32", "micro_batch"),
            (DENSE, "dp2 zero0 mbs4", "fp32", "micro_batch"),
            (DENSE, "dp2 zero1 mbs4", "bf16", "micro_batch"),
            (DENSE, "dp2 pp2 zero2 zb1p mbs1", "fp32", "micro_batch"),
            (DENSE, "dp2 pp2 zero2 zb1p mbs1", "fp32", "step"),
            (ROUTED, "dp2 ep2 zero3 mbs2", "fp32", "micro_batch"),
        ],
    ),
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_gathering_weights_ahead_changes_no_result(
    forked: Callable[..., list[Any]], model: Model, text: str, precision: str, reduce: str
) -> None:
    layout = Layout.parse(text)
    plain: list[Ran] = forked(layout.world, ran, model, layout, False, precision, reduce)
    early: list[Ran] = forked(layout.world, ran, model, layout, True, precision, reduce)
    for (losses, said, none, alone), (also, likewise, in_flight_reduction, reducing) in zip(plain, early, strict=True):
        assert losses == also
        assert said == likewise
        assert not none
        assert not alone
        assert reducing  # during the backward of the unit before
        assert (
            layout.zero < 3 or in_flight_reduction
        )  # where weights are freed, they are prefetched while another unit computes


def train_and_count(layout: Layout, reshard: str) -> tuple[list[float], int, int, int]:
    """Losses, all_gathers of a step, and blocks whose weights are gathered after an evaluation and after a step."""
    job = Job(sequence=16, global_batch=8, precision=get_recipe("fp32"), reshard=reshard)
    built = build(model=DENSE, layout=layout, job=job, device=torch.device("cpu"))
    engine, losses, left = Engine(built, model=DENSE, layout=layout, job=job), [], []
    drawn = torch.randint(0, 83, (8, 17), generator=torch.Generator().manual_seed(1))
    mine = drawn.view(layout.micro_batches(job), layout.dp, layout.mbs, 17)[:, built.ranks["dp"].rank]
    for _ in range(2):
        meter = Meter([], axis=built.ranks.axis)
        with meter:
            losses.append(engine.step(mine).loss)
        blocks = [unit for unit in built.units if unit.shards[0].name.startswith("blocks")]
        left.append(sum(unit.gathered.untyped_storage().size() > 0 for unit in blocks))
        engine.zero_grad()
        engine.evaluate(mine)
        left.append(sum(unit.gathered.untyped_storage().size() > 0 for unit in blocks))
    said = {(line.axis, line.collective): line.calls for line in meter.traffic}
    return losses, said["dp", "all_gather"], left[-1], left[-2]


@pytest.mark.parametrize("text", mark_share(3, ["dp2 zero3 mbs1", "dp2 pp2 zero3 mbs1", "dp2 pp2 zb1p zero3 mbs1"]))
def test_weights_that_stay_from_forward_to_backward_are_gathered_once(
    forked: Callable[..., list[Any]], text: str
) -> None:
    """With every micro-batch, whatever the schedule; to the bit the same, and nothing stays after an evaluation."""
    layout = Layout.parse(text)
    twice, once = (forked(layout.world, train_and_count, layout, reshard) for reshard in ("forward", "backward"))
    for (losses, many, *none), (also, few, *left) in zip(twice, once, strict=True):
        assert losses == also
        assert none == left == [0, 0]
        assert many - few == (4 * DENSE.layers if layout.pp == 1 else many - few) > 0

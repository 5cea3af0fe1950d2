"""Gathers and dispatches in fp8: the matmul's own cast makes nothing else of what has come, and half is sent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fivefold.errors import UserError
from fivefold.job import Job, Recipe, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.experts import MoE
from fivefold.model.spec import Model
from fivefold.trainer.build import build
from fivefold.trainer.checkpoint.checkpoint import RunProgress, find_latest, load, save
from fivefold.trainer.engine import Engine
from fivefold.trainer.measure.meter import Meter
from fivefold.trainer.model.float8.cast import cast_per_block, cast_per_tensor, cast_per_tile, scale_, widen
from fivefold.trainer.parallel import fp8_gather
from fivefold.trainer.parallel.expert import AllToAllDispatcher
from fivefold.update import Optimizer
from tests.selection import mark_share

# Blocks of 128 that are split by shards, and rows and columns that are not multiples of 128.
DENSE = Model(name="dense", layers=2, width=160, heads=4, kv_heads=2, head_dim=24, ffn=200, vocab=83)
THIN = DENSE.replace(name="thin", kv_heads=1, head_dim=6)  # fewer rows of keys than would be some for each of four
ROUTED = DENSE.replace(name="routed", moe=MoE(experts=4, topk=2, ffn=144))
WIRE, TILES = get_recipe("fp8-wire"), get_recipe("fp8-tiles-wire")
TOKENS = 24


class Ran(NamedTuple):
    """Losses of two steps, the first one's gradients of this rank's shards, their last weights, and what was sent."""

    losses: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    sent: dict[tuple[str, str], int]


def ran(model: Model, layout: Layout, precision: Recipe, batch: int = 0, rows: str = "as the recipe says") -> Ran:
    """``batch``: sequences of a step; 0: two micro-batches. Gradients are not clipped, so that each is for itself."""
    batch, plain = batch or 2 * layout.dp * layout.mbs, Optimizer(clip=0.0)
    job = Job(sequence=TOKENS, global_batch=batch, precision=precision, emulate=True, optimizer=plain)
    built = build(model=model, layout=layout, job=job, device=torch.device("cpu"))
    for moe in built.moe_layers.values():
        if rows == "wide" and isinstance(moe.dispatcher, AllToAllDispatcher):
            moe.dispatcher.fp8_cast = None
    engine, losses, gradients = Engine(built, model=model, layout=layout, job=job), [], {}
    meter = Meter([], axis=built.ranks.axis)
    for step in range(2):
        tokens = torch.randint(0, model.vocab, (batch, TOKENS + 1), generator=torch.Generator().manual_seed(step))
        mine = tokens.view(layout.micro_batches(job), layout.dp, layout.mbs, -1)[:, built.ranks["dp"].rank]
        if step == 1:
            with meter:
                losses.append(engine.step(mine).loss)
        else:
            losses.append(engine.step(mine).loss)
        if step == 0:
            gradients = {
                shard.name: shard.weight.grad.clone() for shard in built.shards if shard.weight.grad is not None
            }
        engine.zero_grad()
    weights = {shard.name: shard.weight.detach().clone() for shard in built.shards}
    return Ran(losses, gradients, weights, {(said.axis, said.collective): said.bytes for said in meter.traffic})


def are_equal(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


@pytest.mark.parametrize(
    ("model", "text", "precision"),
    mark_share(
        8,
        [
            (DENSE, "dp2 zero1 mbs2", WIRE),
            (DENSE, "dp3 zero3 mbs2", WIRE),  # shards of uneven rows
            (DENSE, "dp4 zero3/2 mbs2", TILES),
            (THIN, "dp4 zero3 mbs1", TILES),
            (DENSE, "dp2 tp2 zero2 mbs2", TILES),
            (DENSE, "dp2 pp2 zero3 zb1p mbs1", WIRE),
            (ROUTED, "dp4 ep2 zero3 mbs2", WIRE),
            (ROUTED, "dp4 ep2 zero1 mbs2", TILES),
        ],
    ),
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_fp8_gather_gives_the_same_product(
    forked: Callable[..., list[Any]], model: Model, text: str, precision: Recipe
) -> None:
    """Bit for bit; the bytes of the gathers are those of the matrices once, and of all else twice."""
    layout, narrow = Layout.parse(text), precision.replace(dispatches="rows")
    there: list[Ran] = forked(layout.world, ran, model, layout, narrow.replace(gathers="weights"))
    here: list[Ran] = forked(layout.world, ran, model, layout, narrow)
    for wide, thin in zip(there, here, strict=True):
        assert thin.losses == wide.losses
        assert are_equal(thin.gradients, wide.gradients)
        assert are_equal(thin.weights, wide.weights)
        less = thin.sent["dp", "all_gather"] / wide.sent["dp", "all_gather"]
        assert 0.5 < less < 0.58  # embedding, head, norms and router


@pytest.mark.parametrize(
    "text", mark_share(4, ["dp2 ep2 zero1 mbs2", "dp2 tp2 ep2 etp2 zero1 mbs2", "tp2 etp2 mbs2 ac=full"])
)
def test_rows_dispatched_in_fp8_give_the_same_products(forked: Callable[..., list[Any]], text: str) -> None:
    """Forward bit for bit. Backward too but for what a tile holds below 2⁻¹⁴ of its largest."""
    layout = Layout.parse(text)
    there: list[Ran] = forked(layout.world, ran, ROUTED, layout, TILES, 0, "wide")
    here: list[Ran] = forked(layout.world, ran, ROUTED, layout, TILES)
    for wide, thin in zip(there, here, strict=True):
        assert thin.losses[0] == wide.losses[0]
        assert thin.losses == pytest.approx(wide.losses, rel=1e-5)
        for name, gradient in wide.gradients.items():
            if ".experts." not in name:
                assert torch.equal(thin.gradients[name], gradient), name
            error = (thin.gradients[name] - gradient).norm() / gradient.norm()
            assert error <= 1e-4, name  # scales that are no powers of two: 0.04
        for axis, collective in {("ep", "all_to_all"), ("etp", "all_gather")} & wide.sent.keys():
            assert thin.sent[axis, collective] < wide.sent[axis, collective]


@pytest.mark.long  # the test above compares the products to the bit
@pytest.mark.parametrize(
    ("model", "text", "precision"),
    mark_share(2, [(DENSE, "dp4 zero3 mbs1", WIRE), (ROUTED, "dp2 ep2 zero3 mbs2", TILES)]),
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_training_with_fp8_gathers_equals_one_process(
    forked: Callable[..., list[Any]], model: Model, text: str, precision: Recipe
) -> None:
    """By another order of sums, and of operands of which those in fp8 share a scale on each rank."""
    layout = Layout.parse(text)
    (alone,) = forked(1, ran, model, Layout.parse(f"mbs{layout.mbs}"), precision, 4)
    for item in forked(layout.world, ran, model, layout, precision, 4):
        assert item.losses == pytest.approx(alone.losses, rel=1e-3)


def resume(directory: Path, first: int, last: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of the steps from ``first`` on, after what is in ``directory``, and the weights that are left there."""
    layout = Layout.parse("dp2 ep2 zero3 mbs1")
    job = Job(sequence=TOKENS, global_batch=4, precision=TILES, emulate=True)
    model = ROUTED.replace(layers=1)
    built = build(model=model, layout=layout, job=job, device=torch.device("cpu"))
    engine, losses = Engine(built, model=model, layout=layout, job=job), []
    for step in range(first, last):
        if step == first and (path := find_latest(directory)):
            engine.evaluate(torch.zeros(1, 1, TOKENS + 1, dtype=torch.long))  # with scales of other weights
            load(path, built=built, model=model, job=job)
        tokens = torch.randint(0, 83, (4, TOKENS + 1), generator=torch.Generator().manual_seed(step))
        losses.append(engine.step(tokens.view(2, 2, 1, -1)[:, built.ranks["dp"].rank]).loss)
        engine.zero_grad()
    progress = RunProgress(step=last, samples=0, tokens=0)
    save(directory, built=built, progress=progress, model=model, layout=layout, job=job)
    return losses, {shard.name: shard.weight.detach().clone() for shard in built.shards}


@pytest.mark.long  # three runs
def test_a_run_with_fp8_gathers_resumes_from_its_checkpoint(forked: Callable[..., list[Any]], tmp_path: Path) -> None:
    """To the bit: scales are of the weights that were read, not of those before."""
    whole = forked(2, resume, tmp_path / "whole", 0, 2)
    forked(2, resume, tmp_path / "parts", 0, 1)
    parts = forked(2, resume, tmp_path / "parts", 1, 2)
    for (losses, weights), (later, left) in zip(whole, parts, strict=True):
        assert losses[1:] == later
        assert are_equal(weights, left)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32), st.sampled_from([1e-6, 0.02, 3e3]), st.booleans())
def test_casting_a_dequantized_tensor_again_changes_nothing(seed: int, spread: float, by_rows: bool) -> None:
    """Of bf16 values: the largest of what shares a scale comes back to the bit."""
    x = (torch.randn(130, 200, generator=torch.Generator().manual_seed(seed)) * spread).bfloat16()
    for cast in (cast_per_tile,) if by_rows else (cast_per_tensor, cast_per_block):
        first = cast(x)
        again = cast(widen(first, torch.bfloat16))
        assert torch.equal(first.data.view(torch.uint8), again.data.view(torch.uint8))
        assert torch.equal(widen(again, torch.float32), widen(first, torch.float32))
        whole = first.data.bfloat16()
        scale_(whole, first.scale)
        assert torch.equal(whole, widen(first, torch.bfloat16))


@pytest.mark.parametrize(
    ("name", "fields", "pattern"),
    [
        (
            "bf16",
            {"gathers": "fp8"},
            "gathers='fp8' needs a master copy and fp8 matmuls by tensor or by tiles, not bf16",
        ),
        ("fp8-rowwise", {"gathers": "fp8"}, "scaling='rowwise' and master_bytes=4; use 'fp8-wire'"),
        ("fp8-te", {"gathers": "fp8"}, "master_bytes=0; use 'fp8-wire', or gathers='weights'"),
        (
            "fp8",
            {"dispatches": "fp8"},
            "dispatches='fp8' needs .* scaling='tiles', .*; use 'fp8-tiles-wire'",
        ),
    ],
)
def test_fp8_gather_with_unequal_casts_is_an_error(name: str, fields: dict[str, Any], pattern: str) -> None:
    with pytest.raises(UserError, match=pattern):
        get_recipe(name).replace(**fields)


def test_a_rank_without_rows_of_a_weight_has_no_maxima_in_a_dry_run() -> None:
    """The kernel returns an empty tensor, but its shape function raises."""
    with FakeTensorMode():
        assert fp8_gather._row_amax(torch.zeros(0, 44), 1).shape == (0, 1)
    assert fp8_gather._row_amax(torch.zeros(0, 256), 2).shape == (0, 2)

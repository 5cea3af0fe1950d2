"""2D tensor parallelism: a layer simulated rank by rank equals the full layer, and every count what it has sent.

tp = x·y: what a layer makes is cut over x, the stream's width over y (2D weight-stationary: arXiv:2211.05102 §3.2.2;
arXiv:2104.05343 cuts matmuls so too). Formulas: docs/explanation/decisions/013.
"""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.mesh import group
from fivefold.layout.sharding import shard_weight
from fivefold.layout.spec import Layout
from fivefold.layout.validity import list_reasons
from fivefold.layout.validity.two_dimensional import explain_unsupported_2d
from fivefold.machine.catalog import resolve
from fivefold.model.catalog import build_model
from fivefold.model.experts import MoE
from fivefold.model.spec import Model
from fivefold.model.weights import list_weights
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.operations.layer import Kind
from fivefold.planner.counts.operations.local_shapes import get_local_degrees
from fivefold.planner.counts.traffic import list_messages
from fivefold.planner.predict import Planner, predict
from fivefold.planner.ratios.exchanges import build_tensor_exchange
from fivefold.planner.search import search
from fivefold.planner.search.bounds import Bounds
from fivefold.planner.search.space import Space
from fivefold.step import count_sent_bytes
from tests.planner.search.test_space import DENSE, JOB, list_leaves

Floats = NDArray[np.float64]
T, D, N, K, H, F = 16, 32, 8, 8, 4, 64
SMALL = Model(name="small", layers=1, width=D, heads=N, kv_heads=K, head_dim=H, ffn=F, vocab=96)
CUTS = [(2, 2), (4, 2), (2, 4)]


class Grid:
    """x · y ranks that speak; ``sent``: payload in elements of each message, by group and collective."""

    def __init__(self, x: int, y: int) -> None:
        self.x, self.y = x, y
        self.sent: list[tuple[str, str, int]] = []

    def gather(self, parts: dict[tuple[int, int], Floats], *, over: str, dim: int) -> dict[tuple[int, int], Floats]:
        """Each rank gets the parts of its group, joined along ``dim``."""
        result = {(i, j): np.concatenate([parts[m] for m in self._members(i, j, over)], axis=dim) for i, j in parts}
        self.sent.append((over, "all_gather", result[0, 0].size))
        return result

    def scatter(self, parts: dict[tuple[int, int], Floats], *, over: str, dim: int) -> dict[tuple[int, int], Floats]:
        """Each rank gets its part along ``dim`` of its group's sum."""
        self.sent.append((over, "reduce_scatter", parts[0, 0].size))
        result = {}
        for i, j in parts:
            total = sum(parts[m] for m in self._members(i, j, over))
            count, place = (self.x, i) if over == "tp_outer" else (self.y, j)
            result[i, j] = np.split(np.asarray(total), count, axis=dim)[place]
        return result

    def _members(self, i: int, j: int, over: str) -> list[tuple[int, int]]:
        return [(m, j) for m in range(self.x)] if over == "tp_outer" else [(i, m) for m in range(self.y)]


def draw_inputs(*shape: int) -> Floats:
    return np.random.default_rng(sum(shape)).standard_normal(shape)


@pytest.mark.parametrize(("x", "y"), CUTS)
def test_sharded_column_and_row_layers_equal_the_full_layers(x: int, y: int) -> None:
    """q and out, with the identity for attention: values are those of one rank, messages those that are counted."""
    stream, first, second = draw_inputs(T, D), draw_inputs(D, N * H), draw_inputs(N * H, D)
    grid, ranks = Grid(x, y), list(product(range(x), range(y)))
    rows, wide = T // x, D // y
    mine = {(i, j): stream[rows * i : rows * (i + 1), wide * j : wide * (j + 1)] for i, j in ranks}
    made = N * H // x
    whole = grid.gather(mine, over="tp_outer", dim=0)
    q = {(i, j): whole[i, j] @ first[wide * j : wide * (j + 1), made * i : made * (i + 1)] for i, j in ranks}
    heads = grid.scatter(q, over="tp_inner", dim=1)
    assert all(part.shape == (T, N * H // (x * y)) for part in heads.values())
    read = grid.gather(heads, over="tp_inner", dim=1)
    out = {(i, j): read[i, j] @ second[made * i : made * (i + 1), wide * j : wide * (j + 1)] for i, j in ranks}
    result = grid.scatter(out, over="tp_outer", dim=0)
    exact = stream @ first @ second
    for i, j in ranks:
        part = exact[rows * i : rows * (i + 1), wide * j : wide * (j + 1)]
        np.testing.assert_allclose(result[i, j], part, rtol=1e-10, atol=1e-10)
    job = Job(sequence=T, global_batch=1)
    ops = Counts(SMALL, job).unit(get_local_degrees(Layout(tp=x * y, tp_inner=y)), Kind(slides=False, moe=False)).ops
    counted = {op.name: op.message for op in ops if op.message and op.message.axis.startswith("tp_")}
    names = ("norm1.out.gather", "attention.q.reduce", "o.gather", "attention.out.reduce")
    said = [(counted[name].axis, counted[name].forward, counted[name].payload // 2) for name in names]
    assert said == grid.sent


@pytest.mark.parametrize(("x", "y"), CUTS)
@pytest.mark.parametrize("mlp", ["gated", "plain"])
def test_messages_of_a_layer_under_2d_tensor_parallelism_follow_the_formula(x: int, y: int, mlp: str) -> None:
    """[4·D·(x−1) + (3·F + 2·(N+K)·H)·(y−1)] / tp elements a token forward (without a gate 2·F), and sums of norms."""
    tp, job = x * y, Job(sequence=T, global_batch=1)
    model = SMALL.replace(mlp=mlp)
    ops = Counts(model, job).unit(get_local_degrees(Layout(tp=tp, tp_inner=y)), Kind(slides=False, moe=False)).ops
    sent = 0.0
    for op in ops:
        if op.message and op.kind != "norm":
            ranks = x if op.message.axis == "tp_outer" else y
            sent += count_sent_bytes(op.message.forward, payload=op.message.payload, ranks=ranks)
    made = (3 if mlp == "gated" else 2) * F + 2 * (N + K) * H
    assert sent == 2 * T * (4 * D * (x - 1) + made * (y - 1)) // tp
    assert [op.message for op in ops if op.kind == "norm"] == [
        ("tp_inner", "all_reduce", "all_reduce", 4 * T // x, 1, "", None, 1, None, ())
    ] * 2


@pytest.mark.parametrize("name", ["bf16", "fp8", "fp8-tiles"])
@pytest.mark.parametrize(("x", "y"), CUTS)
def test_ratios_price_the_messages_that_are_counted(name: str, x: int, y: int) -> None:
    """The output projection: its input gathered over y, its output scattered over x."""
    job, layout = Job(sequence=T, global_batch=1, precision=name), Layout(tp=x * y, tp_inner=y)  # type: ignore[arg-type]
    ops = Counts(SMALL, job).unit(get_local_degrees(layout), Kind(slides=False, moe=False)).ops
    counted = {op.name: op.message for op in ops if op.message}
    priced = build_tensor_exchange(SMALL, job, layout)
    for transfer, message in zip(priced.transfers, (counted["o.gather"], counted["attention.out.reduce"]), strict=True):
        place = group(layout, message.axis)
        assert transfer.bytes == count_sent_bytes(message.forward, payload=message.payload, ranks=place.ranks)
        assert transfer.span == place.ranks * place.stride
    (out,) = (op for op in ops if op.name == "attention.out")
    assert out.flops == priced.flops


@pytest.mark.parametrize(("x", "y"), CUTS)
def test_ranks_hold_all_weights_and_do_all_work_together(x: int, y: int) -> None:
    model = SMALL.replace(layers=2, qkv_bias=True, out_bias=True, mlp_bias=True, norm="layernorm")
    layout = Layout(tp=x * y, tp_inner=y)
    cuts = {weight.name: shard_weight(weight, model=model, layout=layout, vocab=96) for weight in list_weights(model)}
    for weight in list_weights(model):
        pieces = {"norm": y, "bias": x * y if ".q." in weight.name or "up" in weight.name else None}.get(weight.kind)
        if len(weight.shape) == 2:
            assert cuts[weight.name].numel * x * y == weight.numel
        elif pieces:
            assert cuts[weight.name].numel * pieces == weight.numel
    assert cuts["blocks.0.mlp.down.bias"].numel * y == D
    job = Job(sequence=T, global_batch=1)
    plain, two = (
        Counts(model, job).unit(get_local_degrees(item), Kind(False, False)).ops for item in (Layout(), layout)
    )
    assert sum(op.flops for op in two) * x * y == sum(op.flops for op in plain)


def test_norms_are_summed_only_over_the_outer_ranks() -> None:
    """Their gradients, once a step; sums of their rows go over the inner ranks, forward and backward."""
    job, layout = Job(sequence=T, global_batch=2), Layout(dp=2, tp=4, tp_inner=2, zero=1)
    result = Counter[tuple[str, int]]()
    for message in list_messages(Counts(SMALL, job), layout):
        if message.collective == "all_reduce" and message.axis == "tp":
            result[message.group, message.payload] += message.times
    held = 4 * D // 2 // 2  # bytes of a norm's gradient in fp32: half of the width, and of that half under zero1
    assert result == {
        ("tp_outer", 2 * held): 1,
        ("tp_outer", held): 1,  # of the block, of the head
        ("tp_inner", 4 * T // 2): 2 * 3,
        ("tp", 4 * T): 3,  # the loss
    }


LLAMA, H100 = build_model("llama3-70b"), resolve("h100:512", local=Path("/nowhere"))
BIG = Job(sequence=8192, global_batch=2048)


def test_a_step_in_two_dimensions_sends_less_and_gains_little() -> None:
    """Decision 013: 10 to 13 % of the messages' bytes of a layer's forward; of a step next to nothing."""
    one, two = (
        predict(model=LLAMA, machine=H100, layout=Layout.parse(f"dp16 {tp} pp4 v2 zero1 mbs1"), job=BIG)
        for tp in ("tp8", "tp4x2")
    )
    sent = [sum(item.bytes for item in step.traffic if item.axis == "tp") for step in (one, two)]
    assert 0.8 < sent[1] / sent[0] < 0.9
    assert two.time.step_seconds == pytest.approx(one.time.step_seconds, rel=0.03)
    assert two.work == one.work
    assert two.memory.peak_bytes == pytest.approx(one.memory.peak_bytes, rel=0.02)
    for text in ("dp16 tp4x2 pp4 zero3 mbs1 ac=full", "dp8 tp8x2 pp4 zb1p mbs1 ac=selective"):
        assert predict(model=LLAMA, machine=H100, layout=Layout.parse(text), job=BIG).memory.peak_bytes > 0


@pytest.mark.parametrize(
    ("changes", "text", "pattern"),
    [
        ({}, "tp2x2 nosp", "is not supported with nosp; try 'dp1 tp4 zero0 mbs1 nosp'"),
        ({"moe": MoE(experts=4, topk=2, ffn=32)}, "tp2x2", "is not supported with experts; try 'dp1 tp4 "),
        ({"kv_heads": 2}, "tp4x2", "kv_heads=2 are neither a multiple of tp=8 nor 4, its outer degree; try tp2x4"),
        ({"width": 34, "head_dim": 4}, "tp2x4", "width=34 is not divisible by the inner 4 of tp2x4"),
    ],
)
def test_uncounted_combination_is_a_one_line_error(changes: dict[str, object], text: str, pattern: str) -> None:
    model, machine = SMALL.replace(**changes), resolve("h100:8", local=Path("/nowhere"))
    with pytest.raises(UserError, match=pattern) as error:
        predict(model=model, machine=machine, layout=Layout.parse(text), job=Job(sequence=T, global_batch=1))
    assert "\n" not in str(error.value)


def test_the_search_has_every_cut_that_is_counted() -> None:
    space = Space(DENSE, JOB, world=4, recomputations=("none",), placements=False, two_dimensional=True)
    leaves = list_leaves(space)
    layouts = {space.layout(space.partials, leaves, at) for at in range(len(leaves.partial))}
    flat = {layout.replace(tp_inner=1) for layout in layouts if layout.tp == 4}
    expected = {item.replace(tp_inner=2) for item in flat if item.sp}
    assert {layout for layout in layouts if layout.tp_inner > 1} == {
        item
        for item in expected
        if explain_unsupported_2d(item, model=DENSE, job=JOB) is None
        and next(list_reasons(item, model=DENSE, job=JOB, machine=None), None) is None
    }
    assert any(layout.tp_inner > 1 for layout in layouts)


def test_no_bound_exceeds_the_estimate_in_two_dimensions() -> None:
    machine = resolve("h100:8", local=Path("/nowhere"))
    planner = Planner(model=DENSE, machine=machine, job=JOB)
    space = Space(DENSE, JOB, world=8, placements=False, two_dimensional=True)
    leaves = list_leaves(space)
    some = leaves.take(np.flatnonzero(space.partials.inner[leaves.partial] > 1)[::11])
    bounds = Bounds(planner, space, space.partials)
    memory, seconds = bounds.memory(some), bounds.seconds(some)[0]
    assert len(memory) > 20
    for at in range(len(memory)):
        result = planner.estimate(space.layout(space.partials, some, at))
        assert memory[at] <= max(rank.peak_bytes for rank in result.ranks)
        assert seconds[at] <= result.step_time.seconds * (1 + 1e-9)


def test_the_search_ranks_two_dimensions_among_the_others() -> None:
    """In a rack, with a batch that leaves nothing else to cut: each by its predicted time."""
    job, rack = Job(sequence=8192, global_batch=1), resolve("gb200:32", local=Path("/nowhere"))
    result = search(
        model=LLAMA, machine=rack, job=job, top=20, axes=("tp",), recomputations=("none",), two_dimensional=True
    )
    texts = [item.step.layout for item in result.best]
    seconds = [item.step.time.step_seconds for item in result.best]
    assert {"dp1 tp8x4 zero0 mbs1", "dp1 tp32 zero0 mbs1"} <= set(texts)
    assert seconds == sorted(seconds)
    for text, took in zip(texts, seconds, strict=True):
        step = predict(model=LLAMA, machine=rack, layout=Layout.parse(text), job=job)
        assert step.time.step_seconds == pytest.approx(took)

"""Casts around the products of linear layers: their bytes by hand, and as the trainer makes them."""

from __future__ import annotations

import pytest
import torch

from fivefold.job import Job, get_recipe
from fivefold.model.spec import Model
from fivefold.planner.counts.operations.linear import LinearInput, add_casts
from fivefold.planner.counts.operations.local_shapes import Local, LocalDegrees
from fivefold.planner.counts.operations.op import Float8Casts, Op, matmul
from fivefold.stack.catalog import build_stack
from fivefold.trainer.model.float8.cast import Cast
from fivefold.trainer.model.float8.matmul import Float8Gemms

MODEL = Model(name="m", layers=1, width=64, heads=4, kv_heads=4, head_dim=16, ffn=128, vocab=100)
ROWS, INTO, OUTOF = 300, 200, 130


def count_work(name: str, *, linears: str = "fused_backward", first: bool = True) -> Float8Casts:
    job = Job(precision=get_recipe(name), linears=linears)  # type: ignore[arg-type]
    op = matmul("mlp.up", "x", "u", rows=ROWS, in_features=INTO, out_features=OUTOF, width=2)
    return add_casts(op, Local(MODEL, job, LocalDegrees(sequences=1)), first=first).casts


def test_bytes_of_fp8_casts_and_scales_equal_those_by_hand() -> None:
    """x [300, 200], W [130, 200], g [300, 130]: tiles of 128 along the sum, of weights 128 x 128; rows one each."""
    numels = (300 * 200, 130 * 200, 300 * 130, 200 * 130, 300 * 200 * 2, 200 * 300, 130 * 300)
    tiles = (4 * 300 * 2, 4 * 2 * 2, 4 * 300 * 2, 4 * 2 * 2, 0, 4 * 200 * 3, 4 * 130 * 3)
    rows = (4 * 300, 4 * 130, 4 * 300, 4 * 200, 0, 4 * 200, 4 * 130)
    ones = (4, 4, 4, 4, 0, 4, 4)
    for name, scales in (("fp8-tiles", tiles), ("fp8-rowwise", rows), ("fp8", ones)):
        assert count_work(name) == tuple(map(sum, zip(numels, scales, strict=True)))
    careful = count_work("fp8-rowwise-gw")  # dW of what is not cast; one scale for the weight of dx
    assert careful[3:] == (200 * 130 + 4, 300 * 200 * 2, 0, 0)
    assert count_work("fp8", first=False)[::5] == (0, 0)  # x is cast once for all layers on it
    assert count_work("bf16") == count_work("fp8", linears="separate") == Float8Casts()


@pytest.mark.parametrize("name", ["fp8", "fp8-rowwise", "fp8-rowwise-gw", "fp8-tiles"])
def test_the_trainer_allocates_as_many_bytes_of_casts_as_counted(name: str) -> None:
    engine = Float8Gemms(get_recipe(name), kernel=False)
    x, w, g = torch.ones(ROWS, INTO), torch.ones(OUTOF, INTO), torch.ones(ROWS, OUTOF)
    made = [engine.operand(x), engine.casts.weight(w), engine.casts.gradient(g), engine.casts.weight_back(w.t())]
    columns = engine.columns(x)
    if isinstance(columns, Cast):
        made += [columns, engine.casts.gradient(g.t())]
    planned = count_work(name)
    assert [cast.data.nbytes + cast.scale.nbytes for cast in made] == [
        size for size in (*planned[:4], planned.columns, planned.gradient_columns) if size
    ]


def test_other_software_keeps_the_cast_output_gradient_for_a_deferred_dw() -> None:
    job = Job(precision="fp8", stack=build_stack("megatron-core"))
    op = matmul("layer", "x", "y", rows=ROWS, in_features=INTO, out_features=OUTOF, width=2)
    assert add_casts(op, Local(MODEL, job, LocalDegrees(sequences=1))).wgrad_operand_bytes == ROWS * OUTOF + 4
    assert (
        add_casts(op, Local(MODEL, job.replace(precision="bf16"), LocalDegrees(sequences=1))).wgrad_operand_bytes == 0
    )


def list_column(name: str, *, stack: str, tp: int = 2) -> tuple[Op, ...]:
    """Return the gather, if there is one, and the matmul of a column-parallel layer."""
    local = Local(
        MODEL, Job(precision=get_recipe(name), stack=build_stack(stack)), LocalDegrees(sequences=1, tp=tp, sp=True)
    )
    source = LinearInput(local, "x", in_features=INTO, rows=ROWS)
    return (*source.ops, source.column("mlp.up", "u", out_features=OUTOF))


@pytest.mark.parametrize("name", ["fp8-rowwise", "fp8-rowwise-gw"])
def test_torchao_sends_and_keeps_inputs_in_16_bits_if_rows_have_scales(name: str) -> None:
    """As float8_linear.py and float8_tensor_parallel.py of torchao, and as bf16."""
    for tp in (1, 2):
        rowwise, wide = list_column(name, stack="torchtitan", tp=tp), list_column("bf16", stack="torchtitan", tp=tp)
        assert [op.message for op in rowwise] == [op.message for op in wide]
        assert [op.keeps for op in rowwise] == [op.keeps for op in wide]
        assert [op.writes for op in rowwise] == [op.writes for op in wide]
    (gather,) = [op.message for op in list_column("fp8", stack="torchtitan") if op.message]
    assert gather.payload < 0.6 * rowwise[0].message.payload  # one scale: the cast is sent
